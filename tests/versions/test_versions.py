"""What versions of torch do otherwise, tried with the one at hand: `.ci/versions` runs this with each of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from nbddp.agent import store_host
from nbddp.capabilities.private import store_guard
from nbddp.compat import torch
from nbddp.protocol.run_spec import Rendezvous
from nbddp.worker import output
from nbddp.worker.output import GlooSilencer
from nbddp.worker.process_groups import Groups
from tests.kernels import Kernel


@pytest.fixture
def afresh() -> Iterator[None]:
    """What was tried of torch's stores is forgotten before and after."""
    store_host.libuv_takes_listener.cache_clear()
    yield
    store_host.libuv_takes_listener.cache_clear()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refuse_sockets(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have torch's libuv store refuse a listening socket, as it does up to torch 2.7; which kinds were asked for."""
    asked: list[bool] = []

    class Refusing(dist.TCPStore):  # type: ignore[misc]
        def __init__(self, *args: Any, use_libuv: bool = True, **kwargs: Any) -> None:
            asked.append(use_libuv)
            if use_libuv and "master_listen_fd" in kwargs:
                raise NotImplementedError("the libuv backend does not take a listen fd")
            super().__init__(*args, use_libuv=use_libuv, **kwargs)

    monkeypatch.setattr(dist, "TCPStore", Refusing)
    return asked


def test_a_store_that_refuses_our_socket_is_made_by_torchs_older_server(
    afresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = refuse_sockets(monkeypatch)
    before = descriptors()
    assert not store_host.libuv_takes_listener()
    assert descriptors() == before
    asked.clear()
    first, second = store_guard.open_store(os.getpid()), store_guard.open_store(os.getpid())
    assert asked == [False, False]  # refused once, not asked again
    assert first.port != second.port
    first.store.set("it", "is")
    client = Groups()
    client.begin(1, Rendezvous(("localhost", second.port), (store_host.HOST, second.port)))
    client.store("x").set("it", "is too")
    assert first.store.get("it") == b"is"
    assert second.store.get("nbddp/run1/x/it") == b"is too"
    for served in (first, second):
        served.close()


def test_a_store_is_gone_when_it_is_closed(afresh: None) -> None:
    store_host.libuv_takes_listener()  # libuv keeps two descriptors from its first use on
    before = descriptors()
    served = store_guard.open_store(os.getpid())
    with socket.create_connection((store_host.HOST, served.port)):
        pass
    served.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((store_host.HOST, served.port))
    assert descriptors() == before


def test_only_a_client_is_made_for_the_pools_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since torch 2.14 rank 0 would try to serve at any address but MASTER_ADDR, and complain that it cannot."""

    def torchs_own(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch's own choice between server and client")

    served = store_guard.open_store(os.getpid())
    port = served.port
    groups = Groups()
    groups.begin(1, Rendezvous(("localhost", port), (store_host.HOST, port)))
    create = groups._wrap_create(torchs_own)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        store = create("localhost", port, rank, 2, timedelta(seconds=20))
        assert groups.owns(store)
    with pytest.raises(AssertionError, match="own choice"):
        create("localhost", port, 0, 3, timedelta(seconds=20))
    served.close()


class Uncounted:
    """A group of torch 2.6 that was made without naming a backend: it counts nothing, its backends do."""

    _device_types = ("cpu", "cuda", "mps")
    backends = {"cpu": 3, "cuda": 4, "mps": 4}

    def __init__(self) -> None:
        self._made = {n: Counting(n) for n in set(self.backends.values())}

    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("ProcessGroup undefined does not yet support sequence numbers.")

    def _get_backend(self, device: str) -> Counting:
        return self._made[self.backends[device]]


class Counting:
    def __init__(self, count: int) -> None:
        self._count = count

    def _get_sequence_number_for_group(self) -> int:
        return self._count


def test_a_group_that_does_not_count_is_counted_by_its_backends() -> None:
    assert torch.sequence(Counting(5)) == 5
    assert torch.sequence(Uncounted()) == 7
    nothing = Uncounted()
    nothing._device_types = ()
    assert torch.sequence(nothing) == 0


def test_making_groups_prints_nothing(new_kernel: Kernel) -> None:
    shown = new_kernel.run(
        "%%ddp --nproc 2\nimport torch, torch.distributed as dist\n"
        "dist.init_process_group()\nsome = dist.new_group([0, 1])\n"
        "dist.all_reduce(torch.ones(1), group=some); dist.barrier(); dist.destroy_process_group()"
    )
    assert shown.ok, shown.error
    assert (shown.text(), shown.text("stderr"), shown.displays) == ("", "", [])


def test_what_gloo_prints_while_it_connects_goes_nowhere(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    own = GlooSilencer()
    for reports, heard in ((True, "before after"), (False, "before within after")):
        monkeypatch.setattr(output.torch_compat, "gloo_reports_connections", lambda reports=reports: reports)
        os.write(1, b"before ")
        with own.connecting(), own.connecting():
            os.write(1, b"within ")
        os.write(1, b"after")
        assert capfd.readouterr().out == heard
