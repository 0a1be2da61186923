"""`--debug` and `--env`: tables for the pure part; on real ranks what they see, which of them are new, and deadlocks
under TORCH_DISTRIBUTED_DEBUG=DETAIL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbddp.capabilities.env import options as env_options
from nbddp.errors import BadInput, RunHung, WorkerFailed
from nbddp.launch.options import LaunchSpec, parse_cell
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm

HERE = [
    {"name": "lo", "addresses": ["127.0.0.1"], "speed": 0, "loopback": True},
    {"name": "eth0", "addresses": ["10.0.0.2"], "speed": 1000, "loopback": False},
    {"name": "ib0", "addresses": [], "speed": 0, "loopback": False},
]


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        ("GLOO_SOCKET_IFNAME=eth0", ""),
        ("GLOO_SOCKET_IFNAME=lo,eth0", ""),
        ("GLOO_SOCKET_IFNAME=eth", "eth"),
        ("GLOO_SOCKET_IFNAME=lo,eth1", "eth1"),
        ("TP_SOCKET_IFNAME=wlan0", "wlan0"),
        ("NCCL_SOCKET_IFNAME=eth", ""),  # a beginning
        ("NCCL_SOCKET_IFNAME=bond,eth", ""),
        ("NCCL_SOCKET_IFNAME=bond,wlan", "bond* or wlan*"),
        ("NCCL_SOCKET_IFNAME==eth0", ""),  # exactly
        ("NCCL_SOCKET_IFNAME==eth", "eth"),
        ("NCCL_SOCKET_IFNAME=^docker", ""),  # all but these
    ],
)
def test_interfaces_that_are_named_are_looked_for(setting: str, missing: str) -> None:
    name, _, value = setting.partition("=")
    words = (
        f"{setting}: nodea has no interface {missing} that is up; it has lo (127.0.0.1), eth0 (10.0.0.2), "
        "ib0 (no address)"
    )
    assert env_options.missing_interface({name: value}, HERE, "nodea") == (words if missing else "")


# -- real ranks ------------------------------------------------------------------------------------

LOOK = """
import json, os
import torch.distributed as dist
from nbddp.compat import torch as torch_compat
library = torch_compat.ctypes.CDLL(os.path.join(os.path.dirname(dist.__file__), "../lib/libc10.so"))
level = torch_compat.ctypes.c_int.in_dll(library, torch_compat.KEEPS_LEVEL).value
names = ("TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG", "LR", "PYTHONHASHSEED")
json.dumps([os.getpid(), str(dist.get_debug_level()).split(".")[-1], level, *map(os.environ.get, names)])
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with warm.pool(3, debug="detail") as made:
        yield made


