"""Lessons' sources become the notebooks that are committed, and what a source may say is told when it is wrong."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
import warnings
from base64 import b64decode
from html import unescape
from pathlib import Path

import jupytext
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.text import Text

from nbddp.errors import BadInput
from nbddp.figures.figure import DPI, width_of
from nbddp.figures.html import PICTURE
from nbddp.lessons.framework import run_check
from nbddp.lessons.framework.explorer import LARGER, Choice, Explorer, Slider, Steps
from nbddp.lessons.framework.on_rank import tabulate
from nbddp.lessons.framework.plain_values import Strange, plain
from nbddp.output.screens import NullScreen
from nbddp.teach import explore, predict
from tests.kernels import Kernel
from tests.lessons.answers import NOTEBOOKS, SOURCES, defined, is_ok, pool_of, text_of
from tests.unit.test_front import REPOSITORY
from tests.unit.test_lessons import build, minutes

SMALL = """\
# %% [markdown]
# # Title
#
# Text

# %%
# %%ddp --nproc 2
x = 1  # %%ddp is no magic here

# %% tags=["exercise"]
def f():
    ...


# %% tags=["raises-exception", "hidden"]
check.f(f)

# %% tags=["prediction"]
predict.mean_of_four()

# %% tags=["solution"]
def f():
    return 1
