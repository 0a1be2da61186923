"""`--sanitize` on real ranks: each mistake is found with kind and line, each healthy twin is silent, and nothing that a
program computes or counts is changed."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import nbddp
from nbddp.deadlock.on_rank import frames
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool.silent import HELPERS, PROGRAMS, Program, define, found_in

if TYPE_CHECKING:
    from nbddp.capabilities.sanitizer.on_rank_recorder import SanitizerRecorder

FIRST = {each.kind: each.name for each in reversed(PROGRAMS.values()) if each.always}  # of a kind is always run
CASES = [
    pytest.param(each, id=each.name, marks=() if each.name == FIRST.get(each.kind) else pytest.mark.more)
    for each in PROGRAMS.values()
]
# a twin, a small change of it, and the kind that must be found; empty: the change is harmless
MUTANTS = (
    ("set_epoch_forgotten", "loader(r, w)", "loader(0, w)", "sampler-rank"),
    ("set_epoch_forgotten", "loader(r, w)", "loader(r, w, seed=r)", "sampler-seed"),
    ("set_epoch_forgotten", "loader(r, w)", "loader(r, w, drop_last=True)", ""),
    ("set_epoch_forgotten", "std(r, w)", "std(r, w, Net(drop=.5), seed=False)", "same-mask"),
    ("set_epoch_forgotten", "std(r, w)", "std(r, w, Net(drop=.5))", ""),
    ("set_epoch_forgotten", "epochs(d, o,", "d.train(r == 0); epochs(d, o,", "mode-differs"),
    ("set_epoch_forgotten", "epochs(d, o,", "d.train(); epochs(d, o,", ""),
    ("set_epoch_forgotten", "epochs(d, o,", "epochs(d.module, o,", "past-ddp"),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "if r == 1: o.step()", "steps-differ"),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "o.step()", ""),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "o.param_groups[0]['lr'] /= 1 + r; o.step()",
     "hyperparameters-differ"),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "o.param_groups[0]['lr'] /= 2; o.step()", ""),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "next(d.parameters()).grad.mul_(1 + r); o.step()",
     "edited-gradients"),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "next(d.parameters()).grad.mul_(2); o.step()", ""),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "o.step(); next(d.parameters()).data.add_(r)",
     "changed-parameters"),
    ("step_on_rank0", "if r == 0 or not bad: o.step()", "o.step(); next(d.parameters()).data.add_(1)", ""),
    ("load_on_rank0_after_wrap", "if r == 0 or not bad:", "if r == 1:", "changed-parameters"),
    ("accumulation_remainder", "or (not bad and i == n - 1)", "", "no-sync-at-step"),
    ("accumulation_remainder", "with contextlib.nullcontext() if last else d.no_sync():", "if True:", ""),
    ("no_sync_last_forward_inside", "if not bad: d.require_backward_grad_sync = k == 1", "", ""),
    ("no_sync_last_forward_inside", "if not bad: d.require_backward_grad_sync = k == 1",
     "d.require_backward_grad_sync = k == 0", "no-sync-at-step"),
    ("hook_without_division", "b.buffer().div_(w)", "b.buffer().div_(w * w)", "hook-scale"),
    ("averaged_twice", "o.step()", "[dist.all_reduce(p.grad) for p in d.parameters()]; o.step()", "averaged-twice"),
    ("unequal_batches", "if bad and r: x, y = x[:1], y[:1]", "x, y = x[: 2 + r], y[: 2 + r]", "unequal-batches"),
    ("unequal_batches", "if bad and r: x, y = x[:1], y[:1]", "x, y = x[:2], y[:2]", ""),
    ("all_ranks_write_one_file", "if bad or r == 0:", "if True:", "same-file"),
    ("all_ranks_write_one_file", "if bad or r == 0:", "if r == 1:", ""),
    ("autocast_on_one_rank", "enabled=(r == 0 or not bad)", "enabled=bool(r)", "autocast-differs"),
    ("autocast_on_one_rank", "enabled=(r == 0 or not bad)", "enabled=False", ""),
    ("scheduler_steps_world_times", "range(w if bad else 1)", "range(w)", "scheduler-steps"),
    ("loss_logged", "else: l.backward(); dist.all_reduce(l)", "else: l.backward(); dist.all_reduce(l.detach())", ""),
    ("head_added_after_wrap", "head(d(x)) if bad else d(x)", "d.module(x)", "past-ddp"),
    ("iterable_not_split", "i % w == r", "i % w == 0", "same-batch"),
    ("shuffle_list_with_rank_rng", "random.seed(r if bad else 0)", "random.seed(r)", "overlap"),
    ("bn_buffers_not_broadcast", "broadcast_buffers=not bad", "broadcast_buffers=False", "buffers-differ"),
)  # fmt: skip


@pytest.fixture(scope="module")
def ready(pool: WorkerPool) -> WorkerPool:
    """The module's pool, with the programs' helpers on its ranks."""
    define(pool)
    return pool


@pytest.mark.parametrize("program", CASES)
def test_a_mistake_is_found_with_kind_and_line_and_its_healthy_twin_is_silent(
    ready: WorkerPool, program: Program
) -> None:
    define(ready, program.body, program.name)
    found = found_in(ready, program.name, bad=True)
    assert [each.kind for each in found] == [program.kind] * bool(program.kind), str(found)
    for each in found:
        assert program.line in each.place.text
        assert each.evidence
        assert each.cure
    if program.has_twin:
        assert not found_in(ready, program.name, bad=False), str(ready.findings())


@pytest.mark.more
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0]}-{mutant[3] or 'harmless'}")
def test_a_small_change_of_a_healthy_program_is_found_if_it_is_a_mistake(
    ready: WorkerPool, mutant: tuple[str, str, str, str]
) -> None:
    name, old, new, kind = mutant
    assert old in PROGRAMS[name].body
    define(ready, PROGRAMS[name].body.replace(old, new), name)
    found = found_in(ready, name, bad=False)
    assert ([kind] if kind else []) == [each.kind for each in found], str(found)


TRAINS = f"""
{HELPERS}
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
d, o = std(rank, world, Net(drop=.3, bn=True))
ld, sm = loader(rank, world)
epochs(d, o, ld, sm)
bits = [p.detach().numpy().tobytes() for p in [*d.parameters(), *d.buffers()]]
sequence = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
state = (torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate())
saved = sorted(d.state_dict())
dist.destroy_process_group()
(bits, sequence, state[0], saved, len(d._forward_hooks), len(d.module._forward_hooks))
"""
SEEDED = "import random, numpy, torch\nrandom.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n"
WRAPPED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
places = (torch.nn.Module, DDP, torch.utils.data.DataLoader, torch.Tensor, dist.ProcessGroup, torch)
[sorted((n, id(v)) for n, v in vars(place).items() if callable(v)) for place in places]
"""