def seen(pool: WorkerPool) -> list[object]:
    found: list[object] = json.loads(pool.run_cell(LOOK, want_value=True, screen=NullScreen())[1])
    return found


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (LaunchSpec(env=(("NCCL_SOCKET_IFNAME", "nowhere0"),)), "nowhere0"),
        (LaunchSpec(ranks=(7,)), "--ranks"),
        (LaunchSpec(nproc=100_000), "more workers"),
    ],
)
def test_a_line_that_is_refused_ends_nothing_that_a_script_has_left(
    line: LaunchSpec, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("print(1)")
    with warm.pool(1) as pool:
        pool.run_script(str(tmp_path / "a.py"), screen=NullScreen())
        left = {w.pid for w in pool.workers.values()}
        monkeypatch.setattr(pool.group, "match", lambda *a, **k: pytest.fail("it starts them"))
        with pytest.raises(BadInput, match=why):
            pool.ensure(line)
        assert {w.pid for w in pool.workers.values()} == left != set()


def test_ranks_have_what_was_set_and_are_new_only_where_it_is_read_once(pool: WorkerPool) -> None:
    pid, *first = seen(pool)
    assert first == ["DETAIL", 0, "DETAIL", "INFO", None, None]
    assert pool.ensure(parse_cell("--env LR=3")) == []
    assert seen(pool) == [pid, "DETAIL", 0, "DETAIL", "INFO", "3", None]
    [said] = pool.ensure(parse_cell("--debug off"))
    assert said == (
        "no NCCL_DEBUG or NCCL_DEBUG_SUBSYS or TORCH_CPP_LOG_LEVEL or TORCH_DISTRIBUTED_DEBUG or TORCH_FR_BUFFER_SIZE: "
        "read once per process; all workers were replaced, and their variables are lost"
    )
    other, *now = seen(pool)
    assert other != pid
    assert now == ["OFF", 1, None, None, "3", None]
    [said] = pool.ensure(parse_cell("--env PYTHONHASHSEED=7 --debug"))
    assert "so it was imported again" in said
    assert seen(pool)[1:] == ["INFO", 0, "INFO", "INFO", "3", "7"]
    assert pool.ensure(parse_cell("--debug info --env LR=3")) == [], "nothing has changed"
    with pytest.raises(BadInput, match=r"^GLOO_SOCKET_IFNAME=nowhere0: this machine has no interface nowhere0"):
        pool.ensure(parse_cell("--env GLOO_SOCKET_IFNAME=nowhere0"))
    assert seen(pool)[1:] == ["INFO", 0, "INFO", "INFO", "3", "7"], "nothing was changed"
    pool.ensure(parse_cell("--debug detail --env PYTHONHASHSEED --env LR"))


INIT = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, x = dist.get_rank(), torch.ones(4)
dist.all_reduce(x)
"""


@pytest.fixture
def detail(pool: WorkerPool) -> WorkerPool:
    pool.ensure(LaunchSpec(debug="detail"))
    return pool


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("if rank != 1: dist.all_reduce(x)",
         "ranks 0, 2 wait in all_reduce #2 (line 8); rank 1 has finished the cell without calling it"),
        ("if rank: dist.broadcast(x, 0)",
         "ranks 1–2 wait in broadcast #2 (line 8); rank 0 has finished the cell without calling it"),
        ("dist.all_reduce(x) if rank else dist.recv(x, 1)",
         "rank 0 waits in recv from rank 1 (line 8); ranks 1–2 wait in all_reduce #2 (line 8)"),
        ("g = dist.new_group([0, 2])\nif rank == 2: dist.barrier(g)",
         "rank 2 waits in barrier #1 of group {0, 2} (line 9); rank 0 has finished the cell without calling it"),
        ("model = DDP(torch.nn.Linear(4, 4))\nfor _ in range(2 + (rank > 0)): model(torch.ones(2, 4)).sum().backward()",
         "ranks 1–2 wait in backward, collective #N (line 9); rank 0 has finished the cell without calling it"),
    ],
    ids=["missing", "rank 0 missing", "crossed", "subgroup", "uneven DDP"],
)  # fmt: skip
def test_a_deadlock_under_detail_is_named(detail: WorkerPool, program: str, words: str) -> None:
    with pytest.raises(RunHung) as e:
        detail.run_cell(INIT + program, hang_after=0.3, screen=NullScreen())
    assert words in re.sub(r"collective #\d+", "collective #N", str(e.value))
    assert {s.rank for s in e.value.states} == {0, 1, 2}
    assert "unblocked, variables are kept" in e.value.report


def test_under_detail_a_rank_that_is_late_is_waited_for(detail: WorkerPool) -> None:
    late = INIT + "time.sleep(2 * (rank == 0))\nfor _ in range(20): dist.all_reduce(x)\nint(x[0]) > 0"
    assert list(detail.run_cell(late, hang_after=0.3, want_value=True, screen=NullScreen())) == [True] * 3


def test_under_detail_torchs_own_word_on_a_mismatch_is_reported(detail: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="Detected mismatch between collectives on ranks"):
        detail.run_cell(INIT + "dist.all_reduce(x) if rank else dist.broadcast(x, 0)", screen=NullScreen())


def test_under_detail_collectives_are_shown_and_what_is_missing_is_said(detail: WorkerPool) -> None:
    """Those that Python calls are noted as they are called; of others torch's recorder does not say the group."""
    detail.restart()
    init, missing = (
        INIT.removesuffix("dist.all_reduce(x)\n"),
        "under TORCH_DISTRIBUTED_DEBUG=DETAIL torch does not record",
    )
    detail.run_cell(init, screen=NullScreen())
    with pytest.raises(BadInput, match="no collective has been recorded; call some"):
        detail.collectives()
    cpp = "import torch.distributed._functional_collectives as f\nf.all_reduce(x, 'sum', list(range(3))).sum().item()\n"
    detail.run_cell(cpp, screen=NullScreen())
    with pytest.raises(BadInput, match=f"no collective has been recorded, because {missing}"):
        detail.collectives()
    for program, complete in (("dist.all_reduce(x)\n", True), (f"dist.all_reduce(x)\n{cpp}", False), (cpp, False)):
        detail.run_cell(program, screen=NullScreen())
        found = detail.collectives()
        assert [(kind.op, kind.count) for kind in found.kinds] == [("all_reduce", 1)]
        assert any(missing in note for note in found.notes) is not complete, program


def test_under_detail_all_reduces_of_ddp_are_shown(detail: WorkerPool) -> None:
    model = "model = DDP(torch.nn.Linear(4, 4))\n"
    detail.run_cell(INIT + model, screen=NullScreen())
    detail.run_cell("for _ in range(3): model(torch.ones(2, 4)).sum().backward()", screen=NullScreen())
    assert [(kind.op, kind.count) for kind in detail.collectives().kinds if kind.op == "all_reduce"] == [
        ("all_reduce", 3)
    ]
