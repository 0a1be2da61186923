"""A cell's text: transformed once for all ranks, by IPython itself, and asked about once."""

from __future__ import annotations

from typing import Any

import IPython
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbddp.execution.cell_text import as_python
from nbddp.notebook.magics import TRANSFORMS
from nbddp.worker.program import CellText
from tests.kernels import Kernel

CELL = "# %%ddp\nx = 7 % 4\nfound = !echo $x\n%time y = x\nfound, y"


@pytest.fixture
def shell() -> Any:
    made = InteractiveShell()
    yield made
    made.history_manager.end_session()
    made.history_manager.save_thread.stop()


def counting(shell: Any) -> list[str]:
    """The cells that IPython's own machinery transforms from here on."""
    seen: list[str] = []
    manager, original = shell.input_transformer_manager, shell.input_transformer_manager.transform_cell
    manager.transform_cell = lambda cell: (seen.append(cell), original(cell))[1]
    return seen


def test_what_the_client_has_transformed_is_what_the_rank_would_have_made_of_it(shell: Any) -> None:
    expected, seen = shell.transform_cell(CELL), counting(shell)
    text = CellText()
    text.install(shell)
    given = as_python(CELL)
    assert given is not None
    text.begin(CELL, given)
    assert shell.transform_cell(CELL) == shell.transform_cell(CELL) == expected
    assert not seen
    assert shell.transform_cell("other = !ls") != "other = !ls"
    assert seen == ["other = !ls"]
    text.begin(CELL, None)
    assert shell.transform_cell(CELL) == expected
    assert seen == ["other = !ls", CELL]


@pytest.mark.parametrize("differs", ["version", "transformers", "nothing"])
def test_it_is_used_by_the_same_ipython_with_the_same_transformers_alone(shell: Any, differs: str) -> None:
    seen, text = counting(shell), CellText()
    text.install(shell)
    if differs == "transformers":
        shell.input_transformers_cleanup.append(lambda lines: [line.replace("7", "8") for line in lines])
    text.begin("7", [IPython.__version__ + ".1" * (differs == "version"), "given\n"])
    assert shell.transform_cell("7") == {"version": "7\n", "transformers": "8\n", "nothing": "given\n"}[differs]
    assert seen == ([] if differs == "nothing" else ["7"])


@pytest.mark.parametrize("error", [SyntaxError, ValueError])
def test_a_cell_that_cannot_be_transformed_is_left_to_the_ranks(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, cell: str) -> str:
        raise error("no")

    monkeypatch.setattr("IPython.core.inputtransformer2.TransformerManager.transform_cell", fails)
    assert as_python("x") is None


def test_whether_a_cell_awaits_is_found_out_once(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "IPython.core.interactiveshell._should_be_async", lambda cell: (asked.append(cell), "await" in cell)[1]
    )
    CellText().install(shell)
    for cell, awaits in (("await a", True), ("await a", True), ("b", False), ("b", False), ("await a", True)):
        assert shell.should_run_async(cell, transformed_cell=cell, preprocessing_exc_tuple=None) is awaits
    assert asked == ["await a", "b", "await a"]
    shell.autoawait = False
    assert not shell.should_run_async("await a", transformed_cell="await a")
    error = (SyntaxError, SyntaxError("no"), None)
    shell.autoawait = True
    assert not shell.should_run_async("await a", transformed_cell="await a", preprocessing_exc_tuple=error)


def test_ipythons_syntax_reaches_the_ranks(four: Kernel) -> None:
    shown = four.run("%%ddp --show 2\nimport asyncio\nhere = !echo $$\nawait asyncio.sleep(0)\nprint(7 % 4, len(here))")
    assert shown.text() == "rank 2 │ 3 1\n"
    asked = four.run("%%ddp --show 2\n%env HOME\n")
    assert asked.ok
    assert four.run("%%ddp --show 2\n!echo one line\n").text() == "rank 2 │ one line\n"


def test_a_cell_is_whole_when_ipython_would_say_so(shell: Any) -> None:
    """At a prompt, an empty row ends a cell: one that is added below its line is none that was typed."""
    shell.input_transformers_cleanup.extend(TRANSFORMS)
    said = {"%%ddp": "incomplete", "# a\n%%ddp": "incomplete", "%%ddp\n\n": "complete", "# a\n%%ddp\nx\n\n": "complete"}
    assert {cell: shell.check_complete(cell)[0] for cell in said} == said
    for cell in ("%%ddp -n 2", "# a\n \n# b\n%%ddp -n 2"):
        assert shell.transform_cell(cell) == "get_ipython().run_cell_magic('ddp', '-n 2', '\\n')\n"
    for cell in ("%%ddp?", "x = 1\n%%ddp", "# a\n%%ddps", "# a\n%%time", "%%time", "", "# a"):
        assert "'ddp', " not in shell.transform_cell(cell)
