"""Two ranks on one GPU: what init_process_group takes there. NCCL's part by recorded versions, gloo's on real ranks."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.worker import gpus


@pytest.mark.parametrize("version", [(), (2, 21, 5), (2, 29, 7)])
def test_an_older_nccl_is_refused_in_a_sentence_and_gloo_taken_where_nobody_asks(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gpus.ALLOW, raising=False)
    assert [gpus.backend(asked, version) for asked in (None, "", "gloo", "cpu:gloo")] == [
        gpus.GLOO, gpus.GLOO, "gloo", "cpu:gloo",
    ]  # fmt: skip
    for asked in ("nccl", "NCCL", "cpu:gloo,cuda:nccl"):
        with pytest.raises(
            RuntimeError, match=r"ranks share a GPU here \(--oversubscribe\), but NCCL.* does not allow that"
        ):
            gpus.backend(asked, version)


def test_a_newer_nccl_is_told_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.ALLOW, raising=False)
    assert [gpus.backend(asked, (2, 30, 1)) for asked in (None, "nccl")] == [None, "nccl"]
    assert gpus.os.environ[gpus.ALLOW] == "1"
    monkeypatch.setenv(gpus.ALLOW, "0")  # the user has said no
    assert gpus.backend(None, (2, 30, 1)) == gpus.GLOO


@pytest.mark.parametrize(("code", "version"), [(2708, (2, 7, 8)), (22809, (2, 28, 9)), (23007, (2, 30, 7))])
def test_nccls_version_code(code: int, version: tuple[int, ...]) -> None:
    assert gpus.version_of_code(code) == version


INIT = """
import torch, torch.distributed as dist
from nbddp.worker import gpus
gpus.nccl_version = lambda: (2, 21, 5)
kernel = get_ipython().kernel
kernel.groups.shares_gpus = True
dist.init_process_group({})
t = torch.ones(1); dist.all_reduce(t); told = t.item(), dist.get_backend_config()
dist.destroy_process_group()
told
"""


@pytest.mark.parametrize("given", ["", "None", "'gloo'", "backend=None"])
def test_ranks_that_share_a_gpu_meet_on_gloo(pool: WorkerPool, given: str) -> None:
    found = pool.run_cell(INIT.format(given), want_value=True, screen=NullScreen())
    assert [number for number, _ in found] == [2.0, 2.0]
    assert all("nccl" not in config for _, config in found)


@pytest.mark.parametrize("given", ["'nccl'", "backend='cpu:gloo,cuda:nccl'"])
def test_ranks_that_share_a_gpu_and_ask_for_nccl_are_told_at_once(pool: WorkerPool, given: str) -> None:
    with pytest.raises(nbddp.WorkerFailed, match="Or start as many ranks as there are GPUs"):
        pool.run_cell(INIT.format(given), screen=NullScreen())
