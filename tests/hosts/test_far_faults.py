"""The fault matrix on two hosts over a real ssh: what holds on one machine (`pool/test_faults.py`) holds there."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

import pytest

from nbddp.launch.options import LaunchSpec
from nbddp.pool.pool import WorkerPool
from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, ssh_hosts
from tests.pool.faults import CALLS, FAULTS, MORE_FAULTS, WITH_SHAPES, check_case, needs_recorder

pytestmark = [pytest.mark.skipif(not HERE, reason=MISSING), needs_recorder]
ROOT = places.ROOT


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        setup = f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"
        with WorkerPool(hosts="nodea,nodeb", nproc=2, ssh_config=str(hosts.config), setup=setup) as pool:
            yield pool


def cases() -> Iterator[object]:
    for call in CALLS:
        faults = [f for f in FAULTS if f != "mismatch" or call in WITH_SHAPES]
        yield from ((call, fault) for fault in faults)
    yield from (("all_reduce", fault) for fault in MORE_FAULTS)


@pytest.mark.cuts
@pytest.mark.parametrize(("call", "fault"), list(cases()))
def test_fault_matrix_on_two_hosts(far: WorkerPool, call: str, fault: str, fault_matrix: Callable[[str], None]) -> None:
    far.ensure(LaunchSpec())
    fault_matrix(f"2 hosts  {check_case(far, call, fault)}")
