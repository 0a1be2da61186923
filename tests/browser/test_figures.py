"""Figures on pages: in JupyterLab and Notebook 7, trusted or not, with and without the extension that has the rules of
pictures, light and dark, and in what nbconvert writes. In a real browser."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import nbformat
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image

import nbddp
from docs.gallery import of_forecast, of_memory, of_program
from docs.gallery import recording as gallery
from nbddp.analysis.placement import planned
from nbddp.analysis.quantities import MOST
from nbddp.analysis.wait_time import BUS_FACTOR
from nbddp.capabilities.bench import figure as bench_figure
from nbddp.capabilities.bench.figure import draw_bench
from nbddp.capabilities.bench.result import Measured
from nbddp.capabilities.forecast import figure as forecast_figure
from nbddp.capabilities.memory import figure as memory_figure
from nbddp.capabilities.timings import figure as timings_figure
from nbddp.capabilities.topology.figure import LOOKS, draw_topology
from nbddp.figures.axes import Inside
from nbddp.figures.figure import DescribedFigure
from nbddp.figures.html import PICTURE, POINTED, STYLE, picture
from nbddp.figures.page_script import list_arrow
from nbddp.figures.palette import BACKWARD, FILLS, FORWARD, FRAME, INK, MOVES, MUTED, OPTIMIZER, PAPER, TINTS, WAITS
from tests.browser.test_browser import PATIENCE, SETTINGS, jupyterlab, places, set_to, sync_api, until
from tests.colours import contrast, in_the_dark
from tests.lessons.answers import NOTEBOOKS
from tests.looks.front_ends import BESIDE, EXTENSIONS, SWITCHED
from tests.pool.test_timings import recording
from tests.unit.test_trace import assert_in_order

PAGES = {"JupyterLab": "#111111", "high contrast": "#000000", "VS Code": "#1f1f1f"}  # behind an output, dark
CHANGE = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
BEHIND = {"Light": (255, 255, 255), "Dark": (17, 17, 17)}  # behind a notebook's output in JupyterLab


def some() -> DescribedFigure:
    return draw_bench([Measured("all_reduce", 1 << k, 4, (k * 1e-4, k * 2e-4)) for k in range(10, 20)])


# -- colours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", PAGES.values(), ids=PAGES)
def test_what_can_be_read_in_light_can_be_read_in_the_dark(behind: str) -> None:
    """Texts on the page and on every fill that has text, where that is readable in light."""
    fills = {
        PAPER,
        FRAME,
        *FILLS,
        *TINTS,
        MOVES,
        WAITS,
        forecast_figure.COMPUTE,
    }
    fills |= {its.fill for its in LOOKS.values() if its.fill != "none"} | {s[0] for s in memory_figure.STYLES.values()}
    inks = {INK, PAPER, *FILLS, *(its.text for its in LOOKS.values()), *(s[3] for s in memory_figure.STYLES.values())}
    assert min(contrast(ink, PAPER) for ink in inks - {PAPER}) >= 4.5
    seen = [(a, b) for a, b in product(inks, fills) if contrast(a, b) >= 4.6]
    assert {(INK, FRAME), (MUTED, FRAME), (PAPER, FILLS[1]), (INK, MOVES)} <= set(seen)
    for ink, fill in seen:
        assert contrast(in_the_dark(ink, behind), in_the_dark(fill, behind)) >= 4.5, (ink, fill)
    assert in_the_dark(PAPER, behind) == behind, "no slab"


# -- the bundle --------------------------------------------------------------------------------


def test_words_and_table_are_in_the_html_and_not_twice_in_the_text() -> None:
    shown = some()
    bundle, metadata = shown._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    assert bundle["text/plain"] == shown.words == metadata["image/png"]["alt"]
    assert bundle["text/html"].count("bus bandwidth reaches") == 1
    assert bundle["text/html"].count("<table>") == 1
    assert 'alt="Bus bandwidth by size of the buffer"' in bundle["text/html"]
    plain = draw_topology(planned(nnodes=2, gpus_per_node=4))
    assert "<table>" not in plain._repr_mimebundle_()[0]["text/html"]


def timeline() -> DescribedFigure:
    return timings_figure.draw_timings(gallery(8, 8), 20)


PHASES = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}


def test_every_rank_bucket_and_step_of_a_timeline_has_words() -> None:
    made, shown = gallery(8, 8), timeline()
    step, said = made.step(20), [area.words for area in shown.areas]
    for rank, mine in step.items():
        assert any(
            re.match(rf"rank {rank} · step 20: .* of it exposed communication\nlast to send \d+ of 13", s) for s in said
        )
        for bucket in mine.buckets:
            (words,) = (s for s in said if s.startswith(f"rank {rank} · bucket {bucket.index} "))
            first = ", ".join(bucket.names[:2])
            assert first in words, words
            assert re.search(r"\nwaits .* moves .*\n.*, from .* ms to .* ms$", words), words
    for number in made.numbers():
        assert any(s.startswith(f"step {number}: ") and f"%ddp timings --step {number} draws it" in s for s in said)
    spots = shown.spots()
    assert len(spots) == len(said)
    assert all(0 <= s.left <= s.left + s.width <= 1.001 and 0 <= s.top <= s.top + s.height <= 1.001 for s in spots)


def test_what_is_kept_of_a_figure_that_was_shown_is_bytes_and_words() -> None:
    """A notebook keeps what its cells return: some 15 MiB for each `%ddp timings`, if that were the figure."""
    shown = timeline()
    first, _ = shown._repr_mimebundle_()
    assert shown._figure is None
    assert len(pickle.dumps(shown)) < 600_000, "with the steps that a click draws"
    assert shown._repr_mimebundle_()[0] == first
    assert PICTURE not in first["text/html"]
    figure = shown.figure
    assert figure is shown.figure, "made again, and kept for whoever asked"
    assert shown._repr_mimebundle_()[0]["image/png"] == first["image/png"]
    assert PICTURE in shown._repr_mimebundle_()[0]["text/html"], "the picture, which may be changed"
    figure.axes[0].set_title("mine")
    assert shown._repr_mimebundle_()[0]["image/png"] != first["image/png"], "what is changed is shown"


@pytest.mark.every(3)
@pytest.mark.parametrize("drawn", [some, of_program, of_forecast, of_memory, lambda: draw_topology(planned(nproc=2))])
def test_each_figure_is_let_go_and_made_again(drawn: Callable[[], DescribedFigure]) -> None:
    shown = drawn()
    before = shown.png()
    assert shown._figure is None
    assert len(shown._again) < 100_000
    assert len(shown.figure.axes) > 0
    assert shown.png() == before


# -- axes and legends ----------------------------------------------------------------------------


def boxes(shown: DescribedFigure) -> Any:
    """The drawn figure's renderer, in whose pixels boxes are."""
    canvas = FigureCanvasAgg(shown.figure)
    canvas.draw()
    return canvas.get_renderer()


