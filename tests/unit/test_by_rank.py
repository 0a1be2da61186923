"""The page of a run's output: when there is one, what is on it, and that it is the same for the same output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nbddp.capabilities.by_rank.embedded import embedded, is_whole
from nbddp.capabilities.by_rank.panes import BELOW_FIGURE, LEAST, LISTED, LIVE_LINES
from nbddp.capabilities.by_rank.tabs import LATER, MANY, page
from nbddp.errors import Raised, RankStatus
from nbddp.figures import terminal_colours
from nbddp.figures.palette import INK
from nbddp.output.buffer import HEAD, TAIL, VIEW, Display, RankOutput
from nbddp.output.layout import Print, Show, block, flat
from nbddp.output.page import OutputState
from nbddp.protocol.outcome import Outcome, RankExit
from tests.colours import contrast

PNG = {"image/png": "aGk=\n", "text/plain": "<Figure size 4x3 with 1 Axes>"}
TABLE = {"text/html": "<table><tr><td>loss</table>", "text/plain": "loss"}


def printing(folder: Path, *texts: str, stream: str = "stdout") -> list[RankOutput]:
    """An output for each text."""
    outs = [RankOutput(rank, folder, held=False) for rank in range(len(texts))]
    for out, text in zip(outs, texts, strict=True):
        if text:
            out.take("stream", {"name": stream, "text": text})
    return outs


def numbered(count: int, word: str = "line") -> str:
    return "".join(f"{word} {i}\n" for i in range(count))


def show(out: RankOutput, data: dict[str, object], kind: str = "display_data") -> None:
    out.take(kind, {"data": data, "metadata": {}})


def html(outs: list[RankOutput], live: bool = False, ended: dict[int, RankExit] | None = None) -> str:
    drawn = page(OutputState(outs, ended or {}, live))
    assert drawn is not None
    return drawn.html


def names(said: str) -> list[str]:
    return re.findall(r"<summary [^>]*>(.*?)</summary>", said)


# -- when there is one ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "tabs"),
    [
        ([numbered(MANY)] * 4, False),
        ([numbered(MANY + 1)] * 4, True),
        ([numbered(MANY // 4, word) for word in "abcd"], False),
        ([numbered(MANY // 4 + 1, word) for word in "abcd"], True),
        ([numbered(MANY + 1)], True),
        (["", ""], False),
    ],
    ids=["alike and short", "alike and long", "different and short", "together long", "one rank", "silent"],
)
def test_output_of_more_lines_than_a_screen_has_gets_tabs(tmp_path: Path, texts: list[str], tabs: bool) -> None:
    state = OutputState(printing(tmp_path, *texts), {})
    assert (page(state) is not None) == tabs
    lines = sum(piece.text.count("\n") for piece in block(state.outputs) if isinstance(piece, Print))
    assert (lines > MANY) == tabs, "it is the lines of the text that count"


@pytest.mark.parametrize(
    ("first", "second", "tabs"),
    [
        (PNG, PNG | {"image/png": "b2g="}, True),
        (TABLE, {**TABLE, "text/html": "<table></table>"}, True),
        (PNG, PNG, False),
        (PNG, None, False),
        ({"text/html": "<b>1</b>"}, {"text/html": "<b>2</b>"}, False),
    ],
    ids=["pictures", "tables", "the same picture", "of one rank", "words"],
)
def test_pictures_and_tables_of_several_ranks_get_tabs(
    tmp_path: Path, first: dict[str, object], second: dict[str, object] | None, tabs: bool
) -> None:
    outs = printing(tmp_path, "", "")
    for out, data in zip(outs, (first, second), strict=True):
        if data is not None:
            show(out, data)
    assert (page(OutputState(outs, {})) is not None) == tabs


def test_what_has_tabs_while_it_runs_has_them_in_the_end(tmp_path: Path) -> None:
    for count in range(MANY - 1, MANY + 3):
        outs = printing(tmp_path, numbered(count), "")
        live, kept = (page(OutputState(outs, {}, live)) is not None for live in (True, False))
        assert kept >= live


# -- what is on it ----------------------------------------------------------------------------------


def test_ranks_that_printed_the_same_share_a_pane_and_no_line_is_there_twice(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50), numbered(50), numbered(50, "other"))
    said = html(outs)
    assert names(said) == ["ranks 0–1 · 50 lines", "rank 2 · 50 lines", "differences"]
    assert said.partition("nbddp-differs")[0].count("\nline 49<") == 1


def test_the_same_output_makes_the_same_page(tmp_path: Path) -> None:
    first, second = (html(printing(tmp_path, numbered(50), numbered(60))) for _ in range(2))
    assert first == second


def test_text_is_no_markup_and_stderr_is_marked(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50))
    outs[0].take("stream", {"name": "stderr", "text": "<b>&amp; a warning\n"})
    assert "\n<i>&lt;b&gt;&amp;amp; a warning</i></pre>" in html(outs)


def test_a_terminals_colours_are_classes_and_other_sequences_are_left_out(tmp_path: Path) -> None:
    lines = "\x1b[1;31mred\x1b[0m \x1b[38;5;208morange\x1b[39m \x1b]8;;https://a.b\x1b\\link\x1b]8;;\x1b\\ <b>\x07\n"
    made = html(printing(tmp_path, numbered(50) + lines))
    said = '<span class="nbddp-cf1 nbddp-cw">red</span> <span class="nbddp-cf1">orange</span> link &lt;b&gt;</pre>'
    assert f"\n{said}" in made
    assert ".nbddp-cf1{color:" in made
    assert "\x1b" not in made
    assert "nbddp-cf1" not in html(printing(tmp_path, numbered(50))), "rules only where they are used"


@pytest.mark.parametrize(
    ("codes", "classes"),
    [("7", "nbddp-cb7"), ("31;7", "nbddp-cb1"), ("48;2;0;0;200", "nbddp-cb4"),
     ("3;4;92", "nbddp-cf2 nbddp-ci nbddp-cu"),
     ("38;5;250", "nbddp-cf7"), ("38;5;12", "nbddp-cf4"), ("1;22", ""), ("31;39", ""), ("", ""), ("38;5", "nbddp-cf0")],
)  # fmt: skip
def test_each_way_to_name_a_colour_gives_one_of_eight(codes: str, classes: str) -> None:
    assert terminal_colours.changed(terminal_colours.PLAIN, codes).classes() == classes


def test_colours_can_be_read_on_both_pages_and_on_every_ground() -> None:
    for light, dark, tint, shade in terminal_colours.INKS:
        assert contrast(light, "#ffffff") >= 4.5
        assert contrast(dark, "#111111") >= 4.5
        for ink, lit, *_ in (*terminal_colours.INKS, (INK, "#e0e0e0")):
            assert contrast(ink, tint) >= 4.5, (ink, tint)
            assert contrast(lit, shade) >= 4.5, (lit, shade)


def test_a_rank_that_failed_is_marked_also_if_it_printed_nothing(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50), numbered(50), "")
    error = Outcome(1, chain=(Raised("ValueError", "no <labels>"),))
    ended = {rank: RankExit(rank, RankStatus.FAILED, 0.0, error) for rank in (1, 2)}
    ended[0] = RankExit(0, RankStatus.INTERRUPTED, 0.0)
    assert names(html(outs, ended=ended))[:3] == [
        "rank 0 · 50 lines",
        "rank 1 · 50 lines · raised ValueError: no &lt;labels&gt;",
        "rank 2 · raised ValueError: no &lt;labels&gt;",
    ]
    assert html(outs, ended=ended).count(" data-failed") == 2


def test_long_output_is_folded_with_a_link_to_its_file_and_its_size(tmp_path: Path) -> None:
    (out,) = printing(tmp_path, numbered(2000))
    said = html([out])
    left = 2000 - HEAD - TAIL
    assert f'<b>… {left:,} lines omitted; full output (18 KiB): <a href="{out.log.as_uri()}">{out.log}</a></b>' in said
    out.close()
    assert 17.5 < out.log.stat().st_size / 1024 < 18.5


def test_lines_that_not_all_ranks_have_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50) + "line 3\n", numbered(50) + "mine\n", numbered(50))
    listed = html(outs).partition('class="nbddp-differs"')[2]
    assert re.findall(r'<div class="nbddp-name">(.*?)</div><pre[^>]*>(.*?)</pre>', listed) == [
        ("rank 0", "line 3"),
        ("rank 1", "mine"),
    ]
    many = printing(tmp_path, *(numbered(90, word) for word in "abc"))
    assert f"… {3 * 90 - LISTED} more lines differ" in html(many)


def test_equal_lines_differ_in_nothing(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50), numbered(50))
    ended = {1: RankExit(1, RankStatus.DIED, 0.0)}
    assert "Every line is the same on all ranks." in html(outs, ended=ended)


def test_while_it_runs_each_rank_has_its_newest_lines_and_those_that_move(tmp_path: Path) -> None:
    outs = printing(tmp_path, *[numbered(500)] * 1000)
    outs[0].take("stream", {"name": "stderr", "text": "\r40 %"})
    said = html(outs, live=True)
    assert said.count('class="nbddp-rank"') == 1000
    panes = re.findall(r"<pre [^>]*>(.*?)</pre>", said, re.DOTALL)
    assert {len(pane.splitlines()) for pane in panes[1:]} == {max(LEAST, LIVE_LINES // 1000)}
    assert panes[0].splitlines()[-2:] == ["line 499", "<u>40 %</u>"]


def test_a_page_of_64_ranks_stays_small(tmp_path: Path) -> None:
    outs = printing(
        tmp_path, *(numbered(2000, f"rank {rank} has seen a sample of some length, number") for rank in range(64))
    )
    assert len(html(outs)) < 500_000
    assert len(html(outs, live=True)) < 200_000


# -- displays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (PNG, 'src="data:image/png;base64,aGk="'),
        ({"image/svg+xml": "<svg><g/></svg>"}, 'src="data:image/svg+xml,%3Csvg%3E%3Cg/%3E%3C/svg%3E"'),
        (TABLE, "<table><tr><td>loss</table>"),
        ({"text/html": "<p>one<p>two<br>"}, "<p>one<p>two<br>"),
        ({"text/html": "</div></details>"}, None),
        ({"text/html": "<div>open"}, None),
        ({"text/html": "<b>bold</b> <!-- open"}, None),
        ({"text/html": "<html><body>a</body></html>"}, None),
        ({VIEW: {"model_id": "1"}, "text/html": "<b>a</b>"}, None),
        ({"application/vnd.plotly.v1+json": {}}, None),
        ({"text/markdown": "*a*"}, None),
    ],
)
def test_pictures_and_whole_html_are_a_part_of_the_page(data: dict[str, object], found: str | None) -> None:
    said = embedded(Display("display", data, {}))
    assert (said is None) if found is None else said is not None and found in said


@pytest.mark.parametrize("html", ["<svg><g/><path d='M0'></path></svg>", "<ul><li>a<li>b</ul>", "a < b", "&lt;div&gt;"])
def test_html_that_ends_what_it_begins_is_whole(html: str) -> None:
    assert is_whole(html)


def test_what_is_no_part_of_the_page_is_displayed_below_it_under_its_label(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50), numbered(50))
    show(outs[0], PNG)
    show(outs[1], {"application/vnd.plotly.v1+json": {}, "text/plain": "Figure"})
    drawn = page(OutputState(outs, {}))
    assert drawn is not None
    text, more = flat(outs, drawn.shows)
    assert text.splitlines()[-1].endswith("│ Figure")
    assert "rank 0 │ line 0\n" in text
    assert "│ <Figure size 4x3 with 1 Axes>\n" in text
    assert more == [
        Print("stdout", "rank 1 │ Figure\n"),
        Show({"application/vnd.plotly.v1+json": {}, "text/plain": "Figure"}, {}),
    ]
    assert drawn.html.count(BELOW_FIGURE) == 2, "in its pane, and as a difference"
    assert drawn.html.count("data:image/png") == 1


@pytest.mark.parametrize(
    ("kind", "value", "is_page"),
    [
        ("application/vnd.plotly.v1+json", {}, True),
        ("application/vnd.jupyter.widget-view+json", {"model_id": "7"}, False),
        ("text/markdown", "*a*", False),
    ],
)
def test_figures_of_several_ranks_that_an_application_shows_have_tabs(
    kind: str, value: object, is_page: bool, tmp_path: Path
) -> None:
    """The tabs show and hide them. A widget may be a bar of a line, and Markdown a word."""
    outs = printing(tmp_path, "", "")
    for out in outs:
        show(out, {kind: value, "text/plain": f"of rank {out.rank}"})
    assert (page(OutputState(outs, {})) is not None) == is_page
    assert page(OutputState(outs[:1], {})) is None, "there is one"


def test_while_the_cell_runs_the_differences_are_those_of_lines_that_are_all_there(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(50) + "mine\n", numbered(50))
    drawn = page(OutputState(outs, {}, True))
    assert drawn is not None
    _, _, differ = drawn.html.partition('<summary style="display: list-item; cursor: pointer">differences')
    assert "mine" in differ
    assert "line 7" not in differ
    alike = page(OutputState(printing(tmp_path, numbered(50), numbered(50)), {}, True))
    assert alike is not None
    assert "Every line so far is the same on all ranks." in alike.html
    long = page(OutputState(printing(tmp_path, numbered(2 * LIVE_LINES), numbered(50)), {}, True))
    assert long is not None
    assert LATER in long.html, "the oldest lines are not there, so they would all differ"


def test_the_text_of_the_page_is_that_of_the_block(tmp_path: Path) -> None:
    outs = printing(tmp_path, numbered(90), numbered(200), numbered(200))
    text, more = flat(outs, lambda display: True)
    assert text == "".join(piece.text for piece in block(outs) if isinstance(piece, Print))
    assert not more
    assert json.dumps(text)
