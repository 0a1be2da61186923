"""`%ddp export`: cells become a program that plain torchrun runs to the same numbers; tables for its parts."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from nbddp.capabilities.export.cells import cells_of
from nbddp.capabilities.export.options import Shape
from nbddp.capabilities.export.program import ExportedCell, indented, program
from nbddp.capabilities.terminal import main as terminal
from nbddp.errors import BadInput
from nbddp.export import script
from nbddp.notebook.commands import parse_command
from nbddp.notebook.history import CellHistory, Ran
from tests.kernels import Kernel

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def test_indentation_leaves_strings_of_several_lines_as_they_are() -> None:
    text = 'x = """a\n  b\n"""\ny = f"""c\n{x}\n"""\nif x:\n    z = (1,\n 2)'
    moved = "def f():\n" + indented(text, 1) + "\n    return x, y, z"
    one, two = dict[str, object](), dict[str, object]()
    exec(text, one)
    exec(moved, two)
    assert two["f"]() == (one["x"], one["y"], one["z"])  # type: ignore[operator]


# -- the program -------------------------------------------------------------------------------------


def made(*bodies: str, lines: tuple[str, ...] = ()) -> str:
    lines = lines or ("",) * len(bodies)
    cells = [ExportedCell(f"In[{i}]", line, body) for i, (line, body) in enumerate(zip(lines, bodies, strict=True), 1)]
    return program(cells, "words")[0]


def main_of(text: str) -> list[str]:
    [found] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    return [ast.unparse(n) for n in found.body]


def top_of(text: str) -> list[str]:
    return [ast.unparse(n).splitlines()[0] for n in ast.parse(text).body[1:] if getattr(n, "name", "") != "main"][:-1]


def test_imports_and_definitions_go_first_and_the_rest_into_main() -> None:
    text = made(
        "import os, torch.nn as nn\nx = 1\ndef f(): return x\nclass A(nn.Module): pass", "from os import sep\ny = f()"
    )
    assert top_of(text) == [
        "import os", "import torch.nn as nn", "from os import sep",
        "from torch.distributed.elastic.multiprocessing.errors import record", "def f():", "class A(nn.Module):",
    ]  # fmt: skip
    assert main_of(text) == ["global x", "x = 1", "y = f()"]
    assert text.endswith('\n\n\nif __name__ == "__main__":\n    main()\n')


@pytest.mark.parametrize(
    ("body", "main"),
    [
        ("x = 1\ndef f(a=x): return a", ["x = 1", "def f(a=x):\n    return a"]),
        ("def f(): return 1\nf = 2", ["def f():\n    return 1", "f = 2"]),
        ("n = 3\nclass A:\n    m = n", ["n = 3", "class A:\n    m = n"]),
        ("x = 1\nprint(globals()['x'])", ["global x", "x = 1", "print(globals()['x'])"]),
        ("import os\nos.environ['A'] = '1'\nimport json", ["os.environ['A'] = '1'", "import json"]),
        ("x = 1; y = [i for i in (x,)]", ["x = 1", "y = [i for i in (x,)]"]),
    ],
    ids=["default", "set twice", "class body", "globals", "environment", "one line"],
)
def test_what_depends_on_main_stays_there(body: str, main: list[str]) -> None:
    assert main_of(made(body)) == main


def test_without_a_formatter_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbddp.capabilities.export import command

    cells, line = [ExportedCell("In[1]", "", "x = 1")], "torchrun a.py"
    assert len(command.write(tmp_path / "a.py", cells, {}, line, False)) == 1
    monkeypatch.setattr(command.shutil, "which", lambda *args, **options: None)
    said = command.write(tmp_path / "b.py", cells, {}, line, False)
    assert said[1:] == ["b.py is not formatted: neither ruff nor black is installed, or they failed"]


def test_a_cell_on_some_ranks_is_an_if() -> None:
    text = made("x = 1\nprint(x)", "y = 2", lines=("--ranks 0,2-3", "--ranks 1 --timeout 9"))
    assert main_of(text) == [
        "if int(os.environ['RANK']) in (0, 2, 3):\n    x = 1\n    print(x)",
        "if int(os.environ['RANK']) in (1,):\n    y = 2",
    ]


def test_the_group_is_made_once_and_ended_once() -> None:
    one = "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint(1)\ndist.destroy_process_group()"
    text = made(one, one)
    assert main_of(text) == [
        "dist.init_process_group('gloo')", "print(1)", "print(1)",
        "if dist.is_initialized():\n    dist.destroy_process_group()",
    ]  # fmt: skip
    assert "destroy" not in made("x = 1")
    setup = "import torch.distributed as dist\ndef setup(): dist.init_process_group('gloo')\nsetup()"
    with pytest.raises(BadInput, match=r"^In\[1\] and In\[2\] both call init_process_group"):
        made(setup, "setup()")
    assert "is_initialized" in made(setup, "if not dist.is_initialized(): setup()")


def test_arguments_that_differ_between_cells_are_set_before_each() -> None:
    assert main_of(made("x = 1", "y = 2", lines=("-- --lr 1", "-- --lr 2"))) == [
        "sys.argv[1:] = ['--lr', '1']", "x = 1", "sys.argv[1:] = ['--lr', '2']", "y = 2"
    ]  # fmt: skip
    assert "sys" not in made("x = 1", "y = 2", lines=("-- --lr 1", "-- --lr 1"))


class Large:
    """A value, as a tensor is one: it can be watched."""


def test_a_push_that_runs_again_replaces_its_older_values_which_are_freed() -> None:
    history, first, second = CellHistory(), Large(), Large()
    watched = weakref.ref(first)
    history.push(Ran(1, None, pushed={"a": first, "b": 1}, where="P"))
    history.push(Ran(1, None, pushed={"c": 2}, where="P"))
    history.append(Ran(2, "", "use", where="C"))
    history.push(Ran(3, None, pushed={"a": second}, where="P"))
    history.push(Ran(3, None, pushed={"c": 3}, where="P"))
    del first
    gc.collect()
    assert watched() is None
    for numbers in (None, (2,)):
        assert [ran.pushed for ran in history.chosen(numbers)] == [{"a": second}, {"c": 3}, None]


def notebook(*cells: tuple[str, int | None, list[str]]) -> dict[str, object]:
    return {
        "cells": [
            {"cell_type": "code", "execution_count": n, "metadata": {"tags": tags}, "source": text}
            for text, n, tags in cells
        ]
    }


def test_a_file_gives_its_cells_by_number_or_tag_and_pushed_literals() -> None:
    book = notebook(
        ("lr = 0.5\nx = load()", 1, []), ("%ddp push lr", 2, []), ("%%ddp --nproc 2\na = lr", 3, ["train"]),
        ("%%ddp\nb = 1", 5, []), ("c = 1", 6, ["train"]), ("%%ddp", 7, []),
    )  # fmt: skip
    assert [(c.line, c.body) for c in cells_of(book, "n.ipynb", None, "")] == [
        (None, "lr = 0.5\n"), ("--nproc 2", "a = lr"), ("", "b = 1")
    ]  # fmt: skip
    assert [c.body for c in cells_of(book, "n.ipynb", (5,), "")] == ["lr = 0.5\n", "b = 1"]
    assert [c.body for c in cells_of(book, "n.ipynb", None, "train")] == ["lr = 0.5\n", "a = lr"]
    timed = notebook(("\n%%time\n%%ddp -o x\n  a = 1", 1, []), ("%%bash\n%%ddp\nls", 2, []))
    assert cells_of(timed, "n.ipynb", None, "") == [ExportedCell("In[1]", "-o x", "  a = 1")]
    assert "\na = 1\n" in script(["%%time\n%%ddp -o x\n  a = 1", "%%bash\n%%ddp\nls"])
    with pytest.raises(BadInput, match=r"n.ipynb has no %%ddp cell In\[4\]"):
        cells_of(book, "n.ipynb", (4,), "")
    with pytest.raises(BadInput, match="no %%ddp cell with the tag test"):
        cells_of(book, "n.ipynb", None, "test")
    with pytest.raises(BadInput, match=r"In\[1\] pushes 'x', whose value the file does not show"):
        cells_of(notebook(("x = load()\n%ddp push x", 1, []), ("%%ddp\nx", 2, [])), "n.ipynb", None, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export --tag a", "--tag needs --notebook FILE"),
        ("export -o x", "-o is for --to; the script's file is named without an option"),
        ("export --to slurm --cells 3", "--to slurm writes the job for a script; first export the cells"),
        ("export --to lsf", "torchrun"),
        ("export --nnodes 4:2", "counts backwards"),
    ],
)
def test_options_that_do_not_go_together_are_refused(line: str, words: str, tmp_path: Path) -> None:
    from nbddp.capabilities.export import command

    def carry_out() -> None:
        command.carry_out(parse_command(line).args, Shape(), CellHistory())

    with pytest.raises(BadInput) as e:
        carry_out()
    assert words in str(e.value)


# -- the real thing ----------------------------------------------------------------------------------

SETUP = """%%ddp --nproc 2
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
%matplotlib inline

