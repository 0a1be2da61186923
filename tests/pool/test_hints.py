"""The quiet line under an ordinary run: mistakes that cost nothing to know have one, and no healthy program has any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbddp.errors import RunFailed
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen, Terminal
from nbddp.pool.pool import WorkerPool
from tests.pool.silent import PROGRAMS, RUN, define
from tests.unit.test_output import Shown

PAST = "DDP's forward was not called before "
NONE = "DDP exchanged no gradients before "
BESIDE = "DDP's optimizer also moves "
STEPS = "the ranks took different numbers of optimizer steps ("
LONE = "accelerate has num_processes 1 on each of 2 ranks"
LINE = re.compile("|".join(map(re.escape, (PAST, NONE, BESIDE, STEPS, LONE))))
# mistakes of the corpus that an ordinary run tells of
TOLD = {
    "module_forward": PAST,
    "head_added_after_wrap": BESIDE,
    "arcface_head": BESIDE,
    "more_steps_on_a_rank": STEPS,
    "early_stop_alone": STEPS,
}
CORPUS = [
    pytest.param(name, marks=() if name in TOLD or not each.kind else pytest.mark.more)
    for name, each in PROGRAMS.items()
]
USUAL = "torch.manual_seed(r); x = torch.randn(4, 8); y = torch.randint(0, 2, (4,))\n"
NET = "torch.manual_seed(0); net = Net(); d = DDP(net); o = torch.optim.SGD(d.parameters(), .1)\n" + USUAL
LOSS = "Fn.cross_entropy(d(x), y)"
ALONE = "Fn.cross_entropy(net(x), y)"
WRONG = {
    "without an exchange": (NET + f"""
for _ in range(4):
    o.zero_grad()
    with d.no_sync(): {LOSS}.backward()
    o.step()
""", NONE + "4 of 4 optimizer steps"),
    "a step in each micro-step": (NET + f"""
for n in range(8):
    o.zero_grad()
    with contextlib.nullcontext() if n % 4 == 3 else d.no_sync(): {LOSS}.backward()
    o.step()
""", NONE + "6 of 8 optimizer steps"),
    "a head by its name": (NET + """
head = nn.Linear(2, 2); o.add_param_group({"params": [*head.parameters()]})
for _ in range(4): o.zero_grad(); Fn.cross_entropy(head(d(x)), y).backward(); o.step()
""", BESIDE + "2 parameters that DDP does not exchange (head.weight, head.bias), and they differ between ranks"),
    "unfrozen after wrapping": ("""
torch.manual_seed(0); net = Net(); net.a.requires_grad_(False); d = DDP(net)
net.a.requires_grad_(True); o = torch.optim.SGD(net.parameters(), .1)
""" + USUAL + f"for _ in range(4): o.zero_grad(); {LOSS}.backward(); o.step()\n",
        BESIDE + "2 parameters that DDP does not exchange (a.weight, a.bias)"),
    "a step left out on a rank": (NET + f"""
for n in range(6):
    o.zero_grad(); {LOSS}.backward()
    if r == 0 or n != 3: o.step()
""", STEPS + "5 on rank 1, 6 on rank 0)"),
}  # fmt: skip
HEALTHY = {
    "gan": """
torch.manual_seed(0); G, D = DDP(nn.Linear(8, 8)), DDP(Net()); one = torch.optim.Adam(G.parameters())
two = torch.optim.Adam(D.parameters())
""" + USUAL + """
for _ in range(4):
    two.zero_grad(); Fn.cross_entropy(D(G(x).detach()), y).backward(); two.step()
    one.zero_grad(); D.requires_grad_(False); (-D.module(G(x))).mean().backward(); D.requires_grad_(True); one.step()
""",
    "accumulation": NET + f"""
for n in range(8):
    with contextlib.nullcontext() if n % 4 == 3 else d.no_sync(): ({LOSS} / 4).backward()
    if n % 4 == 3: o.step(); o.zero_grad()
""",
    "averaged by hand": NET + f"""
