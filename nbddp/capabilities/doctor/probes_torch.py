"""Trials of torch's seams in process groups and stores.

Each does with a seam what nbddp does with it, in a world of one rank without a network, and raises if that fails. They
run in a process that is thrown away (`capabilities.doctor.probe_runner`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nbddp.compat import system
from nbddp.compat import torch as torch_compat
from nbddp.compat.probes import Failed, Untried, alone, expect
from nbddp.worker import call_log, flight, torch_debug_detail

SOON = 5.0  # seconds that a wait which was ended has to return


def _recorded() -> list[flight.RecordedCall]:
    if not torch_compat.flight_recorders():
        raise Failed("there is no recorder")
    flight.switch_on()
    with alone() as (dist, one):
        dist.all_reduce(one)
        entries = [entry for dump in flight.dumps(active=False) for entry in dump.get("entries", ())]
    expect(entries, "an all_reduce left no entry")
    return entries


def flight_recorder() -> None:
    _recorded()


def nccl_recorder() -> None:
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise Untried("this torch has no NCCL")
    expect(torch_compat.has_nccl_recorder(), "NCCL's collectives are not recorded")


def entry_keys() -> None:
    lacking = [key for key in torch_compat.ENTRY_KEYS if key not in _recorded()[-1]]
    expect(not lacking, f"an entry has no {', '.join(lacking)}")


def tables_of_groups() -> None:
    with alone() as (dist, _):
        tables, group = torch_compat.world(), dist.group.WORLD
        expect(group in tables.pg_map, "the default group is not in its table")
        expect(list(tables.pg_group_ranks[group]) == [0], "the ranks of a group are reported in another way")
        expect(isinstance(tables.pg_names[group], str), "groups have no names")
        expect("gloo" in str(tables.pg_backend_config[group]), "the backends of a group are reported in another way")
        expect(tables.group_count >= 1, "groups are not counted")


def default_group() -> None:
    with alone() as (dist, _):
        expect(torch_compat.default_group() is dist.group.WORLD, "it is not group.WORLD")


def another_default_group() -> None:
    with alone() as (dist, _):
        whole, other = dist.group.WORLD, dist.new_group([0])
        torch_compat.set_default_group(other)
        expect(dist.group.WORLD is other, "setting it has no effect")
        torch_compat.set_default_group(whole)


def sequence_numbers() -> None:
    with alone() as (dist, one):
        before = torch_compat.sequence(dist.group.WORLD)
        dist.all_reduce(one)
        expect(torch_compat.sequence(dist.group.WORLD) == before + 1, "an all_reduce is not counted")


def clearing_of_groups() -> None:
    with alone():
        pass
    torch_compat.forget_groups()
    tables = torch_compat.world()
    expect(not tables.pg_map and tables.group_count == 0, "a group is still there")
    with alone() as (dist, _):
        expect(dist.get_world_size() == 1, "the next init fails")


def abort_of_groups() -> None:
    raise Untried("only NCCL groups are aborted")


def abort_of_transfers() -> None:
    if not system.has_proc():
        raise Untried(f"no rank is freed on {system.name()}")
    expect(torch_compat.can_abort_transfers(), "torch's library does not export a function that aborts one")
    with alone() as (dist, one):
        work = dist.irecv(one)
        waiting = threading.Thread(target=work.wait, daemon=True)
        waiting.start()
        expect(torch_compat.abort_transfer(work), "a receive's class is not gloo's")
        waiting.join(SOON)
        expect(not waiting.is_alive(), "a receive keeps waiting")


def store_of_env() -> None:
    import torch.distributed as dist

    asked: list[tuple[Any, ...]] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_store(host: str, port: int, rank: int, size: int, timeout: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append((host, port, rank, size))
            return dist.HashStore()

        originals.append(original)
        return create_store

    originals: list[Callable[..., Any]] = []
    torch_compat.wrap_create_store(wrap)
    try:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
        dist.destroy_process_group()
    finally:
        torch_compat.wrap_create_store(lambda ours: originals[0])
    expect(asked == [("127.0.0.1", 1, 0, 1)], "env:// creates its store in another way")


def sockets_of_a_new_group() -> None:
    from nbddp.worker.process_groups import Groups

    groups = Groups()
    groups.install()
    if not system.has_proc():
        raise Untried("sockets cannot be identified without /proc")
    with alone():
        expect(groups.sockets.torchs(), "making a group shows no sockets of torch's")


def store_on_a_socket() -> None:
    from nbddp.agent import store_host

    served = store_host.in_the_open("")
    served.store.set("key", "value")
    expect(served.store.get("key") == b"value" and served.port > 0, "the store returns something else")
    served.close()


def marks() -> None:
    call_log.install()
    with alone() as (dist, one):
        dist.all_reduce(one, async_op=True).wait()
        store = dist.HashStore()
        store.set("key", "value")
        expect(store.get("key") == b"value", "a store returns something else")


def log_level() -> None:
    found = []
    before = os.environ.get(torch_compat.LOG_LEVEL)
    for level in ("ERROR", "INFO"):
        os.environ[torch_compat.LOG_LEVEL] = level
        found.append(torch_compat.read_log_level())
    del os.environ[torch_compat.LOG_LEVEL]
    if before is not None:
        os.environ[torch_compat.LOG_LEVEL] = before
    expect(found == [2, 0], f"levels ERROR and INFO became {found}")


def checks_of_detail() -> None:
    """Two ranks of one process: one comes to a collective, and its helper's count says that it waits there."""
    import torch
    import torch.distributed as dist

    helpers: dict[int, Any] = {}
    groups: dict[int, Any] = {}
    torch_compat.wrap_checks(lambda name, helper: helpers.update({helper.rank(): helper}))
    store, soon = dist.HashStore(), timedelta(seconds=SOON)
    numbers = [torch.ones(1), torch.ones(1)]

    def make(rank: int) -> None:
        own = dist.ProcessGroupGloo(dist.PrefixStore("own", store), rank, 2, soon)
        groups[rank] = getattr(dist.distributed_c10d, torch_compat.CHECKED)(own, "name", store, rank, 2, soon)

    _both(make)
    expect(len(helpers) == 2, "a group is checked in another way")
    first = threading.Thread(target=lambda: groups[1].allreduce([numbers[1]]).wait(), daemon=True)
    first.start()
    until = time.monotonic() + SOON
    while not torch_debug_detail.waits(helpers[1]) and time.monotonic() < until:
        time.sleep(0.01)
    expect(torch_debug_detail.waits(helpers[1]), "a rank that waits in a check is not seen")
    expect(not torch_debug_detail.waits(helpers[0]), "a rank that has called nothing seems to wait")
    groups[0].allreduce([numbers[0]]).wait()
    first.join(SOON)
    expect(not any(map(torch_debug_detail.waits, helpers.values())), "a rank that is through a check seems to wait")


def _both(make: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)


TRIALS: dict[str, Callable[[], None]] = {
    "flight recorder": flight_recorder,
    "NCCL's flight recorder": nccl_recorder,
    "abort of transfers": abort_of_transfers,
    "flight recorder's keys": entry_keys,
    "tables of groups": tables_of_groups,
    "default group": default_group,
    "another default group": another_default_group,
    "sequence numbers": sequence_numbers,
    "clearing of groups": clearing_of_groups,
    "abort of groups": abort_of_groups,
    "store of env://": store_of_env,
    "sockets of a new group": sockets_of_a_new_group,
    "store on a given socket": store_on_a_socket,
    "marks on Work and Store": marks,
    "checks of DETAIL": checks_of_detail,
    "C++'s log level": log_level,
}