class Net(torch.nn.Module):
    '''Two
layers.'''
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x) * factor  # a name of the notebook

dist.init_process_group("gloo")
torch.manual_seed(rank := dist.get_rank())
model = DDP(Net())
"""
TRAIN = """%%ddp
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
losses = []

def step(x, y):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()

for i in range(5):
    x = torch.as_tensor(data[i::5]).float()
    losses.append(step(x, x.sum(1, keepdim=True)))
"""
SAID = """%%ddp --ranks 1
import json
with open(os.path.join(folder, "losses.json"), "w") as file:
    json.dump([repr(one) for one in losses], file)
"""


def under_torchrun(script: Path, *options: str) -> str:
    """What it prints. torch can abort in a thread of gloo's while Python ends: then once more."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # nothing of the package may be needed
    for _ in range(3):
        done = subprocess.run([*TORCHRUN, *options, script.name], cwd=script.parent, env=env, capture_output=True,
                              text=True, timeout=120, check=False)  # fmt: skip
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


FREED = """\
import gc, time
end = time.monotonic() + 20
while old() is not None and time.monotonic() < end:  # a thread of pyzmq's lets go of what has been sent
    gc.collect()
    time.sleep(0.01)
print(old() if old() is None else gc.get_referrers(old()))
"""


@pytest.mark.torchrun
def test_exported_cells_train_to_the_same_losses_under_torchrun(new_kernel: Kernel, tmp_path: Path) -> None:
    def run(code: str) -> str:
        shown = new_kernel.run(code)
        assert shown.ok, shown.error
        return shown.text()

    run(
        "import numpy as np; lr = 0.125; factor = 0.5; data = np.random.default_rng(0).normal(size=(50, 4)); "
        f"folder = {str(tmp_path)!r}"
    )
    run("%ddp start --nproc 2")
    run("import weakref; old = weakref.ref(data)\n%ddp push lr factor data folder")
    run("data = data.copy()\n%ddp push lr factor data folder")
    assert run(FREED).strip() == "None", "nothing keeps what was pushed before"
    run(SETUP)
    assert not new_kernel.run("%%ddp\nraise ValueError('this cell is left out')").ok
    run(SETUP)
    run(TRAIN)
    run(SAID)
    here = json.loads((tmp_path / "losses.json").read_text())
    said = run("%ddp export train.py")
    script = tmp_path / "train.py"
    assert "train.py written; start it with torchrun --standalone --nproc-per-node 2 train.py" in said
    assert "left out %matplotlib inline" in said
    text = script.read_text()
    assert "nbddp" not in text
    assert "%%ddp" not in text
    assert "this cell is left out" not in text
    assert text.count("class Net") == 1
    assert (tmp_path / "train-values.pkl").exists()
    (tmp_path / "losses.json").unlink()
    [line] = re.findall(r"^    torchrun (.*) train\.py$", text, re.MULTILINE)
    under_torchrun(script, *line.split())
    assert json.loads((tmp_path / "losses.json").read_text()) == here
    assert len(here) == 5
    assert not new_kernel.run("%ddp export train.py").ok, "a file that exists is not replaced"
    formatter = Path(sys.executable).with_name("ruff")
    if formatter.exists():
        subprocess.run([formatter, "format", "--check", "--line-length", "120", script], check=True)


