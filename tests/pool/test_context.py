"""What a broken CUDA context, and NCCL's own ways to end a process, lead to: CUDA by stand-ins, all else real."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

import nbddp
from nbddp.capabilities.timings.on_rank import Recorder
from nbddp.capabilities.trace.on_rank import Tracer
from nbddp.launch import torchrun_env
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology
from nbddp.output.screens import NullScreen
from nbddp.pool import runs
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.outcome import Outcome, RankExit
from nbddp.protocol.pool_parts import PoolParts
from nbddp.worker import gpus
from tests.gpu import conftest as gpu_conftest
from tests.gpu import test_one_gpu, test_two_ranks
from tests.screens import Hearing

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
STAND_IN = f"""
import torch
def fails(*given): raise RuntimeError({ASSERT!r})
def well(*given): pass
torch.cuda.is_initialized = lambda: True
"""


class Error(RuntimeError):
    pass


def cuda(monkeypatch: pytest.MonkeyPatch, synchronize: Any, initialized: bool = True) -> None:
    found = types.SimpleNamespace(is_initialized=lambda: initialized, synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=found, OutOfMemoryError=Error))


def raises(*given: object) -> None:
    raise RuntimeError(ASSERT)


@pytest.mark.parametrize(
    ("error", "synchronize", "initialized", "said"),
    [
        (RuntimeError(ASSERT), raises, True, "CUDA error: device-side assert triggered"),
        (RuntimeError("NCCL error: unhandled cuda error"), raises, True, "CUDA error: device-side assert triggered"),
        (RuntimeError(ASSERT), lambda: None, True, ""),  # an error that did not last
        (Error("CUDA out of memory"), raises, True, ""),
        (ValueError("shapes"), raises, True, ""),
        (RuntimeError(ASSERT), raises, False, ""),
    ],
)
def test_a_context_is_broken_if_cuda_says_so_after_an_error_of_its_own(
    error: Exception, synchronize: Any, initialized: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda(monkeypatch, synchronize, initialized)
    assert gpus.broken_context(error) == said


def test_a_context_at_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    cuda(monkeypatch, over.wait)
    monkeypatch.setattr(gpus, "ASKED", 0.05)
    assert gpus.broken_context(RuntimeError(ASSERT)) == ""
    over.set()


def test_cudas_error_is_found_behind_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, raises)
    mine = ValueError("bad step")
    mine.__cause__ = RuntimeError(ASSERT)
    assert gpus.broken_context(mine)


def test_a_rank_whose_context_is_broken_is_named_and_replaced(pool: WorkerPool) -> None:
    pool.run_cell("import torch, torch.distributed as dist, numpy as np; model = 1", screen=NullScreen())
    before = [pool.workers[r].pid for r in (0, 1)]
    fails = f"{STAND_IN}torch.cuda.synchronize = fails\ndist.init_process_group('gloo')\n"
    with pytest.raises(nbddp.WorkerFailed) as failed:
        pool.run_cell(f"{fails}if dist.get_rank() == 1: fails()\ndist.barrier()", screen=NullScreen())
    assert (
        str(failed.value)
        == "rank 1 raised RuntimeError: CUDA error: device-side assert triggered (cell line 3, in fails)"
    )
    said = failed.value.report
    why = "its CUDA context is broken (device-side assert triggered), so it is replaced; lost: "
    assert f"rank 1: cell line 3, in fails, raised RuntimeError; {why}" in said
    assert "model" in said.partition("lost: ")[2]
    assert "nbddp closed the process group" in said
    assert "rank 0: cell line 9, waiting in barrier" in said, said
    shown = Hearing()
    assert list(pool.run_cell("'model' in globals()", want_value=True, screen=shown)) == [True, False]
    assert [pool.workers[r].pid == pid for r, pid in enumerate(before)] == [True, False]
    assert "rank 1 is new and empty" in "\n".join(shown.said)


def test_a_rank_whose_context_is_well_is_kept(pool: WorkerPool) -> None:
    before = [w.pid for _, w in sorted(pool.workers.items())]
    with pytest.raises(nbddp.WorkerFailed, match="device-side assert"):
        pool.run_cell(f"{STAND_IN}torch.cuda.synchronize = well\nfails()", screen=NullScreen())
    pool.run_cell("pass", screen=NullScreen())
    assert [w.pid for _, w in sorted(pool.workers.items())] == before


# -- NCCL's own ways to end a process --------------------------------------------------------------


def test_nccls_watchdog_leaves_processes_alone_unless_the_user_says_otherwise() -> None:
    placed = Topology.plan([Node(0, "h", (), 8)], nproc=2)
    found = torchrun_env.of_worker(placed.workers[0], placed, {"TORCH_NCCL_ENABLE_MONITORING": "1"})
    assert found["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert {k: found[k] for k in torchrun_env.KEEPS_PROCESS if k != "TORCH_NCCL_ENABLE_MONITORING"} == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    }  # fmt: skip


@pytest.mark.parametrize(("value", "told"), [("3", True), ("1", True), ("2", False), ("0", False), (None, False)])
def test_a_program_that_has_nccl_end_its_process_is_told(pool: WorkerPool, value: str | None, told: bool) -> None:
    pool.ensure(LaunchSpec())
    setting = f"os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = {value!r}" if value else "pass"
    code = (
        f"import os, torch.distributed as dist\nfrom nbddp.worker import process_groups\n{setting}\n"
        "before, process_groups.has_nccl = process_groups.has_nccl, lambda: True\ndist.init_process_group('gloo')\n"
        "process_groups.has_nccl = before\ndist.destroy_process_group()"
    )
    shown = Hearing()
    pool.run_cell(code, screen=shown)
    words = (
        f"TORCH_NCCL_ASYNC_ERROR_HANDLING is {value} in this program: NCCL then aborts a rank whose collective fails"
    )
    assert [words in line for line in shown.said] == [True] * told
    pool.run_cell("pass", screen=shown)
    assert len(shown.said) == told, "once, where the group is made"


def test_nothing_is_said_of_groups_without_nccl() -> None:
    assert runs.notes(None, [RankExit(0, "finished", 0.0, Outcome(1, "end"))], PoolParts()) == []


# -- GPUs and how a program finds its own ------------------------------------------------------------


def test_a_rank_with_two_gpus_that_sees_all_is_told_which_are_its_own() -> None:
    host = Node(0, "h", tuple(Device(i, str(i)) for i in range(4)), 8)
    placed = Topology.plan([host], gpus_per_proc=2)
    assert placed.device_notes("all") == [
        "each rank has 2 GPUs and sees all: its first is cuda:{LOCAL_RANK * 2}; "
        "with --visible own it sees only its own, from cuda:0 on"
    ]
    assert placed.device_notes("own") == []
    assert Topology.plan([host]).device_notes("all") == []


def test_a_trace_of_a_failed_cell_does_not_wait_for_a_gpu_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    at_work, stopped = [True], []
    stream = types.SimpleNamespace(query=lambda: not at_work[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    tracer = Tracer(Recorder())
    profile = types.SimpleNamespace(stop=lambda: stopped.append(1))
    tracer._profile = profile
    tracer.stop(failed=True)
    assert stopped == []
    assert tracer.why == "the cell failed while a GPU was busy, and a trace is available only once it has finished"
    at_work[0] = False
    tracer.start()
    assert stopped == [1], "it is ended before the next one begins"
    tracer.stop()
    assert tracer.last


# -- the tests that need a GPU ----------------------------------------------------------------------


@pytest.mark.skipif(not gpu_conftest.WHY_NOT, reason="there is a GPU here")
def test_tests_of_gpus_are_skipped_with_the_reason_and_their_cells_compile() -> None:
    assert "without CUDA" in gpu_conftest.WHY_NOT or "NVML" in gpu_conftest.WHY_NOT
    for module in (test_one_gpu, test_two_ranks):
        cells = {k: v for k, v in vars(module).items() if k.isupper() and isinstance(v, str)}
        for name, cell in cells.items():
            compile(cell.replace("{steps}", "3"), name, "exec")
        assert len(cells) > 3


def test_the_report_has_a_row_for_each_test() -> None:
    passed = pytest.TestReport(
        "tests/gpu/test_one_gpu.py::test_a_b", ("f", 1, "test_a_b"), {}, "passed", None, "call",
        duration=1.25, user_properties=[(gpu_conftest.ROW, "8 of 8")],
    )  # fmt: skip
    skipped = pytest.TestReport(
        "tests/gpu/test_two_ranks.py::test_c", ("f", 1, "test_c"), {}, "skipped", ("f", 1, "Skipped: one GPU"), "setup"
    )
    assert gpu_conftest.report_of([passed, skipped]).splitlines()[-2:] == [
        "| a b | passed, 1.2 s | 8 of 8 |", "| c | skipped, 0.0 s | one GPU |",
    ]  # fmt: skip