def test_times_are_labelled_with_units_at_round_numbers() -> None:
    shown = draw_bench([Measured("all_reduce", 1 << k, 4, (10.0 ** (k - 6),)) for k in range(7)])
    boxes(shown)
    axis = shown.figure.axes[0].yaxis
    assert [t.get_text() for t in axis.get_ticklabels()] == [
        "1 µs",
        "10 µs",
        "100 µs",
        "1 ms",
        "10 ms",
        "100 ms",
        "1 s",
    ]
    assert not axis.get_minorticklocs().size
    assert bench_figure.round_numbers(0.9e-3, 0.035) == [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
    assert bench_figure.round_numbers(1e-9, 100) == [1e-9, 1e-7, 1e-5, 1e-3, 0.1, 10.0, 1000.0]
    assert bench_figure.round_numbers(2e-3, 2e-3) == [0.002, 0.005]
    assert bench_figure.round_numbers(0, 1) == []


def test_the_legend_of_a_benchmark_stands_outside_its_axes() -> None:
    shown = draw_bench([Measured(c, 1 << k, 4, (k * 1e-4,)) for c in list(BUS_FACTOR)[:7] for k in range(10, 20)])
    renderer = boxes(shown)
    (legend,) = shown.figure.legends
    place = legend.get_window_extent(renderer)
    assert not any(place.overlaps(axes.get_tightbbox(renderer)) for axes in shown.figure.axes)


@pytest.mark.every(3)
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_each_label_of_a_timeline_lies_inside_its_bar_and_has_its_colour(ranks: int) -> None:
    shown = timings_figure.draw_timings(gallery(ranks, 8), 20)
    renderer = boxes(shown)
    timeline = shown.figure.axes[0]
    labels = [t for t in timeline.get_children() if isinstance(t, Inside)]
    assert len(labels) == ranks * (3 + 13)
    written = [t for t in labels if t.get_text()]
    assert {"forward", "backward", "12"} <= {t.get_text().split(" ")[0] for t in written}
    assert len(written) > len(labels) / 2
    for label in written:
        box = label.get_bbox_patch().get_window_extent(renderer)
        bar = label.bar.get_window_extent(renderer)
        assert box.x0 >= bar.x0, label
        assert box.x1 <= bar.x1, label
        assert box.y0 >= bar.y0, label
        assert box.y1 <= bar.y1, label
        assert to_hex(label.get_bbox_patch().get_facecolor()) == to_hex(label.bar.get_facecolor())
        assert contrast(to_hex(label.get_color()), to_hex(label.bar.get_facecolor())) >= 4.5


def test_a_bar_without_room_has_no_label() -> None:
    """Rank 3 of the gallery is late: its buckets move at once, in bars that are narrower than two digits."""
    shown = timings_figure.draw_timings(gallery(8, 8), 20)
    boxes(shown)
    labels = [t for t in shown.figure.axes[0].get_children() if isinstance(t, Inside)]
    narrow = [t for t in labels if t.bar.get_width() < 0.35]
    assert len(narrow) == 13
    assert not any(t.get_text() for t in narrow)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 5), (16, 12)])
