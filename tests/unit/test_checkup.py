"""What `%ddp doctor` says of a pool's hosts: each rule by a table, and the facts from a real one."""

from __future__ import annotations

from typing import Any

import pytest

from nbddp.capabilities.doctor.findings import Findings, Together
from nbddp.capabilities.hosts.reachability import Endpoint
from nbddp.capabilities.hosts.report import HostReport, HostsReport
from nbddp.compat.extra.versions import CUDA, DRIVER

ETH, IB = Endpoint("eth0", "10.0.0.1", 1000), Endpoint("ib0", "10.1.0.1", 100_000)
VERSIONS = {"nbddp": "1", "Python": "3.12", "torch": "2.9", "ipyparallel": "9", CUDA: "12.8", DRIVER: "570.86.15"}
FACTS: dict[str, Any] = {
    "versions": VERSIONS, "shm": [8 << 30, 8 << 30], "infiniband": False, "name": "n1", "name_at": ["10.0.0.1"],
    "limits": {"nofile": [65536, 65536], "nproc": [-1, -1], "memlock": [8 << 20, 8 << 20]}, "root": False,
    "p2p": [], "p2p_untold": "",
}  # fmt: skip


def one(clock: tuple[float, float] = (0.0, 0.001), gpus: tuple[str, ...] = (), **changed: Any) -> HostReport:
    limits = FACTS["limits"] | changed.pop("limits", {})
    versions = {k: v for k, v in (VERSIONS | changed.pop("versions", {})).items() if v}
    return HostReport({**FACTS, "limits": limits, "versions": versions, **changed}, gpus, (), ETH, *clock)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (one(), []),
        (one(versions={CUDA: "", DRIVER: ""}), []),
        (one(versions={CUDA: ""}), ["nodea has NVIDIA's driver, but its torch was built without CUDA; install torch"]),
        (one(versions={DRIVER: "470.42"}), ["nodea's driver 470.42 is too old for torch's CUDA 12.8"]),
        (one(versions={CUDA: "11.8", DRIVER: "470.42"}), []),
        (one(gpus=("H", "H"), p2p=[[0, 1, "not supported"]]), ["nodea: GPUs 0 and 1 cannot read each other's"]),
        (one(p2p=[[0, i, "x"] for i in range(1, 7)]), ["nodea: GPUs 0 and 1", "nodea: GPUs 0 and 2", "nodea: GPUs 0",
                                                       "nodea: 3 more pairs of GPUs cannot either"]),
        (one(p2p_untold="Unknown Error"), ["nodea: NVML does not report which GPUs can read each other's"]),
        (one(shm=[64 << 20, 60 << 20]), ["nodea has 60 MiB of 64 MiB free in /dev/shm; data loaders"]),
        (one(shm=[8 << 30, 0]), ["nodea has 0 B of 8.0 GiB free in /dev/shm"]),
        (one(shm=None), []),
        (one(limits={"nofile": [1024, 1 << 20]}), ["nodea allows 1024 (ulimit -n); with fewer than 4096"]),
        (one(limits={"nofile": [1024, 1024]}), ["nodea allows 1024 (ulimit -n)"]),
        (one(limits={"nproc": [500, -1]}), ["nodea allows 500 (ulimit -u)"]),
        (one(limits={"nproc": [500, -1]}, root=True), []),
        (one(infiniband=True), ["nodea has InfiniBand but allows only 8 MiB of locked memory (ulimit -l)"]),
        (one(infiniband=True, limits={"memlock": [-1, -1]}), []),
        (one((3.2, 0.1)), ["nodea's clock is 3.2 s ahead of the notebook's machine"]),
        (one((-3.2, 0.1)), ["nodea's clock is 3.2 s behind the notebook's machine"]),
        (one((3.2, 3.0)), []),
        (one(name_at=["127.0.1.1"]), ["nodea: its own name n1 resolves to 127.0.1.1, which no other host can reach."]),
        (one(name_at=["127.0.1.1", "10.0.0.1"]), []),
        (one(name_at=[]), ["nodea: its own name n1 does not resolve there."]),
    ],
)  # fmt: skip
def test_each_fact_has_its_finding(host: HostReport, words: list[str]) -> None:
    found = HostsReport({"nodea": host}).findings()
    assert len(found) == len(words), found
    assert all(said.startswith(start) for said, start in zip(found, words, strict=True)), found


def test_a_limit_is_raised_by_whoever_may() -> None:
    (own,) = HostsReport({"nodea": one(limits={"nofile": [1024, 1 << 20]})}).findings()
    assert own.endswith("--setup 'ulimit -n 4096'")
    (administrators,) = HostsReport({"nodea": one(limits={"nofile": [1024, 1024]})}).findings()
    assert administrators.endswith("Ask its administrator to raise nofile in limits.conf")


def test_it_fits_a_screen_and_says_the_same_in_html() -> None:
    found = HostsReport({"<a>": one(shm=None), "nodeb": one((3.2, 0.1), ("NVIDIA H100 80GB HBM3",) * 8)})
    assert max(len(line) for table in found.tables() for line in repr(table).splitlines()) <= 130
    shown = Together([found, Findings({"torch": "2"})])
    assert "&lt;a&gt;" in shown._repr_html_()
    assert "s clock is 3.2 s ahead" in shown._repr_html_()
    assert repr(shown).startswith(repr(found))