def left_by(pool: WorkerPool, sanitize: bool) -> list[object]:
    """What a program has in the end on each rank: bits, its group's number of collectives, generators, hooks."""
    return list(pool.run_cell(SEEDED + TRAINS, sanitize=sanitize, want_value=True, screen=NullScreen()))


def test_a_program_computes_the_same_bits_and_counts_the_same_collectives_under_it(pool: WorkerPool) -> None:
    assert left_by(pool, sanitize=True) == left_by(pool, sanitize=False)


@pytest.mark.more
def test_sixteen_ranks_compute_the_same_bits_and_count_the_same_collectives_under_it() -> None:
    with WorkerPool(nproc=16) as wide:
        plain, watched = left_by(wide, sanitize=False), left_by(wide, sanitize=True)
        assert watched == plain
        assert len(watched) == 16
        assert not wide.findings(), str(wide.findings())


def test_nothing_stays_wrapped_when_the_cell_has_ended(pool: WorkerPool) -> None:
    def names() -> list[object]:
        return list(pool.run_cell(WRAPPED, want_value=True, screen=NullScreen()))

    before = names()
    pool.run_cell(TRAINS, sanitize=True, screen=NullScreen())
    assert names() == before
    with pytest.raises(nbddp.WorkerFailed):
        pool.run_cell("1 / 0", sanitize=True, screen=NullScreen())
    assert names() == before