def test_nothing_runs_through_what_is_written_on_a_timeline(ranks: int, steps: int) -> None:
    shown = timings_figure.draw_timings(recording(ranks, steps), steps - 1)
    renderer = boxes(shown)
    timeline, curves = shown.figure.axes
    assert all(float(at).is_integer() for at in curves.get_xticks())
    legend = curves.get_legend().get_window_extent(renderer)
    lines = [line.get_window_extent(renderer) for line in curves.lines]
    assert not any(legend.overlaps(line) for line in lines)
    assert not legend.overlaps(timeline.get_tightbbox(renderer))
    notes = [t.get_window_extent(renderer) for t in timeline.texts if t.get_text().startswith("exposed")]
    assert len(notes) == min(ranks, MOST)
    bars = [b.get_window_extent(renderer) for b in (*timeline.patches, *timeline.lines)]
    gap = 1.0  # points, more than half of what a bar's line is wide
    assert not any(note.padded(gap * renderer.dpi / 72).overlaps(bar) for note in notes for bar in bars)


def test_no_picture_of_the_gallery_contradicts_itself() -> None:
    for ranks in (8, 16):
        for steps in gallery(ranks, 8).steps.values():
            for step in steps:
                assert_in_order(step)


# -- the browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def book() -> Any:
    return notebook_of(some())


def notebook_of(shown: DescribedFigure) -> Any:
    """With the picture: somebody has taken the figure, and may have changed it."""
    assert shown.figure
    data, metadata = shown._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data, metadata=metadata)
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("", outputs=[output])],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, book: Any) -> Iterator[tuple[Path, Any]]:
    """Its folders and its server, with one notebook that is trusted and one that is not."""
    base = tmp_path_factory.mktemp("lab")
    folder = base / "books"
    folder.mkdir()
    for name in ("trusted", "strange"):
        for kind, made in (("", book), ("-timeline", notebook_of(timeline()))):
            made.cells[0].source = name  # or the signature of one would be that of the other
            nbformat.write(made, folder / f"{name}{kind}.ipynb")
    trust = [sys.executable, "-m", "jupyter", "trust", *map(str, folder.glob("trusted*.ipynb"))]
    subprocess.run(trust, env=os.environ | places(base), check=True, capture_output=True)
    with jupyterlab(base, folder, SETTINGS, more=BESIDE) as server:
        yield base, server


WIDTHS = (640, 1000, 1400)  # pixels of a page
# Of each picture: whether it has a box of its own to scroll in if it is wider than the page, and its words are folded
PICTURES = """all => all.map(image => {
  const output = image.closest('.jp-OutputArea-output'), sheet = image.closest('.nbddp-sheet');
  return {wide: output.scrollWidth > output.clientWidth + 1, drawn: image.naturalWidth / image.width,
          scrolls: getComputedStyle(sheet).overflowX, open: output.querySelectorAll('details[open]').length};
})"""


# Of each drawing: it does not leave its output, and its parts are on the page
DRAWINGS = """all => all.map(figure => {
  const output = figure.closest('.jp-OutputArea-output');
  return {wide: output.scrollWidth > output.clientWidth + 1, live: figure.querySelector('svg [data-i]') !== null,
          scheme: getComputedStyle(figure).colorScheme};
})"""


