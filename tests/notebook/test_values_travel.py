"""Values between notebook and ranks, in a real kernel."""

from __future__ import annotations

import re
from types import CodeType
from typing import Any

import cloudpickle
import pytest

from nbddp.capabilities.subprocesses import on_rank
from nbddp.protocol import pickling
from tests.kernels import Kernel


def test_output_binds_a_value_per_rank(four: Kernel) -> None:
    four.run("%%ddp -o squares\nimport os\nint(os.environ['RANK']) ** 2")
    assert four.run("print(squares[2], len(squares), list(squares))").text() == "4 4 [0, 1, 4, 9]\n"
    assert four.run("squares").displays[0]["text/plain"] == "rank 0 │ 0\nrank 1 │ 1\nrank 2 │ 4\nrank 3 │ 9"


def test_value_that_cannot_travel_becomes_its_repr_and_says_why(four: Kernel) -> None:
    assert four.run("%%ddp -o locks\nimport threading\nthreading.Lock()").ok
    text = four.run("print(repr(locks[1]))").text()
    assert "lock" in text
    assert "not sent: TypeError" in text


def test_tensor_travels_and_only_then_torch_is_imported(new_kernel: Kernel) -> None:
    assert new_kernel.run("%%ddp --nproc 2 -o t\nimport torch\ntorch.ones(2)").ok
    assert new_kernel.run("print(t[0].sum().item())").text() == "2.0\n"


def test_class_of_a_cell_travels(four: Kernel) -> None:
    source = (
        "class A:\n    def __init__(self): self.v = 1\nclass B(A):\n    def __init__(self): super().__init__()\nb = B()"
    )
    four.run(source)
    assert four.run("%ddp push b").ok
    assert four.run("%%ddp\nprint(b.v)").text() == "ranks 0–3 │ 1\n"


def test_value_whose_pickling_exits_is_told(four: Kernel) -> None:
    shown = four.run("%%ddp -o odd\nimport sys\nclass Odd:\n    def __reduce__(self): sys.exit(3)\nOdd()")
    assert shown.ok, shown.error
    shown = four.run("print(repr(odd[1]))")
    assert "Odd object" in shown.text(), shown.error
    assert "not sent: SystemExit: 3" in shown.text()
    four.run("%%ddp\nclass Late:\n    def __reduce__(self): return sys.exit, (4,)\nlate = Late()")
    assert four.run("%ddp pull late").ok
    assert "not sent: SystemExit: 4" in four.run("print(repr(late[0]))").text()


def test_push_and_pull(four: Kernel) -> None:
    four.run("a, b = 3, [1, 2]\n%ddp push a b")
    four.run("%%ddp\nimport os\nloss = a * int(os.environ['RANK']) + b[1]")
    assert four.run("%ddp pull loss").ok
    assert four.run("print(list(loss))").text() == "[2, 5, 8, 11]\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%ddp pull nope", "'nope' is not defined on ranks 0–3"),
        ("%ddp push nope", "'nope' is not defined in the notebook"),
        ("import threading; lock = threading.Lock()\n%ddp push lock", "'lock' cannot be sent to the ranks (TypeError"),
        ("%ddp pull a --ranks 7", "--ranks names rank 7, but the pool has ranks 0–3"),
        ("%ddp pull 3x", "'3x' is not a valid Python name"),
        ("%ddp free", "%ddp has no subcommand 'free'; %ddp lists them"),
        ("%ddp resart", "%ddp has no subcommand 'resart'; did you mean %ddp restart?"),
        ("%ddp run --bad x.py", "%ddp run has no option --bad; %ddp run --help lists the options"),
        ("%ddp log --rank 7", "rank 7 did not take part in the last run, which ran on ranks 0–3"),
        ("%%ddp --nproc 0\npass", "'0' is not a number of workers"),
        ("%%ddp --nproc -1\npass", "'-1' is not a number of workers"),
        ("%%ddp --nproc lots\npass", "'lots' is not a number of workers"),
        ("%%ddp --frsh\npass", "did you mean --fresh?"),
        ("%%ddp --nproc 2 --gpus-per-proc 8\npass", "needs a GPU, and this machine has none"),
        ("%%ddp --device cuda\npass", "needs a GPU, and this machine has none"),
        ("%%ddp --ranks 9\npass", "--ranks names rank 9"),
        ("%%ddp --nproc 2 --ranks 3\npass", "--ranks names rank 3"),
        ("%%ddp\nx = = 2", "no rank ran the cell"),
        ("%%ddp\nreturn 3", "no rank ran the cell"),
        ("%%ddp\n# nothing\n   ", "the cell under %%ddp is empty"),
    ],
)
def test_bad_input_gets_a_plain_answer_and_loses_nothing(four: Kernel, line: str, words: str) -> None:
    assert four.run("%%ddp -o before\nimport os\nstate = 'here'\nos.getpid()").ok
    shown = four.run(line)
    assert not shown.ok
    assert words in shown.error
    assert "Traceback" not in shown.error
    assert four.run("%%ddp -o after\nprint(state)\nos.getpid()").ok
    assert four.run("print(list(before) == list(after))").text() == "True\n"