def test_nothing_of_it_is_loaded_without_the_option() -> None:
    with WorkerPool(nproc=1) as own:
        own.run_cell("import torch.distributed", screen=NullScreen())
        loaded = own.run_cell(
            "import sys\n[n for n in sys.modules if 'sanitizer.' in n]", want_value=True, screen=NullScreen()
        )
        light = {"on_rank", "on_rank_hints", "hints"}  # which import none of the others
        assert [{name.rpartition(".")[2] for name in names} for names in loaded] == [light]
        with pytest.raises(nbddp.BadInput, match="no run was sanitized"):
            own.findings()


def test_an_error_in_recording_is_no_error_of_the_program(ready: WorkerPool) -> None:
    """As a tensor of a kind that nobody has thought of."""
    program = PROGRAMS["module_forward"]
    define(ready, program.body, program.name)
    breaks = "import nbddp.capabilities.sanitizer.on_rank_digest as digest\nkept = digest.sample\n"
    ready.run_cell(f"{breaks}digest.sample = lambda *_: 1 / 0", screen=NullScreen())
    try:
        found = found_in(ready, "module_forward", bad=False)
        assert not found
        assert "recording stopped because of ZeroDivisionError" in "".join(found.notes)
    finally:
        ready.run_cell("digest.sample = kept", screen=NullScreen())
    assert found_in(ready, "module_forward", bad=True).of("past-ddp")


def test_a_generator_that_is_clipped_by_is_the_programs_to_use_up(ready: WorkerPool) -> None:
    code = """from torch.nn.utils import clip_grad
net = nn.Linear(4, 4); (100 * net(torch.ones(2, 4)).sum()).backward()
clip_grad._clip_grads_with_norm_(net.parameters(), 1.0, clip_grad._get_total_norm([p.grad for p in net.parameters()]))
float(clip_grad._get_total_norm([p.grad for p in net.parameters()]))"""
    norms = ready.run_cell(code, sanitize=True, want_value=True, screen=NullScreen())
    assert list(norms) == pytest.approx([1.0, 1.0], abs=1e-3)


def test_a_cell_that_fails_has_findings_until_then(ready: WorkerPool) -> None:
    body = (
        PROGRAMS["module_forward"].body
        + "\n    dist.barrier()  # rank 0 has trained\n    if r: raise ValueError('late')"
    )
    define(ready, body, "fails")
    found = found_in(ready, "fails", bad=True)
    assert [each.kind for each in found] == ["past-ddp"]
    assert "the program failed on rank 1" in str(found)


def test_a_kind_can_be_allowed_and_a_line_marked(ready: WorkerPool) -> None:
    program = PROGRAMS["module_forward"]
    define(ready, program.body, program.name)
    found_in(ready, program.name, bad=True)
    found = ready.findings(allow=["past-ddp"])
    assert not found
    assert "silenced: past-ddp" in str(found)
    assert "(--allow past-ddp)" in str(found)
    with pytest.raises(nbddp.BadInput, match="'no-such' is not a kind"):
        ready.findings(allow=["no-such"])
    define(ready, PROGRAMS["marked_ok"].body, "marked_ok")
    assert "(# nbddp: ok)" in str(found_in(ready, "marked_ok", bad=True))