for _ in range(4):
    o.zero_grad(); {ALONE}.backward()
    for p in net.parameters(): dist.all_reduce(p.grad); p.grad /= w
    o.step()
""",
    "marked": NET + f"""
for _ in range(4): o.zero_grad(); {ALONE}.backward(); o.step()  # nbddp: ok
""",
    "a head averaged by hand": NET + """
torch.manual_seed(0); head = nn.Linear(2, 2); o.add_param_group({"params": [*head.parameters()]})
for _ in range(4):
    o.zero_grad(); Fn.cross_entropy(head(d(x)), y).backward()
    for p in head.parameters(): dist.all_reduce(p.grad); p.grad /= w
    o.step()
""",
    "a head sent by rank 0": NET + """
torch.manual_seed(0); head = nn.Linear(2, 2); o.add_param_group({"params": [*head.parameters()]})
for _ in range(4):
    o.zero_grad(); Fn.cross_entropy(head(d(x)), y).backward(); o.step()
    for p in head.parameters(): dist.broadcast(p.data, 0)
""",
    "local SGD that ends between two averages": NET + f"""
for n in range(8):
    o.zero_grad()
    with d.no_sync(): {LOSS}.backward()
    o.step()
    if n % 3 == 2:
        for p in net.parameters(): dist.all_reduce(p.data); p.data /= w
""",
    "an optimizer that averages in its step": NET + f"""
class Averaging(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]: dist.all_reduce(p.grad); p.grad /= w
        return super().step(closure)
o = Averaging(net.parameters(), .1)
for _ in range(4): o.zero_grad(); {ALONE}.backward(); o.step()
""",
    "rank 0 steps and sends": NET + f"""
for _ in range(4):
    o.zero_grad(); {LOSS}.backward()
    if r == 0: o.step()
    for p in net.parameters(): dist.broadcast(p.data, 0)
""",
    "closures": NET + f"""
for _ in range(4):
    def closure(): o.zero_grad(); l = {LOSS}; l.backward(); return l
    o.step(closure)
""",
    "low-rank adapters": """
torch.manual_seed(0); net = Net(); net.requires_grad_(False)
net.b = nn.Sequential(net.b, nn.Linear(2, 2)); d = DDP(net); o = torch.optim.AdamW(net.parameters())
""" + USUAL + f"for _ in range(4): o.zero_grad(); {LOSS}.backward(); o.step()\n",
    "a model of each rank": NET + f"""
torch.manual_seed(r); own = Net(); mine = torch.optim.SGD(own.parameters(), .1)
for _ in range(4):
    o.zero_grad(); {LOSS}.backward(); o.step()
    mine.zero_grad(); Fn.cross_entropy(own(x), y).backward(); mine.step()
""",
    "parameters of each rank by another name": NET + f"""
own = nn.Linear(2, 2 + r); o.add_param_group({{"params": [*own.parameters()]}})
for _ in range(4): o.zero_grad(); (own(d(x)).mean() + {LOSS}).backward(); o.step()
""",
    "ignored on purpose": """
torch.manual_seed(0); net = Net(); DDP._set_params_and_buffers_to_ignore_for_model(net, ["a.weight"])
d = DDP(net); o = torch.optim.SGD(net.parameters(), .1)
""" + USUAL + f"for _ in range(4): o.zero_grad(); {LOSS}.backward(); o.step()\n",
    "a group of one rank": """
groups = [dist.new_group([k]) for k in range(w)]; torch.manual_seed(0)
net = Net(); d = DDP(net, process_group=groups[r]); o = torch.optim.SGD(d.parameters(), .1)
""" + USUAL + f"for _ in range(4): o.zero_grad(); {ALONE}.backward(); o.step()\n",
    "rollouts of other lengths": NET + f"""
for _ in range(4):
    with torch.no_grad():
        for _ in range(3 + 2 * r): d.module(x)
    for _ in range(2): o.zero_grad(); {LOSS}.backward(); o.step()
""",
    "steps twice after a backward": NET + f"for _ in range(4): o.zero_grad(); {LOSS}.backward(); o.step(); o.step()\n",
    "tuned on each rank after training": NET + f"""