@pytest.mark.more
def test_a_notebooks_file_is_exported_from_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "%%ddp --nproc 2 --max-restarts 1 --env GREETING='a b' -- --lr 0.5\nimport os, sys\n"
        "open(f'out-{os.environ[\"RANK\"]}', 'w').write(' '.join([os.environ['WORLD_SIZE'], *sys.argv[1:]]))"
    )
    (tmp_path / "my notebook.ipynb").write_text(json.dumps(notebook((body, None, ["a"]), ("%%ddp\n1/0", None, []))))
    monkeypatch.chdir(tmp_path)
    assert terminal.main(["export", "my notebook.ipynb", "go.py", "--tag", "a"]) == 0
    said = capsys.readouterr().out
    assert "GREETING='a b' torchrun --standalone --nproc-per-node 2 --max-restarts 1 go.py --lr 0.5" in said
    done = subprocess.run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", "go.py", "--lr", "0.5"],
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"out-{r}").read_text() for r in range(2)] == ["2 --lr 0.5"] * 2
    assert terminal.main(["export", "my notebook.ipynb", "go.py"]) == 2
    assert "go.py' exists; add --force to replace it" in capsys.readouterr().err
    assert terminal.main(["export", "nowhere.ipynb", "other.py"]) == 2
    assert "nowhere.ipynb' cannot be read (No such file or directory)" in capsys.readouterr().err