"""


def test_cells_are_told_apart() -> None:
    cells = build.parse(SMALL)
    assert [c.kind for c in cells] == ["markdown", "code", "exercise", "code", "prediction", "solution"]
    assert cells[0].text == "# Title\n\nText"
    assert cells[1].text == "%%ddp --nproc 2\nx = 1  # %%ddp is no magic here"
    assert cells[3].tags == ("raises-exception", "hidden")


def test_learner_and_solved_differ_in_exercise_and_solution_alone() -> None:
    cells = build.parse(SMALL)
    learner, solved = build.learners(cells), build.solved(cells)
    assert [c.kind for c in learner] == ["markdown", "code", "exercise", "code", "prediction", "markdown"]
    assert "<details>" in learner[-1].text
    assert "return 1" in learner[-1].text
    assert [c.text for c in solved[:-1]] == [cells[i].text for i in (0, 1, 5, 3, 4)]
    assert "<b>it is equal</b>. The mean of four means" in solved[-1].text
    assert not any("it is equal" in c.text for c in learner)
    book = build.notebook(solved)
    nbformat.validate(book)
    assert [c.id for c in book.cells] == ["c00", "c01", "c02", "c03", "c04", "c04-answer"]
    folded = {"tags": ["raises-exception", "hidden"], "jupyter": {"source_hidden": True}}
    assert book.cells[3].metadata == folded
    assert book.cells[4].metadata == {"tags": ["prediction", "nbval-ignore-output"]}


def test_outputs_are_kept_only_where_no_code_has_changed() -> None:
    cells = build.solved(build.parse(SMALL))
    before, book = build.notebook(cells), build.notebook([*cells, build.Cell("markdown", "more")])
    before.cells[1].execution_count = 7
    build.keep(book, before)
    assert book.cells[1].execution_count == 7
    before.cells[1].source += "\nx"
    with pytest.raises(build.BadSource, match="code has changed"):
        build.keep(book, before)


def test_a_question_that_is_not_there_is_refused() -> None:
    with pytest.raises(build.BadSource, match="has the question nobody_asks"):
        build.answers("predict.nobody_asks()")


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_each_question_of_a_solved_lesson_has_its_answer_folded_below(source: Path) -> None:
    saved = nbformat.read(build.places(source)[1], 4)
    asked = 0
    for cell, below in zip(saved.cells, saved.cells[1:], strict=False):
        for name in ASK.findall(cell.source) if "prediction" in cell.metadata.get("tags", ()) else ():
            question = getattr(predict, name).question
            assert f"<b>{build.html(question.came)}</b>. {question.because}" in below.source, name
            asked += 1
        shown = text_of(cell.get("outputs", ()))
        assert "predicted nothing" not in shown
        assert "To answer:" not in shown
    assert asked


def test_the_advice_how_to_answer_is_no_part_of_a_saved_question() -> None:
    asked = build.prompt.AskedQuestion(predict.lines.question)
    asked.end()
    assert build.prompt.OPEN in asked.describe()
    book = build.notebook(build.solved(build.parse(SMALL)))
    (cell,) = (c for c in book.cells if "prediction" in c.metadata.get("tags", ()))
    cell.outputs = [nbformat.v4.new_output("display_data", dict(asked._repr_mimebundle_()[0]))]
    build.tidy(book)
    (output,) = cell.outputs
    assert output.data["text/plain"] == predict.lines.question.describe()
    assert "predicted nothing" not in output.data["text/html"]


def test_lessons_are_found_by_number() -> None:
    assert build.named([]) == SOURCES
    assert [p.stem for p in build.named(["02"])] == ["02-ranks-and-devices"]
    with pytest.raises(build.BadSource, match="no lesson begins with 99"):
        build.named(["99"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_committed_notebooks_are_what_the_source_makes(source: Path) -> None:
    cells = build.parse(source.read_text(encoding="utf-8"))
    for made, place in zip((build.learners(cells), build.solved(cells)), build.places(source), strict=True):
        fresh, saved = build.notebook(made), nbformat.read(place, 4)
        rows = [(c.cell_type, c.source, c.id, c.metadata) for c in fresh.cells]
        assert rows == [(c.cell_type, c.source, c.id, c.metadata) for c in saved.cells], "run notebooks/build.py"
        assert saved.metadata == fresh.metadata


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_lessons_keep_to_their_size_and_hold_nothing_of_the_machine(source: Path) -> None:
    assert sum(c.kind in ("code", "exercise") for c in build.parse(source.read_text(encoding="utf-8"))) <= 15
    for place in build.places(source):
        saved = nbformat.read(place, 4)
        for cell in saved.cells:
            for output in cell.get("outputs", ()):
                text = output.get("text", "") + output.get("data", {}).get("text/plain", "") + output.get("evalue", "")
                assert not re.search(r"/tmp/|/home/|/root/|site-packages|127\.0\.0\.1:\d|\bpid\b", text), text
                assert build.WIDGET not in output.get("data", {})


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_learners_notebooks_give_nothing_away_and_solved_ones_are_right(source: Path) -> None:
    """No output stands under a question; every check of the solved one has said ok."""
    learner, solved = (nbformat.read(p, 4) for p in build.places(source))
    code = [c for c in learner.cells if c.cell_type == "code"]
    assert not any(c.outputs or c.execution_count for c in code)
    assert all(c.execution_count for c in solved.cells if c.cell_type == "code"), "run notebooks/build.py"
    checks = [c for c in solved.cells if c.cell_type == "code" and "\ncheck." in f"\n{c.source}"]
    assert checks
    assert all(is_ok(c.outputs) for c in checks)


# -- what every lesson has -------------------------------------------------------------------

MINUTE = 60.0  # seconds, of a machine with two cores that does nothing else


@pytest.mark.lessons
@pytest.mark.timeout(400)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_a_lesson_runs_through_in_a_minute(source: Path, tmp_path: Path) -> None:
    book = build.notebook(build.solved(build.parse(source.read_text(encoding="utf-8"))))
    began = time.monotonic()
    build.run(book, tmp_path)
    assert time.monotonic() - began <= MINUTE


@pytest.mark.lessons
@pytest.mark.timeout(400)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_the_sanitizer_finds_nothing_in_a_solved_lesson(source: Path, tmp_path: Path) -> None:
    """But for what a lesson shows as a mistake, where nothing is trained."""
    book = build.notebook(build.solved(build.parse(source.read_text(encoding="utf-8"))))
    for cell in book.cells:
        line, _, body = cell.source.partition("\n")
        if cell.cell_type == "code" and line.startswith("%%ddp") and body.strip():
            cell.source = f"{line.replace('%%ddp', '%%ddp --sanitize', 1)}\n{body}"
    build.run(book, tmp_path)
    said = [text_of(cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    assert any("sanitizer: no findings" in text for text in said)
    assert [text for text in said if re.search(r"sanitizer: \d+ finding", text)] == []


READING = re.compile(r"(?m)^# ## Further reading\n#\n((?:# .*\n)+)")
ASK, EXPLORE = re.compile(r"predict\.(\w+)\("), re.compile(r"explore\.(\w+)\(")


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_every_lesson_has_goals_a_glossary_links_questions_and_an_explorer(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    assert "**After this lesson you can**" in text
    assert len(re.findall(r"(?m)^# - \*\*?.+\*\*:?", text.partition("# ## Glossary")[2])) >= 4
    (reading,) = READING.findall(text)
    entries = re.split(r"(?m)^# - ", reading)[1:]
    assert len(entries) >= 2
    assert [entry for entry in entries if not re.search(r"\]\(https?://\S+\)", entry)] == [], "no link"
    assert ASK.search(text)
    assert EXPLORE.search(text)
    assert "On real GPUs" in text
    assert text.rstrip().endswith("# %ddp stop")


def test_lessons_are_numbered_without_a_gap_and_pages_count_them() -> None:
    numbers = [source.name[:2] for source in SOURCES]
    assert numbers == [f"{n:02d}" for n in range(1, len(SOURCES) + 1)]
    front, page = ((NOTEBOOKS.parent / name).read_text(encoding="utf-8") for name in ("README.md", "docs/lessons.md"))
    rows = re.findall(r"(?m)^\| \[`(\d\d)` ", page)
    assert rows == ["00", *numbers]
    words = {15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen", 19: "nineteen", 20: "twenty"}
    for text in (front, page):
        assert set(re.findall(r"(\w+) lessons\b", text.lower())) & set(words.values()) == {words[len(numbers)]}


def test_an_explorer_opens_on_words_that_answer_none_of_its_questions() -> None:
    """Of questions that have a pattern for what is seen; it is there in the second setting, or a test proves it."""
    asked = 0
    for source in SOURCES:
        names: list[str] = []
        for cell in build.parse(source.read_text(encoding="utf-8")):
            if cell.kind == "prediction":
                names += ASK.findall(cell.text)
            elif cell.kind == "code":
                for opened in EXPLORE.findall(cell.text):
                    explorer = getattr(explore, opened)
                    for question in (getattr(predict, name).question for name in names):
                        if question.explored and question.seen:
                            made = explorer()
                            asked += 1
                            for first in (made.settings[0], made.begins):
                                words = f"{made.caption(first)}\n{made.show(**first).words}"
                                assert not re.search(question.seen, words), f"{question.name}: {words}"
                names = []
    assert asked >= 8


CLAIMS = {  # a sentence of a lesson → what its saved words must say, with what it claims
    ("08", r"at most two buckets\. The last one is sent only when the last gradient is ready", "%ddp timings"): (
        r"(?m)^2 buckets, [\s\S]*\n +0  7\.bias, 7\.weight .*\n +1  6\.bias … 0\.(weight|bias) \(14\)"
    ),
    (
        "08",
        r"The bars on rank \*\*0\*\* are long",
        "def late()",
    ): r"(?m)^over \d+ steps rank 1 takes \d{3} ms longer .*\n[\s\S]*^cause: between steps",
    ("18", r"The gradients of this model, 404 KiB, fit into one bucket", "%%ddp --timings\nfrom"): r"1 bucket, 404 KiB",
}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c[0]} {c[2][:12]}")
def test_what_a_lesson_says_of_its_recording_is_what_the_saved_words_say(claim: tuple[str, str, str]) -> None:
    lesson, sentence, cell = claim
    (source,) = (s for s in SOURCES if s.name.startswith(lesson))
    saved = nbformat.read(build.places(source)[1], 4)
    assert len(re.findall(sentence, "\n".join(c.source.replace("\n", " ") for c in saved.cells))) == 1
    (shown,) = (text_of(c.outputs) for c in saved.cells if c.cell_type == "code" and cell in c.source)
    assert re.search(CLAIMS[claim], shown), shown


def test_lesson_08_promises_no_share_that_a_recording_may_contradict() -> None:
    """How much of bucket 1 is hidden differs from run to run: the saved words say it, the text must not."""
    (source,) = (s for s in SOURCES if s.name.startswith("08"))
    saved = nbformat.read(build.places(source)[1], 4)
    at = next(i for i, c in enumerate(saved.cells) if c.source == "%ddp timings")
    assert re.search(r"\d+ % of all-reduce time is hidden", text_of(saved.cells[at].outputs))
    assert not re.search(r"[Aa]lmost nothing|before backward ends|\d %", saved.cells[at + 1].source)


def test_lesson_12s_text_is_true_of_its_saved_forecasts() -> None:
    (source,) = (s for s in SOURCES if s.name.startswith("12"))
    saved = nbformat.read(build.places(source)[1], 4)
    off = re.compile(r"recorded on 2 ranks: .* the model predicts .*, (?:the same|(\d+) % (less|more))")
    (long, ways), (_, way) = (
        off.findall(text_of(c.outputs))[0] for c in saved.cells if "%ddp forecast" in c.source and c.cell_type == "code"
    )
    (most,) = re.findall(r"at most (\d+) % off", "\n".join(c.source for c in saved.cells))
    assert int(long or 0) <= int(most)
    assert (ways or "less", way) == ("less", "less"), "in all runs the recorded step is the longer one"


def test_answers_become_plain_data() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "odd"

    class Tensor:
        def tolist(self) -> list[int]:
            return [1, 2]

    assert plain((1, range(2), {"a": Tensor()}, Odd())) == [1, [0, 1], {"a": [1, 2]}, Strange("odd")]
    changed: list[list[int]] = [[1], [1]]
    assert tabulate(lambda a: a.append(2) or len(a), [(changed,)]) == [("value", 3)]
    assert changed == [[1], [1]], "the function gets a copy"


DRAW = """
def draw():
    import torch, torch.distributed as dist
    mine = torch.rand(1)
    total = mine.clone()
    dist.all_reduce(total)
    return mine.item(), total.item()