for _ in range(4): o.zero_grad(); {LOSS}.backward(); o.step()
own = torch.optim.SGD(net.parameters(), .1)
for _ in range(4): own.zero_grad(); {ALONE}.backward(); own.step()
""",
    "copies trained on each rank": NET + f"""
for _ in range(4):
    fast = copy.deepcopy(net); inner = torch.optim.SGD(fast.parameters(), .1)
    for _ in range(2 + r): inner.zero_grad(); Fn.cross_entropy(fast(x), y).backward(); inner.step()
    o.zero_grad(); {LOSS}.backward(); o.step()
""",
    "one optimizer of two models in turn": NET + """
first = DDP(nn.Linear(8, 8)); o.add_param_group({"params": [*first.parameters()]})
for n in range(6): o.zero_grad(); Fn.cross_entropy(d(first(x)) if n % 2 else d(x), y).backward(); o.step()
""",
    "compiled": NET + """
compiled = torch.compile(d, backend="eager")
for _ in range(4): o.zero_grad(); Fn.cross_entropy(compiled(x), y).backward(); o.step()
""",
    "uneven inputs": NET + f"""
with torch.distributed.algorithms.join.Join([d]):
    for _ in range(4 + r): o.zero_grad(); {LOSS}.backward(); o.step()
""",
    "an ended process group": NET + f"""
for _ in range(4): o.zero_grad(); {LOSS}.backward(); o.step()
dist.destroy_process_group(); dist.init_process_group("gloo")
""",
}  # fmt: skip


@pytest.fixture(scope="module")
def ready(pool: WorkerPool) -> WorkerPool:
    """The module's pool, with the programs' helpers on its ranks."""
    define(pool)
    return pool


def said(pool: WorkerPool, code: str, **options: object) -> list[str]:
    screen = Shown()
    pool.run_cell(code, cell=3, screen=screen, **options)
    assert not [row for row in screen.rows if "failed on" in row]
    return [row for row in screen.rows if LINE.match(row)]


def of_corpus(pool: WorkerPool, name: str, bad: bool) -> list[str]:
    try:
        return said(pool, RUN.format(name=name, bad=bad))
    except RunFailed:  # some mistakes are loud
        return []


def program(body: str) -> str:
    tail = "dist.destroy_process_group()\n"
    return (
        f"r, w = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\ndist.init_process_group('gloo')\n{body}{tail}"
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CORPUS)
def test_of_the_corpus_only_what_is_sure_is_told_and_no_twin(ready: WorkerPool, name: str) -> None:
    define(ready, PROGRAMS[name].body, name)
    if name in TOLD:
        (line,) = of_corpus(ready, name, True)
        assert line.startswith(TOLD[name])
        assert line.endswith("; %%ddp --sanitize shows where")
    assert of_corpus(ready, name, False) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_has_one_line(ready: WorkerPool, name: str) -> None:
    body, words = WRONG[name]
    (line,) = said(ready, program(body))
    assert line.startswith(words), line


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_has_none(ready: WorkerPool, name: str) -> None:
    assert said(ready, program(HEALTHY[name])) == []


def test_a_run_that_is_not_seen_by_all_ranks_or_not_asked_has_none(ready: WorkerPool) -> None:
    wrong = WRONG["a head by its name"][0]
    assert said(ready, program(wrong), timings=False) == []
    assert said(ready, program(wrong), sanitize=True) == []
    alone = wrong.replace("torch.manual_seed(0)", "net = Net()", 1)
    assert said(ready, "dist.init_process_group('gloo', rank=0, world_size=1)\nr = 0\n" + alone, ranks=[0]) == []
    with pytest.raises(RunFailed):
        ready.run_cell(program(wrong) + "1 / 0", screen=(screen := Shown()))
    assert not [row for row in screen.rows if LINE.match(row)]


def test_cells_that_share_a_model_have_none_and_a_mistake_in_a_later_one_is_told(ready: WorkerPool) -> None:
    """A backward in one cell and the step in the next, and a model that is wrapped again."""
    start = program("").replace("dist.destroy_process_group()\n", "")
    assert said(ready, start + NET + f"{LOSS}.backward()") == []
    assert said(ready, f"o.step()\nfor _ in range(3): o.zero_grad(); {LOSS}.backward(); o.step()") == []
    again = "d = DDP(net); o = torch.optim.SGD(d.parameters(), .1)\n"
    assert said(ready, f"{again}for _ in range(3): o.zero_grad(); {LOSS}.backward(); o.step()") == []
    assert said(ready, f"for _ in range(3): o.zero_grad(); {LOSS}.backward(); o.step()") == []
    (line,) = said(ready, f"for _ in range(3): o.zero_grad(); {ALONE}.backward(); o.step()")
    assert line.startswith(PAST + "3 of 3 optimizer steps")
    ready.run_cell("dist.destroy_process_group()", screen=NullScreen())


ACCELERATE = """
import sys, types
state = types.ModuleType("accelerate.state")
class PartialState:
    kept = {}
    def __init__(self, processes=1):
        self.__dict__ = PartialState.kept
        if not PartialState.kept: PartialState.kept.update(num_processes=processes, device=torch.device("cpu"))