@pytest.mark.looks
@pytest.mark.timeout(1800)
def test_figures_of_all_lessons_fit_three_widths_and_follow_the_theme(browser: Any, tmp_path: Path) -> None:
    """Set NBDDP_LOOKS to a folder to keep the pictures."""
    keep, folder = os.environ.get("NBDDP_LOOKS"), tmp_path / "books"
    shutil.copytree(NOTEBOOKS / "solutions", folder, ignore=shutil.ignore_patterns("__pycache__"))
    books = sorted(folder.glob("*.ipynb"))
    trust = [sys.executable, "-m", "jupyter", "trust", *map(str, books)]
    subprocess.run(trust, env=os.environ | places(tmp_path), check=True, capture_output=True)
    count = drawn = 0
    with jupyterlab(tmp_path, folder, SETTINGS, more=BESIDE) as server:
        for book in books:
            page = browser.new_page(viewport={"width": WIDTHS[0], "height": 12_000})
            page.set_default_timeout(1000 * PATIENCE)
            page.goto(f"{server['url']}doc/tree/{book.name}?token={server['token']}")
            images = page.locator(f"img.{PICTURE}")
            sync_api.expect(images).to_have_count(count_of(book, f'<img class="{PICTURE}"'), timeout=1000 * PATIENCE)
            drawings = page.locator(".nbddp-figure")
            sync_api.expect(drawings).to_have_count(count_of(book, 'class="nbddp-figure"'), timeout=1000 * PATIENCE)
            page.locator("body[data-jp-theme-name]").wait_for(state="attached")
            count, drawn = count + images.count(), drawn + drawings.count()
            for width, theme in product(WIDTHS, BEHIND):
                page.set_viewport_size({"width": width, "height": 12_000})
                page.evaluate(CHANGE, f"JupyterLab {theme}")
                page.wait_for_function(SWITCHED, arg=f"JupyterLab {theme}")
                for i, found in enumerate(images.evaluate_all(PICTURES)):
                    where = (book.name, i, width, theme)
                    assert not found["wide"], where
                    assert found["drawn"] >= 2, where  # pixels of the picture to one of the page
                    assert found["scrolls"] == "auto", where
                    assert found["open"] == 0, where
                    image = images.nth(i)
                    until(lambda image=image, theme=theme: pixels(image).getpixel((2, 2)) == BEHIND[theme], str(where))
                    if keep:
                        image.screenshot(path=f"{keep}/{book.stem}-{i}-{width}-{theme}.png")
                for i, found in enumerate(drawings.evaluate_all(DRAWINGS)):
                    assert found == {"wide": False, "live": True, "scheme": theme.lower()}, (book.name, i, width, found)
            page.close()
    assert count >= 15
    assert drawn >= 10


def count_of(book: Path, mark: str) -> int:
    """How often its outputs have this HTML."""
    outputs = [o for cell in nbformat.read(book, 4).cells for o in cell.get("outputs", ()) if "data" in o]
    return sum(o.data.get("text/html", "").count(mark) for o in outputs)


BOOKS = pytest.mark.parametrize(
    ("name", "extension"),
    [
        pytest.param("trusted", False, id="trusted", marks=pytest.mark.looks),
        pytest.param("strange", True, id="not trusted"),
        pytest.param("strange", False, id="not trusted, without the extension", marks=pytest.mark.looks),
    ],
)


def switch(base: Path, extension: bool) -> None:
    """Whether pages that are loaded from now on have nbddp's extension. As `jupyter labextension disable` does it."""
    kept = base / "_CONFIG_DIR" / "labconfig" / "page_config.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"disabledExtensions": {"nbddp": not extension}}))


def pixels(image: Any) -> Image.Image:
    return Image.open(io.BytesIO(image.screenshot())).convert("RGB")