def test_pulled_value_that_cannot_travel_says_why(four: Kernel) -> None:
    four.run("%%ddp\nimport threading\nguard = threading.Lock()")
    assert four.run("%ddp pull guard").ok
    assert "not sent: TypeError" in four.run("print(repr(guard[0]))").text()


@pytest.mark.parametrize("without", [False, True])
def test_code_keeps_the_name_of_its_file(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cloudpickle leaves it out from 3.1.3 on; errors and reports go by it."""
    table = cloudpickle.Pickler.dispatch_table
    reduce = table[CodeType]
    if without:
        monkeypatch.setitem(table, CodeType, lambda code: reduce(code.replace(co_filename="<dynamic-code>")))
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n    def inner():\n        1 / 0\n    return inner", "/cells/In[3].py", "exec"), made)
    for packed in (pickling.pack(made["outer"]), on_rank._bytes(made["outer"])):
        inner = cloudpickle.loads(packed)()
        with pytest.raises(ZeroDivisionError) as raised:
            inner()
        assert (raised.traceback[-1].frame.code.raw.co_filename, raised.traceback[-1].lineno) == ("/cells/In[3].py", 2)


SENT = "def halve(x):\n    return 1 / x\n\ndef train(x):\n    return halve(x - 2)"
CALLS = {  # of a function of one cell in another: by Python, and by a cell on the ranks that has got it
    "run": "get_ipython().magics_manager.registry['DDPMagics'].pool.run(train, 2)",
    "push": "%ddp push train",
}


@pytest.mark.parametrize("how", CALLS)
def test_a_traceback_through_a_function_of_the_notebook_shows_the_cells_lines(four: Kernel, how: str) -> None:
    sent = four.run(SENT)
    shown = four.run(CALLS[how])
    if how == "push":
        shown = four.run("%%ddp\ntrain(2)")
    assert "ZeroDivisionError" in shown.error
    for place in (
        r"5, in train\n(.*\n){2}---->    5     return halve\(x - 2\)",
        r"2, in halve\n.*\n---->    2     return 1 / x",
    ):
        assert re.search(rf"Cell In\[{sent.number}\], line {place}\n", shown.error)


def test_a_method_and_a_function_in_a_closure_bring_their_cells_along(four: Kernel) -> None:
    four.run("def fail(): raise KeyError('lost')\nclass Trainer:\n    def fit(self): fail()")
    four.run("trainer = Trainer()\ndef outer(f):\n    def inner(): f()\n    return inner")
    shown = four.run("get_ipython().magics_manager.registry['DDPMagics'].pool.run(outer(trainer.fit))")
    for line in ("def inner(): f()", "def fit(self): fail()", "def fail(): raise KeyError('lost')"):
        assert line in shown.error