state.PartialState, state.is_initialized = PartialState, lambda: bool(PartialState.kept)
sys.modules["accelerate.state"] = state
"""
OWN = "net = Net(); o = torch.optim.SGD(net.parameters(), .1)\n"
OWN += "for _ in range(2): Fn.cross_entropy(net(x), y).backward(); o.step()"
LONELY = {
    "accelerate on the CPU": ("state.PartialState()\n" + OWN, 1),
    "again": (OWN, 0),
    "averages by hand": ("state.PartialState()\n" + OWN + "\ndist.all_reduce(net.a.weight.grad)", 0),
    "averages by sends": ("state.PartialState()\n" + OWN + "\ndist.send(x, 1) if r == 0 else dist.recv(x, 0)", 0),
    "meant": ("state.PartialState()\n" + OWN + "  # nbddp: ok", 0),
    "for all ranks": ("state.PartialState(2)\n" + OWN, 0),
    "no training": ("state.PartialState()", 0),
}


@pytest.mark.parametrize("name", LONELY)
def test_ranks_that_accelerate_trains_alone_are_told(ready: WorkerPool, name: str) -> None:
    """It makes a group of all ranks on the CPU, and uses none unless it is told `cpu=True`."""
    if name != "again":
        ready.run_cell(ACCELERATE, screen=NullScreen())
    code, lines = LONELY[name]
    found = said(ready, program(f"{USUAL}{code}\n"))
    assert len(found) == lines
    assert all("write Accelerator(cpu=True), or use_cpu=True in TrainingArguments" in line for line in found)
    if name != "accelerate on the CPU":
        ready.run_cell("del sys.modules['accelerate.state']", screen=NullScreen())


def test_the_part_imports_none_of_the_sanitizer(ready: WorkerPool) -> None:
    ready.ensure(LaunchSpec(fresh=True))
    code = "import sys; [m for m in sys.modules if 'capabilities.sanitizer.' in m]"
    for modules in ready.run_cell(code, want_value=True, screen=NullScreen()):
        assert {each.rpartition(".")[2] for each in modules} == {"hints", "on_rank", "on_rank_hints"}
    define(ready)


def test_a_script_at_a_terminal_has_its_line_on_stderr(
    ready: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    helpers = "import contextlib, os, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as Fn\n"
    net = "from torch.nn.parallel import DistributedDataParallel as DDP\nclass Net(nn.Linear):\n    pass\n"
    body = WRONG["without an exchange"][0].replace("Net()", "Net(8, 2)")
    script = tmp_path / "train.py"
    script.write_text(helpers + net + program(body))
    ready.run_script(str(script), screen=Terminal())
    shown = capsys.readouterr()
    assert shown.err.strip().endswith("; --sanitize shows where"), shown
    assert "sanitize" not in shown.out