CELL = (
    "%%ddp --nproc 2 --max-restarts 3 --visible own --log-dir logs --tee 3 --redirects 0:1 --local-ranks-filter 0 "
    "--env POOLS=1\npass"
)
LINE = (
    "POOLS=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 --virtual-local-rank --log-dir logs "
    "--redirects 0:1 --tee 3 --local-ranks-filter 0 a.py"
)


def test_what_a_cell_says_of_the_launch_is_in_the_line_from_a_kernel_and_from_a_file(
    new_kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(code: str) -> str:
        shown = new_kernel.run(code)
        assert shown.ok, shown.error
        return shown.text()

    run(f"import os; os.chdir({str(tmp_path)!r})")
    run(CELL)
    run("%%ddp\nimport os")
    assert f"start it with {LINE}\n" in run("%ddp export a.py")
    assert f"    {LINE}\n" in (tmp_path / "a.py").read_text()
    assert run("%ddp export a.py --to torchrun").strip() == LINE
    assert run("%ddp export a.py --to torchrun --env POOLS").strip() == LINE.removeprefix("POOLS=1 ")
    run("%ddp stop")
    assert run("%ddp export a.py --to torchrun").strip() == LINE
    book = notebook((CELL, 1, []), ("%%ddp\nimport os", 2, []))
    (tmp_path / "n.ipynb").write_text(json.dumps(book))
    monkeypatch.chdir(tmp_path)
    assert terminal.main(["export", "n.ipynb", "a.py", "--force"]) == 0
    assert f"start it with {LINE}\n" in capsys.readouterr().out
    assert terminal.main(["export", "n.ipynb", "a.py", "--to", "torchrun"]) == 0
    assert capsys.readouterr().out.strip() == LINE


def test_a_variable_that_a_later_cell_takes_back_is_not_in_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [("%%ddp --env A=1 --env B=2 --debug\npass", 1, []), ("%%ddp --env A --debug off\npass", 2, [])]
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook(*cells)))
    monkeypatch.chdir(tmp_path)
    assert terminal.main(["export", "n.ipynb", "a.py"]) == 0
    assert "start it with B=2 torchrun --standalone --nproc-per-node 2 a.py\n" in capsys.readouterr().out