def trains(past: bool, sanitize: int = 3) -> int:
    """A function whose own argument is named like the option."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        (ddp.module if past else ddp)(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return sanitize


def test_a_function_that_is_called_on_the_ranks_can_be_sanitized(ready: WorkerPool) -> None:
    assert list(ready.call(trains, [True], {"sanitize": 5}, sanitize=True, screen=NullScreen())) == [5, 5]
    found = ready.findings()
    assert [each.kind for each in found] == ["past-ddp"]
    assert not found.notes  # as that the function did not end well
    assert list(ready.call(trains, [False], sanitize=True, screen=NullScreen())) == [3, 3]
    assert not ready.findings()
    with pytest.raises(TypeError, match="unexpected keyword argument 'sanitise'"):
        ready.call(trains, [False], sanitise=True)  # type: ignore[call-arg]


def test_ranks_that_are_to_see_the_same_input_are_not_accused_of_it(ready: WorkerPool) -> None:
    define(ready, PROGRAMS["no_sampler"].body, "no_sampler")
    assert found_in(ready, "no_sampler", bad=True).of("same-batch")
    assert not ready.findings(same_input=True)


def test_a_cell_shows_its_findings_and_a_failed_one_too(ready: WorkerPool, shows: Callable[..., list[str]]) -> None:
    """The command asks the pool for what the cell has left; `tests/notebook` has the whole way."""
    define(ready, PROGRAMS["step_on_rank0"].body, "step_on_rank0")
    found = found_in(ready, "step_on_rank0", bad=True)
    data, _ = found._repr_mimebundle_()
    assert "steps-differ" in str(data["text/plain"])
    assert "<code>if r == 0 or not bad: o.step()</code>" in str(data["text/html"])
    assert found[0].to_dict()["place"]["line"] > 0
    assert shows("print(1)")


@pytest.fixture
def recorder() -> SanitizerRecorder:
    from nbddp.capabilities.sanitizer.on_rank_recorder import SanitizerRecorder

    return SanitizerRecorder(SimpleNamespace(files=SimpleNamespace(shown={})))  # type: ignore[arg-type]


def test_what_a_gpus_thread_computes_has_the_programs_line(recorder: SanitizerRecorder) -> None:
    with ThreadPoolExecutor(1) as gpu:
        number = gpu.submit(recorder.place).result()
    assert "gpu.submit(recorder.place)" in recorder.record.places[number].text


def test_of_an_optimizers_groups_numbers_alone_are_recorded() -> None:
    """What else a program keeps there may not travel, and a tensor may change later."""
    from nbddp.capabilities.sanitizer.on_rank_steps import _hyper

    kept = {"lr": torch.ones(()), "betas": (torch.ones(()), 0.9), "of": (threading.Lock(),), "pair": (1, 2.0)}
    group = {"params": [], "eps": 0.1, "nesterov": True, "foreach": None, **kept}
    assert _hyper(SimpleNamespace(param_groups=[group])) == [("eps", 0.1), ("nesterov", True), ("pair", (1, 2.0))]


def test_a_package_that_stands_elsewhere_is_no_line_of_the_program(
    recorder: SanitizerRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target` leaves it. A folder that is named like torch may well be the program's."""
    (tmp_path / "made-1.0.dist-info").mkdir()
    (tmp_path / "made-1.0.dist-info" / "RECORD").write_text("made/__init__.py,,\n")
    for name in ("made", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("def call(it): return it()\n")
    caches = (frames._elsewhere, frames._library)
    monkeypatch.syspath_prepend(str(tmp_path))
    for each in caches:
        each.cache_clear()
    try:
        numbers = [runpy.run_path(str(tmp_path / name))["call"](lambda: recorder.place()) for name in FILES]
    finally:
        for each in caches:
            each.cache_clear()
    made, own = (recorder.record.places[number] for number in numbers)
    assert ("for name in FILES" in made.text, made.through) == (True, "made")
    assert (own.text, own.through) == ("def call(it): return it()", "")


FILES = ("made/__init__.py", "torch/__init__.py")