"""
STATE = """
def state():
    import torch, torch.distributed as dist
    return dist.is_initialized(), torch.random.get_rng_state().sum().item()
"""


def test_distributed_exercises_run_on_ranks_seeded_differently_and_leave_no_trace() -> None:
    draw, state = defined(DRAW, "draw"), defined(STATE, "state")
    with pool_of(2) as pool:
        before = list(pool.call(state))
        one, two = (list(run_check.in_group(draw).values()) for _ in range(2))
        assert one == two, "the same numbers each time"
        (a, total), (b, other) = one
        assert a != b, "ranks that must agree have to make themselves agree"
        assert total == other == pytest.approx(a + b)
        assert list(pool.call(state)) == before
        pool.run_cell("import torch.distributed as dist\ndist.init_process_group()", screen=NullScreen())
        assert list(run_check.in_group(draw).values()) == one
        assert [initialized for initialized, _ in pool.call(state)] == [True, True], "a cell's own group stays"


# -- in a notebook ---------------------------------------------------------------------------

PLACE = "from nbddp.teach import check\ndef place_of(rank, n):\n    print('called')\n    return divmod(rank, n)\n"


def test_a_check_runs_on_the_notebooks_own_pool_and_keeps_its_names(four: Kernel) -> None:
    assert four.run("%%ddp\nkept = 41").ok
    shown = four.run(
        "from nbddp.teach import check\nchecked = check.place_of(lambda rank, n: divmod(rank, n))\nchecked"
    )
    assert is_ok(shown.outputs), shown.error
    assert "✓ ok</span> 30 ranks of 4 layouts" in shown.displays[0]["text/html"]
    assert not [kind for _, kind, _ in shown.messages if kind == "execute_result"], "the line is there already"
    assert four.run("%%ddp\nassert kept == 41").ok
    assert "41" in four.run("bool(checked) and checked.line == 'ok' and 41").displays[0]["text/plain"]
    wrong = four.run("check.place_of(lambda rank, n: (rank % n, rank // n), hint=True)")
    assert wrong.text().count("\n") == 2
    assert "hint 1 of 3" in wrong.text()


def test_a_deadlock_in_a_check_is_placed_by_the_line_of_the_cell(four: Kernel) -> None:
    receives = "def ring_all_reduce(x):\n    import torch.distributed as dist\n\n    dist.recv(x)\n    return x\n"
    line = four.run(f"from nbddp.teach import check\n{receives}check.ring_all_reduce(ring_all_reduce)").text()
    assert re.search(r"deadlock: ranks 0–3 wait in recv \(cell line 5, in ring_all_reduce\)", line), line
    assert not re.search(r"ipykernel|\.py\b|/tmp", line), line


def test_a_check_without_a_pool_starts_two_workers_and_shows_what_is_printed(new_kernel: Kernel) -> None:
    shown = new_kernel.run(PLACE + "check.place_of(place_of)")
    assert is_ok(shown.outputs), shown.error
    assert "ranks 0–1 │ called" in shown.text(), "prints help whoever looks for a mistake"
    assert "2 processes" in new_kernel.run("%ddp topology").displays[0]["text/plain"]


def test_an_explorer_in_a_kernel_is_a_widget_with_picture_and_words(four: Kernel) -> None:
    shown = four.run("from nbddp.teach import explore\nexplore.layout()")
    (bundle,) = shown.displays
    assert set(bundle) == {"text/html", "text/plain", "image/png", build.WIDGET}
    assert bundle["text/plain"] == explore.layout().describe()
    opened = [content["comm_id"] for _, kind, content in shown.messages if kind == "comm_open"]
    assert bundle[build.WIDGET]["model_id"] == opened[-1], "the widget is the box, which is made after what is in it"


def test_an_explorer_in_a_terminal_is_its_words(tmp_path: Path) -> None:
    code = "from nbddp.teach import explore; explore.layout()"
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert explore.layout().describe() in done.stdout


# -- explorers -------------------------------------------------------------------------------

EXPLORERS = {name: getattr(explore, name) for name in explore.__all__ if name != "measured_buckets"}  # no controls


@pytest.mark.every(8)
@pytest.mark.parametrize("made", EXPLORERS.values(), ids=EXPLORERS)
def test_an_explorer_without_widgets_is_two_pictures_with_words(made: Explorer) -> None:
    bundle, metadata = made._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain", "image/png"}
    page = unescape(bundle["text/html"])
    assert page.count("<pre") == page.count("<details>") == 1, "the words are folded"
    assert page.index("<details>") < page.index("<pre") < page.index("</details>")
    assert f'class="{PICTURE} "' in page, "it follows the theme of a saved page"
    assert len(made.settings) == 2
    for setting in made.settings:
        assert made.caption(setting) in bundle["text/plain"]
        assert made.show(**setting).words in bundle["text/plain"]
        assert made.show(**setting).words in page
    assert metadata["image/png"]["alt"] == bundle["text/plain"]
    assert 400 < metadata["image/png"]["width"] <= 900, "as wide as a notebook's column, and no wider"


@pytest.mark.every(8)
@pytest.mark.parametrize("made", EXPLORERS.values(), ids=EXPLORERS)
def test_an_explorers_controls_change_picture_and_words(made: Explorer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also of what ipywidgets 7 does not know, where warnings are left out
        box = made.widget()
    *rows, picture, refusal, text, keys = box.children
    (words,) = text.children
    controls = [row.children[0] if hasattr(row, "children") else row for row in rows]  # one of moves has buttons
    assert [c.description for c in controls] == [c.label for c in made.controls]
    assert ("← and →" in keys.value) == any(isinstance(c, Slider) for c in made.controls)
    assert ("opens a list" in keys.value) == any(isinstance(c, Choice) for c in made.controls)
    assert text.selected_index is None, "the words are folded"
    before = picture.value
    began = {control.name: first.value for control, first in zip(made.controls, controls, strict=True)}
    other = next(each for each in reversed(made.settings) if each != began)
    for control, value in zip(controls, other.values(), strict=True):
        control.value = value
    assert picture.value != before
    assert made.show(**other).words in unescape(words.value)
    assert refusal.value == ""


def test_an_impossible_setting_says_so_instead_of_a_picture() -> None:
    box = explore.layout().widget()
    nodes, gpus, per_process, _, picture, refusal, text, _ = box.children
    gpus.value, per_process.value = 2, 4
    with pytest.raises(BadInput) as refused:
        explore.layout().show(nodes=nodes.value, gpus=2, per_process=4, by="local rank")
    assert str(refused.value) in refusal.value
    assert picture.layout.display == text.layout.display == "none"
    per_process.value = 1
    assert picture.layout.display == text.layout.display == refusal.value == ""


@pytest.mark.more
def test_buttons_take_a_step_and_stay_at_the_ends() -> None:
    _, row, _, picture, *_ = explore.ring().widget().children
    slider, play, back, forward = row.children
    assert (play.min, play.max) == (slider.min, slider.max)
    seen = []
    for button in (back, forward, forward, back):
        button.click()
        seen.append((slider.value, picture.value))
    assert [value for value, _ in seen] == [0, 1, 2, 1]
    assert seen[1][1] == seen[3][1] != seen[2][1]
    for _ in range(slider.max + 1):
        forward.click()
    assert slider.value == slider.max
    assert [c.name for c in explore.collectives().controls if isinstance(c, Steps)] == ["moves"]


def test_pictures_have_the_size_that_they_say() -> None:
    """A point of a figure is a point on the page: text of 6.5 points is not shown smaller."""
    shown = explore.layout().show(**explore.layout().settings[0])
    bundle, metadata = shown._repr_mimebundle_()
    across = int.from_bytes(b64decode(bundle["image/png"])[16:20], "big") / DPI  # inches
    assert metadata["image/png"]["width"] == pytest.approx(96 * across, abs=1)
    assert metadata["image/png"]["width"] == width_of(shown.png())


@pytest.mark.every(4)
@pytest.mark.parametrize("made", EXPLORERS.values(), ids=EXPLORERS)
def test_text_of_an_explorer_has_eleven_pixels_where_the_page_is_wide_enough(made: Explorer) -> None:
    shown = made.show(**made.begins)
    width = int(re.search(r'width="(\d+)"', made.widget().children[len(made.controls)].value)[1])  # type: ignore[index]
    texts = [t for t in shown.figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    assert texts
    assert width == pytest.approx(LARGER * width_of(shown.png()), abs=1)
    assert min(t.get_fontsize() for t in texts) * LARGER * 96 / 72 >= 10.95


ROW = re.compile(r"^\| (\d\d) [^|]*\|[^|]*\| (\d+) \| (\d+|–) \|", re.M)


def test_instructors_minutes_are_computed_in_the_same_way_for_every_lesson_and_the_sessions_hold_them() -> None:
    page = (NOTEBOOKS / "INSTRUCTORS.md").read_text(encoding="utf-8")
    computed = {n: (minutes.rounded(c.whole), minutes.rounded(c.writing)) for n, c in minutes.lessons().items()}
    written = {n: (int(whole), int(writing.replace("–", "0"))) for n, whole, writing in ROW.findall(page)}
    assert written == computed
    assert f"1 minute per {minutes.WORDS_A_MINUTE} words of text" in page
    assert f"text, {minutes.CELL:g} per code cell, {minutes.QUESTION:g} per question" in page
    assert f"{minutes.EXERCISE:g} minutes per exercise, and {minutes.LINE:g} per line" in page
    sessions = re.findall(r"sixteen 90-minute sessions: `([^.]*)`\.", page)[0].split(" · ")
    assert len(sessions) == 16
    assert [n for session in sessions for n in session.split(" and ")] == sorted(computed)
    assert all(sum(computed[n][0] for n in session.split(" and ")) <= 90 for session in sessions)


def test_a_lessons_minutes_count_words_cells_questions_and_lines_to_write() -> None:
    counted = minutes.contents(jupytext.reads(SMALL, "py:percent"))
    assert (counted.cells, counted.questions, counted.exercises) == (3, 1, 1)
    assert counted.whole == counted.words / 120 + 3 + 1.5 + counted.writing


@pytest.mark.parametrize("made", EXPLORERS.values(), ids=EXPLORERS)
def test_no_explorer_offers_nobody_has_small_text_or_shows_the_words_that_were_edited(made: Explorer) -> None:
    offered = [c.shown(o[1] if isinstance(o, tuple) else o) for c in made.controls for o in getattr(c, "options", ())]
    shown = [made.show(**setting) for setting in made.settings]
    text = "\n".join([*(figure.words for figure in shown), *offered, *(c.label for c in made.controls)])
    assert not re.search(r"nobody|and no more|anew|put in place|does steps|as large as they are", text), text
    assert min(t.get_fontsize() for figure in shown for axes in figure.figure.axes for t in axes.texts) >= 6.5


BOOKS = sorted([*NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("solutions/*.ipynb")])


@pytest.mark.parametrize("path", BOOKS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_first_cell_of_a_notebook_installs_what_is_missing_and_is_not_compared(path: Path) -> None:
    first = next(cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    assert first.source.startswith(build.INSTALL)
    assert "\n%load_ext nbddp" in first.source.removeprefix(build.INSTALL.rstrip())
    assert "nbval-ignore-output" in first.metadata.tags
    assert not first.outputs


@pytest.mark.parametrize("missing", [True, False])
def test_it_installs_quietly_where_nbddp_is_missing_and_elsewhere_does_nothing(
    missing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell, called = InteractiveShell(), list[list[str]]()
    monkeypatch.setattr(subprocess, "run", lambda words, check: called.append(words))
    if missing:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert shell.run_cell(build.INSTALL).error_in_exec is None
    monkeypatch.undo()
    assert called == [[sys.executable, "-m", "pip", "install", "-q", f"git+{REPOSITORY}"]] * missing
    assert capsys.readouterr() == ("", "")
    shell.history_manager.end_session()
    shell.history_manager.save_thread.stop()