def opened(browser: Any, address: str) -> Any:
    """The page, with the picture of its notebook and a theme."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(address)
    page.locator(".jp-OutputArea img").wait_for()
    page.locator("body[data-jp-theme-name]").wait_for(state="attached")
    return page


def assert_follows(page: Any, theme: str, colour: tuple[int, ...], look: str) -> None:
    """Whether the page, when it has this theme, has the picture on `colour`."""
    page.evaluate(CHANGE, f"JupyterLab {theme}")
    page.wait_for_function(SWITCHED, arg=f"JupyterLab {theme}")
    words, image = page.locator(".jp-OutputArea-output pre"), page.locator(".jp-OutputArea img")

    def seen() -> bool:  # a theme's colours come after its name
        beside, corner = pixels(words), pixels(image).getpixel((2, 2))
        return (beside.getpixel((beside.width - 3, 2)), corner) == (BEHIND[theme], colour)

    until(seen, f"{theme}, and the picture on {colour},")
    if keep := os.environ.get("NBDDP_LOOKS"):
        page.screenshot(path=f"{keep}/{look}-{theme}.png")


@pytest.mark.looks
@BOOKS
def test_jupyterlab_shows_words_under_a_picture_that_follows_the_theme(
    browser: Any, lab: tuple[Path, Any], name: str, extension: bool
) -> None:
    base, server = lab
    switch(base, extension)
    page = opened(browser, f"{server['url']}doc/tree/{name}.ipynb?token={server['token']}")
    assert page.locator(".jp-OutputArea img").get_attribute("alt") == "all_reduce on 4 ranks"
    output = page.locator(".jp-OutputArea-output")
    sync_api.expect(output.locator("pre")).to_contain_text("every element of every result was correct")
    sync_api.expect(output.locator("td")).to_have_count(8 * 10)
    follows = extension or name == "trusted"  # of others JupyterLab keeps no style
    for theme, colour in BEHIND.items():
        assert_follows(page, theme, colour if follows else BEHIND["Light"], f"lab-{name}-{extension}")
    page.close()


@pytest.mark.looks
def test_notebook_7_shows_a_picture_that_follows_the_theme_in_a_notebook_that_it_does_not_trust(
    browser: Any, tmp_path: Path, book: Any
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    nbformat.write(book, folder / "strange.ipynb")
    with jupyterlab(tmp_path, folder, SETTINGS, module="notebook", more=BESIDE) as server:
        page = opened(browser, f"{server['url']}notebooks/strange.ipynb?token={server['token']}")
        sync_api.expect(page.get_by_text("Not Trusted")).to_be_visible()
        for theme, colour in BEHIND.items():
            assert_follows(page, theme, colour, "notebook-strange")
        page.close()


@pytest.mark.looks
def test_jupyter_lists_the_extension_as_enabled_and_ok() -> None:
    listed = [sys.executable, "-m", "jupyter", "labextension", "list"]
    env = os.environ | {"JUPYTER_PATH": str(EXTENSIONS.parent)}
    done = subprocess.run(listed, env=env, capture_output=True, text=True, check=True)
    said = re.sub(r"\x1b\[\d+m", "", done.stderr)
    (line,) = (line for line in said.splitlines() if "nbddp v" in line)
    assert line.split() == ["nbddp", f"v{nbddp.__version__}", "enabled", "OK", "(python,", "nbddp)"]


def test_the_extension_has_the_rules_of_a_page() -> None:
    wanted = f"const RULES = {json.dumps(STYLE + POINTED)};"
    assert wanted in (EXTENSIONS / "nbddp/static/remoteEntry.js").read_text(encoding="utf-8"), f"write there: {wanted}"


@BOOKS
@pytest.mark.looks
def test_jupyterlab_says_what_is_under_the_pointer_or_shows_the_plain_picture(
    browser: Any, lab: tuple[Path, Any], name: str, extension: bool
) -> None:
    base, server = lab
    switch(base, extension)
    set_to(base, "apputils-extension/themes", {"theme": "JupyterLab Light"})
    page = opened(browser, f"{server['url']}doc/tree/{name}-timeline.ipynb?token={server['token']}")
    if extension or name == "trusted":
        assert_pointed(page)
    else:
        spots = page.locator(".nbddp-spot")
        assert all(
            box is None or not box["width"] for box in (spots.nth(i).bounding_box() for i in range(spots.count()))
        )
    page.close()


def test_a_list_has_a_light_arrow_in_a_dark_theme_alone(browser: Any) -> None:
    page = browser.new_page()
    found = []
    for light in ("true", "false"):
        style = f"<style>.widget-dropdown > select {{background-image: url(black.svg)}} {list_arrow('.own')}</style>"
        select = '<div class="own"><div class="widget-dropdown"><select></select></div></div>'
        page.set_content(f'{style}<body data-jp-theme-light="{light}">{select}')
        found.append(page.locator("select").evaluate("e => getComputedStyle(e).backgroundImage"))
    assert "black.svg" in found[0]
    assert "e0e0e0" in found[1]
    page.close()


def test_a_picture_beside_a_drawing_follows_the_dark_theme_as_it_does_alone(browser: Any) -> None:
    """Rules of the one do not reach the other: all outputs of a notebook are one page."""
    topology = draw_topology(planned(nnodes=2, gpus_per_node=4))
    alone, drawing = picture(topology.png(), 300, "ranks"), topology._repr_mimebundle_()[0]["text/html"]
    looks = []
    for html in (alone, alone + drawing, drawing + alone):
        page = browser.new_page()
        page.set_content(f'<body data-jp-theme-light="false">{html}</body>')
        looks.append(page.locator("img.nbddp-picture").evaluate("e => getComputedStyle(e).filter"))
        page.close()
    assert looks == ["invert(1) hue-rotate(180deg)"] * 3


@pytest.mark.parametrize("width", [640, pytest.param(1200, marks=pytest.mark.looks)])
def test_each_bar_says_what_it_is_at_any_width(browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 1000})
    page.set_content(notebook_of(timeline()).cells[0].outputs[0].data["text/html"])
    assert_pointed(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_outlines_lie_on_the_parts_of_a_picture_in_a_page_of_today(browser: Any) -> None:
    """A page with a doctype has room for the descenders of a line below a picture that is no block."""
    html = notebook_of(timeline()).cells[0].outputs[0].data["text/html"]
    page = browser.new_page(viewport={"width": 900, "height": 1000})
    page.set_content(f"<!DOCTYPE html><body style='font: 20px/2 serif'>{html}</body>")
    image = page.locator("img.nbddp-picture")
    assert page.locator("*:has(> .nbddp-spot)").bounding_box() == pytest.approx(image.bounding_box(), abs=0.1)
    page.close()


def assert_pointed(page: Any) -> None:
    """What is said of a place is what is drawn there."""
    picture = pixels(page.locator("img.nbddp-picture"))
    frame, seen = page.locator("img.nbddp-picture").bounding_box(), set()
    spots = page.locator(".nbddp-spot")
    for i in range(spots.count()):
        words, box = spots.nth(i).get_attribute("title"), spots.nth(i).bounding_box()
        x, y = box["x"] + 0.8 * box["width"], box["y"] + 0.12 * box["height"]
        phase = words.partition("\n")[0].partition(" · ")[2]
        if phase not in PHASES or x > page.viewport_size["width"] or y > page.viewport_size["height"]:
            continue
        assert page.evaluate("([x, y]) => document.elementFromPoint(x, y).title", [x, y]) == words
        drawn = picture.getpixel((round(x - frame["x"]), round(y - frame["y"])))
        assert max(abs(a - b) for a, b in zip(drawn, rgb(PHASES[phase]), strict=True)) < 12, (words, drawn)
        seen.add(phase)
    assert seen >= {"forward", "backward"}, seen


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_on_a_narrow_page_the_picture_scrolls_before_it_cannot_be_read(browser: Any, book: Any) -> None:
    page = browser.new_page(viewport={"width": 640, "height": 900})
    page.set_content(book.cells[0].outputs[0].data["text/html"])
    image = page.locator("img")
    natural = int(image.get_attribute("width"))
    assert 0.8 * natural - 1 <= image.bounding_box()["width"] < natural
    assert page.evaluate("document.documentElement.scrollWidth") <= 640
    page.close()


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.looks), "dark"])
def test_what_nbconvert_writes_follows_its_theme(browser: Any, book: Any, tmp_path: Path, theme: str) -> None:
    saved = tmp_path / "saved.ipynb"
    nbformat.write(book, saved)
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--theme", theme, str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Alternative text is missing" not in done.stderr
    page = browser.new_page()
    page.route(re.compile("^http"), lambda route: route.abort())
    page.goto((tmp_path / "saved.html").as_uri())
    image = page.locator("img")
    if keep := os.environ.get("NBDDP_LOOKS"):
        page.screenshot(path=f"{keep}/nbconvert-{theme}.png")
    corner = pixels(image).getpixel((2, 2))
    assert (max(corner) < 40) == (theme == "dark")
    assert image.get_attribute("alt") == "all_reduce on 4 ranks"
    sync_api.expect(page.locator("pre", has_text="bus bandwidth reaches")).to_be_visible()
    page.close()
