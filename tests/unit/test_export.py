"""`%ddp export`: cells become a program that plain torchrun runs to the same numbers; tables for its parts."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from nbddp.capabilities.completion.lines import complete_command
from nbddp.capabilities.export.command import code_of
from nbddp.capabilities.export.program import ExportedCell, indented, program, python
from nbddp.errors import BadInput
from nbddp.notebook.history import CellHistory, Ran

# -- lines of IPython --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "python_", "gone"),
    [
        ("x = 1\n", "x = 1\n", []),
        ("%matplotlib inline\nx = 1", "# left out: %matplotlib inline\nx = 1\n", ["%matplotlib inline"]),
        ("if x:\n    !ls 'it\n", "if x:\n    pass  # left out: !ls 'it\n", ["!ls 'it"]),
        ("files = !ls\nx", "# left out: files = !ls\nx\n", ["files = !ls"]),
        ("x?\n?x\nx", "# left out: x?\n# left out: ?x\nx\n", ["x?", "?x"]),
        ("%%time\nx = 1", "# left out: %%time\nx = 1\n", ["%%time"]),
        ("\n  if x:\n    y = 1\n", "\nif x:\n  y = 1\n", []),
        ("%%bash\nls\necho", "# left out: %%bash\n# left out: ls\n# left out: echo\n", ["%%bash"]),
        ("s = '''\n%not a magic\n'''\n7 \\\n% 3", "s = '''\n%not a magic\n'''\n7 \\\n% 3\n", []),
    ],
)
def test_lines_of_ipython_are_left_out_with_a_comment(body: str, python_: str, gone: list[str]) -> None:
    assert python(body, "In[1]") == (python_, gone)


def test_what_is_no_python_is_refused_by_its_cell() -> None:
    with pytest.raises(BadInput, match=r"^cell In\[3\] is not Python that a script can have: .* at 'x ='$"):
        python("y = 1\nx = \n", "In[3]")
    with pytest.raises(BadInput, match=r"^cell In\[3\] cannot be part of a script: 'await' outside function; put it"):
        program([ExportedCell("In[3]", "", "await x()")], "")


def test_names_of_ipython_are_noted_unless_the_cells_set_them() -> None:
    def noted(body: str) -> list[str]:
        return [note.partition(" is ")[0].strip("'") for note in program([ExportedCell("In[1]", "", body)], "")[1]]

    assert noted("display(1); print(In[1], Out, _)") == ["display", "In", "Out", "_"]
    own = "from IPython.display import display\ndisplay(1)\nfor _ in range(3): print(_)\ndef f(In): return In"
    assert noted(own) == []
    [said] = program([ExportedCell("In[1]", "", "display(1)")], "")[1]
    assert said == (
        "'display' is IPython's, and a script does not have it: write from IPython.display import display, or print, "
        "in the cell"
    )


def test_a_name_whose_value_cannot_be_saved_is_quoted() -> None:
    told = r"^'data' cannot be saved for the script \(TypeError: .*\); create 'data' in a %%ddp cell instead of"
    with pytest.raises(BadInput, match=told):
        code_of({"data": threading.Lock()}, "In[1]", "f.pkl")


def test_values_are_literals_source_or_pickles(tmp_path: Path) -> None:
    assert code_of({"lr": 0.1, "names": ["it's", None]}, "In[1]", "f") == ('lr = 0.1\nnames = ["it\'s", None]\n', {})
    text, saved = code_of({"data": np.arange(3), "nan": float("nan")}, "In[1]", "f.pkl")
    assert "data, nan, = pickle.load(file)['In[1]']" in text
    assert set(saved) == {"In[1]"}
    code, _ = code_of({"indented": indented}, "In[1]", "f")
    assert code.startswith("def indented(")


def test_a_cell_that_ran_again_stands_where_it_ran_first() -> None:
    history = CellHistory()
    for ran in (
        Ran(1, "", "a = 1", where="A"), Ran(2, "", "b = 1", where="B"), Ran(3, "", "a = 2", where="A"),
        Ran(4, "", "c = 1"), Ran(5, "", "c = 1"), Ran(6, "", "bad", ok=False),
    ):  # fmt: skip
        history.append(ran)
    assert [ran.body for ran in history.chosen(None)] == ["a = 2", "b = 1", "c = 1"]
    assert [ran.body for ran in history.chosen((1, 6))] == ["a = 1", "bad"]
    with pytest.raises(BadInput, match=r"In\[9\] is not a %%ddp cell that ran; those that ran are In\[1\], "):
        history.chosen((9,))


def test_a_cell_takes_its_place_without_a_look_at_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each cell of a long session would take longer than the one before."""
    history = CellHistory()
    for n in range(3):
        history.append(Ran(n, "", f"a = {n}"))
        history.push(Ran(n, None, pushed={f"v{n}": n}))
    monkeypatch.setattr(Ran, "replaces", None)
    monkeypatch.setattr(Ran, "beside", None)
    history.append(Ran(9, "", "b = 1"))
    assert [ran.body for ran in history.every() if ran.pushed is None] == ["a = 0", "a = 1", "a = 2", "b = 1"]


def test_without_the_front_ends_name_of_a_cell_a_push_is_known_by_its_names_and_ranks() -> None:
    history = CellHistory()
    for n, value in enumerate((1, 2), 1):
        history.push(Ran(n, None, pushed={"a": value}))
        history.push(Ran(n, None, pushed={"a": -value}, ranks=(0,)))
        history.push(Ran(n, None, pushed={"b": value}))
    assert [(ran.pushed, ran.ranks) for ran in history.chosen(None)] == [({"a": 2}, None), ({"a": -2}, (0,)),
                                                                         ({"b": 2}, None)]  # fmt: skip


def test_tab_completes_targets() -> None:
    assert complete_command("export --to s") == ["slurm", "sky"]
    assert "--cells" in complete_command("export ")
