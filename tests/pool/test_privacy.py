"""Attacks on a pool from the same machine, carried out: by another user where the tests may become one, and by a
process of the same user that is none of the pool's. All are refused in seconds, and the run in progress goes on."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbddp
from nbddp.agent import store_host
from nbddp.agent.client import AgentClient
from nbddp.capabilities.private import on_rank, sock_owner, store_guard
from nbddp.deadlock.on_rank import store_client
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.agent import OpenStore
from nbddp.protocol.capability import Guard
from nbddp.worker import rank_guard
from tests import places
from tests.pool.intruder import AT_THE_STORE, Intruder
from tests.ports import connections, held_port
from tests.waiting import until

ROOT = places.ROOT
OTHER = 54321  # a user without an account
BOUND = 10.0  # seconds in which an attack must have been refused
PREPARE = (
    "import os, sys, time, torch, torch.distributed as dist\n"
    "rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
)
needs_kernel = pytest.mark.skipif(bool(sock_owner.unavailable()), reason="Linux does not report whose a connection is")


def signs() -> bool:
    """Whether the kernel can have a socket answer those alone who sign."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as door:
        sock_owner.shut_door(door)
        return True
    return False


@pytest.fixture(scope="module", params=["another user", "a process outside the pool"])
def intruder(request: pytest.FixtureRequest) -> Iterator[Intruder]:
    other = request.param == "another user"
    if other and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    found = Intruder(OTHER if other else os.geteuid())
    yield found
    found.close()


class Hearing(NullScreen):
    """Keeps what a user would be told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def values(pool: WorkerPool, code: str) -> list[Any]:
    return list(pool.run_cell(PREPARE + code, want_value=True, timeout=90, hang_after=None, screen=NullScreen()))


@contextlib.contextmanager
def during(pool: WorkerPool, code: str) -> Iterator[dict[str, Any]]:
    """Run a cell meanwhile. Afterwards its values are in `values`, or what it raised in `error`."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["values"] = values(pool, code)
        except nbddp.NbddpError as e:
            found["error"] = e

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        thread.join()


# -- the run's store ----------------------------------------------------------------------------------

AT_WORK = """
dist.init_process_group('gloo')
store = dist.TCPStore('localhost', int(os.environ['MASTER_PORT']), is_master=False)
stop, steps = torch.zeros(1), 0
while not stop:
    store.add(f'steps{{rank}}', 1); steps += 1
    if steps == 5: open({folder!r} + f'/rank{{rank}}', 'w').write('at work')
    stop[0] = os.path.exists({folder!r} + '/stop')
    dist.all_reduce(stop)
dist.destroy_process_group()
steps > 5, store.check(['intruder'])
"""


@pytest.mark.every(3)
@needs_kernel
@pytest.mark.parametrize("attack", [attack.__name__ for attack in AT_THE_STORE])
def test_store_refuses_who_is_not_of_the_pool_and_the_run_goes_on(
    pool: WorkerPool, intruder: Intruder, attack: str, tmp_path: Path
) -> None:
    port = int(values(pool, "os.environ['MASTER_PORT']")[0])
    with during(pool, AT_WORK.format(folder=str(tmp_path))) as run:
        try:
            until(lambda: len(list(tmp_path.glob("rank*"))) == 2 or run)
            said = intruder.attacks(attack, port)
        finally:
            (tmp_path / "stop").touch()
    assert "error" not in run, run
    assert said["came"] is None, said
    assert said["seconds"] < BOUND
    assert [tuple(v) for v in run["values"]] == [(True, False)] * 2


FROM_CHILDREN = """
import multiprocessing as mp, subprocess
from datetime import timedelta
port = int(os.environ['MASTER_PORT'])
def says(who, port=port):
    import torch.distributed as dist
    dist.TCPStore('localhost', port, is_master=False, timeout=timedelta(seconds=20)).set(f'{who}', 'here')
def leaves_a_child():
    parent = os.getpid()
    if not os.fork():
        while os.getppid() == parent: time.sleep(0.001)
        says(f'orphan{rank}'); os._exit(0)
    os._exit(0)
store = dist.TCPStore('localhost', port, is_master=False)
ways = ('fork', 'spawn') if rank == 0 else ('fork',)  # a process that imports torch anew takes seconds
for way in ways:
    child = mp.get_context(way).Process(target=says, args=(f'{way}{rank}',)); child.start(); child.join()
child = os.fork()
if not child: leaves_a_child()
os.waitpid(child, 0)
program = "import sys, torch.distributed as dist; dist.TCPStore('localhost', int(sys.argv[1])).set(sys.argv[2], '')"
if rank == 1: subprocess.run([sys.executable, '-c', program, str(port), f'program{rank}'], check=True)
keys = [f'{who}{rank}' for who in (*ways, 'orphan', *['program'] * rank)]
store.wait(keys, timedelta(seconds=20))
store.check(keys)
"""


def test_what_ranks_have_started_is_of_the_pool(pool: WorkerPool) -> None:
    """Also a process whose parent has ended."""
    assert values(pool, FROM_CHILDREN) == [True, True]


def test_store_answers_all_that_torch_can_ask(pool: WorkerPool) -> None:
    code = """
store = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False)
large = bytes(range(256)) * (1 << 14)
store.set(f'large{rank}', large); store.append(f'large{rank}', 'end')
found = [store.get(f'large{rank}') == large + b'end', store.compare_set(f'own{rank}', '', 'mine') == b'mine']
if hasattr(store, 'queue_push'):
    store.queue_push(f'queue{rank}', 'first')
    found += [store.queue_pop(f'queue{rank}') == b'first']
if hasattr(store, 'list_keys'):
    found += [f'own{rank}' in ' '.join(map(str, store.list_keys()))]
all(found)
"""
    assert values(pool, code) == [True, True]


OLDER = """
import json, os, sys
from nbddp.agent import store_host
from nbddp.capabilities.private import store_guard
store_host.libuv_takes_listener = lambda: False
before = set(os.listdir('.'))
served = store_guard.open_store(os.getpid())
served.store.set('key', 'value')
print(json.dumps([served.port, served.unguarded, served.store.get('key').decode()]), flush=True)
sys.stdin.readline()
served.close()
print(json.dumps([os.getcwd(), sorted(set(os.listdir('.')) - before)]), flush=True)
"""


@pytest.mark.every(2)
@needs_kernel
def test_older_server_is_out_of_reach_too(intruder: Intruder, tmp_path: Path) -> None:
    """torch's without libuv, which is used up to torch 2.7 and where the kernel signs nothing."""
    import json

    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OLDER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL, **pipes) as host:  # type: ignore[call-overload]
        port, unguarded, value = json.loads(host.stdout.readline())
        said = [intruder.attacks(what, port) for what in ("lists_keys", "goes_round")]
        left = json.loads(host.communicate("\n")[0])
    assert (unguarded, value) == ("", "value")
    assert [s["came"] for s in said] == [None, None]
    assert left == [str(tmp_path), []]


NO_NETLINK = "import socket, sys\nif sys.argv[:1] == ['-m']: del socket.AF_NETLINK\n"


def test_where_the_kernel_does_not_tell_that_is_said_and_cells_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NETLINK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    with WorkerPool(nproc=2) as pool:
        said = [line for line in pool.shortcomings() if "store" in line]
        assert said == [
            "any process on this machine can reach the ranks' store: Linux does not report who "
            f"owns a connection ({sys.platform} has no netlink)"
        ]
        screen = Hearing()
        assert list(pool.run_cell(PREPARE + SUMMED, want_value=True, screen=screen)) == [2.0, 2.0]
        assert screen.said == [], "the start has said it"


@needs_kernel
def test_guarded_pool_says_nothing(pool: WorkerPool) -> None:
    values(pool, "pass")
    assert [line for line in pool.shortcomings() if "store" in line] == []


@needs_kernel
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("NETLINK_SOCK_DIAG", 63, "Protocol not supported"), ("SOCK_DIAG_BY_FAMILY", 17, "sock_diag finds none")],
)
def test_kernel_that_refuses_or_does_not_know_is_no_guard(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int, why: str
) -> None:
    monkeypatch.setattr(sock_owner, name, value)
    assert sock_owner.unavailable() == f"Linux does not report who owns a connection ({why})"
    served = store_guard.open_store(os.getpid())
    served.close()
    assert served.unguarded == sock_owner.unguarded() == sock_owner.exposed("on this machine", sock_owner.unavailable())


@needs_kernel
def test_store_that_cannot_be_guarded_later_on_is_reported_by_the_cell_that_uses_it(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start could not say it. After a failure the ranks meet at a fresh store."""
    screen = Hearing()
    values(pool, "pass")
    assert pool.agent is not None
    take, stores = pool.agent.take, [{"unguarded": "anybody can reach it"}, {}]

    def taken(*asked: Any) -> dict[str, Any]:
        """The agent may be asked for other things meanwhile."""
        answer = take(*asked)
        return {**answer, **stores.pop(0)} if "port" in answer else answer

    monkeypatch.setattr(pool.agent, "take", taken)
    for expected in (["anybody can reach it"], []):
        with pytest.raises(nbddp.WorkerFailed, match="mine"):
            values(pool, "raise ValueError('mine')")
        for _ in range(2):
            pool.run_cell("pass", screen=screen)
        assert screen.said == ["anybody can reach it"]
        assert [line for line in pool.shortcomings() if "reach" in line] == expected


# -- gloo's connections -------------------------------------------------------------------------------


def doors(pid: int) -> set[int]:
    """Ports at which a process listens."""
    return {c.laddr.port for c in connections(psutil.Process(pid), "tcp") if c.status == psutil.CONN_LISTEN}


NEW_GROUP = """
dist.init_process_group('gloo')
open({folder!r} + f'/rank{{rank}}', 'w').close()
while not os.path.exists({folder!r} + '/go'): time.sleep(0.01)
if rank == 1:
    while not os.path.exists({folder!r} + '/come'): time.sleep(0.01)
{make}
t = torch.ones(1); dist.all_reduce(t)
t.item()
"""
MAKINGS = {
    "init": "dist.destroy_process_group(); dist.init_process_group('gloo')",
    "new_group": "dist.new_group([0, 1])",
    "at a file": "dist.destroy_process_group()\n"
    "dist.init_process_group('gloo', init_method='file://' + {folder!r} + '/meets', rank=rank, world_size=world)",
}
INTRUDED = "may have taken a rank's place while a process group was created (uid {}, pid {})"
SUMMED = "dist.init_process_group('gloo'); t = torch.ones(1); dist.all_reduce(t); t.item()"


def made_under_attack(pool: WorkerPool, intruder: Intruder, making: str, attack: str, folder: Path) -> dict[str, Any]:
    """Have ranks make a group, to which rank 1 comes late, so that there is time for an attack on rank 0's port."""
    values(pool, "if dist.is_initialized(): dist.destroy_process_group()")
    pid = pool.workers[0].pid
    make = MAKINGS[making].format(folder=str(folder))
    with during(pool, NEW_GROUP.format(folder=str(folder), make=make)) as run:
        try:
            until(lambda: len(list(folder.glob("rank*"))) == 2 or run)
            before = doors(pid)
            (folder / "go").touch()
            (port,) = until(lambda: doors(pid) - before)
            assert intruder.attacks(attack, port)["came"]
        finally:
            (folder / "go").touch()
            (folder / "come").touch()
    return run


@pytest.mark.every(3)
@needs_kernel
@pytest.mark.parametrize("making", MAKINGS)
def test_who_takes_a_ranks_place_in_a_new_group_is_found_before_it_is_used(
    pool: WorkerPool, intruder: Intruder, making: str, tmp_path: Path
) -> None:
    """Of two ranks that connect, one waits at its port: which one, is chance. Only its place can be taken."""
    if making == "at a file" and intruder.uid == os.geteuid():
        pytest.skip("what others can write says nothing about processes of the same user")
    for turn in range(15):
        folder = tmp_path / str(turn)
        folder.mkdir()
        run = made_under_attack(pool, intruder, making, "takes_a_place", folder)
        assert intruder.attacks("hears", 0)["came"] == 0, "none of the program's data"
        if "error" in run:
            break
        assert run["values"] == [2.0, 2.0]
    assert isinstance(run.get("error"), nbddp.WorkerFailed), run
    assert run["error"].rank == 0
    seen = intruder.pid if os.geteuid() == 0 or intruder.uid == os.geteuid() else "unknown"
    assert INTRUDED.format(intruder.uid, seen) in str(run["error"])
    assert values(pool, SUMMED) == [2.0, 2.0], "the next cell's group is whole"


@contextlib.contextmanager
def no_process_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`pairs` takes a process without children for the agent, so nobody is of the pool."""
    with subprocess.Popen(["sleep", "60"]) as elsewhere:
        monkeypatch.setattr(os, "getppid", lambda: elsewhere.pid)
        try:
            yield
        finally:
            elsewhere.kill()


@needs_kernel
def test_who_takes_the_place_of_a_rank_that_never_comes_is_found(
    intruder: Intruder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    with contextlib.ExitStack() as stack:
        stack.enter_context(no_process_of_the_pool(monkeypatch))
        monkeypatch.setattr(on_rank, "PATIENCE", 0.1)
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert intruder.attacks("takes_a_place", door.getsockname()[1])["came"]
        far = stack.enter_context(door.accept()[0])
        with pytest.raises(on_rank.Intruder) as found:
            on_rank.check([door.fileno(), far.fileno()], dist.HashStore(), 0, 2)
        assert intruder.attacks("hears", 0)["came"] == 0
    assert found.value.uid == intruder.uid


@needs_kernel
@pytest.mark.parametrize("making", MAKINGS)
def test_who_only_knocks_at_a_new_group_does_no_harm(
    pool: WorkerPool, intruder: Intruder, making: str, tmp_path: Path
) -> None:
    assert made_under_attack(pool, intruder, making, "knocks", tmp_path).get("values") == [2.0, 2.0]
    assert intruder.attacks("hears", 0)["came"] == 0


@needs_kernel
@pytest.mark.parametrize("meeting", ["the pool's store", "at a file"])
def test_who_only_knocks_does_no_harm_while_a_busy_rank_has_not_accepted_this_ones_connection(
    intruder: Intruder, monkeypatch: pytest.MonkeyPatch, meeting: str
) -> None:
    """The kernel then says that nobody holds its other end."""
    import torch.distributed as dist

    monkeypatch.setattr(on_rank, "SLICE", timedelta(seconds=0.05))
    monkeypatch.setattr(on_rank, "PATIENCE", 0.1)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_process_of_the_pool(monkeypatch))
        door, busy = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        near = stack.enter_context(socket.create_connection(busy.getsockname()))
        gloo = stack.enter_context(contextlib.closing(select.epoll()))
        gloo.register(near.fileno())
        assert intruder.attacks("knocks", door.getsockname()[1])["came"]
        came = [stack.enter_context(door.accept()[0]) for _ in range(4)]
        descriptors = [s.fileno() for s in (door, near, *came)]
        if meeting == "at a file":
            assert not on_rank.check(descriptors, None, 0, 2)
        else:
            with pytest.raises(dist.DistStoreError, match=r"its ranks 1 have not connected"):
                on_rank.check(descriptors, store, 0, 2)
        gloo.unregister(near.fileno())
        if meeting != "at a file" or intruder.uid != os.geteuid():
            with pytest.raises(on_rank.Intruder):
                on_rank.check(descriptors, None if meeting == "at a file" else store, 0, 2)
        intruder.attacks("hears", 0)


@needs_kernel
def test_connection_that_gloo_has_set_aside_is_not_one_that_it_uses(pool: WorkerPool) -> None:
    """gloo has read its number, and nobody waits for that: so it is with a rank's own, if a stranger was first."""
    code = """
import socket, struct
from nbddp.capabilities.private import on_rank as peer_check
from nbddp.worker import release
known, found = peer_check.check, []
def check(descriptors, store, rank, size):
    if rank == 0:
        mine = peer_check.ends(descriptors)
        (door,) = mine.doors
        with socket.create_connection(door) as aside:
            aside.sendall(struct.pack('=q', 1000))
            ends, end = (door, peer_check.sock_owner.address(aside.getsockname())), time.monotonic() + 10
            while ends not in (now := peer_check.ends(release.sockets().values())).pairs and time.monotonic() < end:
                time.sleep(0.01)
            while peer_check._unread(now.pairs[ends]) and time.monotonic() < end: time.sleep(0.01)
            found.append([peer_check._are_used([number]) for number in (now.pairs[ends], *mine.pairs.values())])
    return known(descriptors, store, rank, size)
peer_check.check, peer_check.PATIENCE, patience = check, 0.3, peer_check.PATIENCE
if dist.is_initialized(): dist.destroy_process_group()
try: dist.init_process_group('gloo')
finally: peer_check.check, peer_check.PATIENCE = known, patience
found"""
    assert values(pool, code) == [[[False, True]], []]


@needs_kernel
def test_only_what_a_rank_of_this_machine_has_not_accepted_yet_counts_as_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own connection to another host, made in another thread meanwhile, is none of the group's."""
    with (
        no_process_of_the_pool(monkeypatch),
        socket.create_server(("127.0.0.1", 0)) as busy,
        socket.create_connection(busy.getsockname()) as near,
        on_rank._Kernel() as kernel,
    ):
        made = on_rank.ends([near.fileno()])
        far = on_rank.Endpoints(frozenset(), {(next(iter(made.pairs))[0], ("198.51.100.1", 443)): near.fileno()})
        assert kernel._ranks(made) == [*made.pairs]
        assert kernel._ranks(far) == []
        with busy.accept()[0]:
            assert kernel._ranks(made) == []


@pytest.mark.skipif(not signs(), reason="the kernel cannot shut a port")
def test_nobody_is_answered_at_the_ports_of_a_group_that_has_been_made(pool: WorkerPool, intruder: Intruder) -> None:
    values(pool, "if dist.is_initialized(): dist.destroy_process_group()")
    pids = [pool.workers[rank].pid for rank in (0, 1)]
    before = [doors(pid) for pid in pids]
    values(
        pool, "dist.init_process_group('gloo'); pair = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t)"
    )
    for pid, known in zip(pids, before, strict=True):
        found = doors(pid) - known
        assert len(found) == 2, "one for each group"
        for port in found:
            with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", port), timeout=0.3):
                pass
    (port, *_) = doors(pids[0]) - before[0]
    assert intruder.attacks("takes_a_place", port) | {"seconds": 0} == {
        "came": None, "refused": "nobody answers", "seconds": 0,
    }  # fmt: skip
    assert values(pool, "dist.all_reduce(t, group=pair); t.item(), dist.destroy_process_group()") == [(4.0, None)] * 2


def test_no_rank_is_through_init_before_all_are_connected(pool: WorkerPool) -> None:
    """So a rank that ends its group at once cuts off no slower one."""
    code = """
from nbddp.capabilities.private import on_rank as peer_check
known, connected = peer_check.Endpoints.said, []
def slowly(ends):
    if rank == 1: time.sleep(0.3)
    connected.append(time.monotonic())
    return known(ends)
peer_check.Endpoints.said = slowly
dist.init_process_group('gloo'); through = time.monotonic(); dist.destroy_process_group()
peer_check.Endpoints.said = known
connected[0], through"""
    quick, late = values(pool, code)
    assert late[0] <= quick[1]


def test_rank_that_waits_for_others_connections_is_freed(pool: WorkerPool) -> None:
    code = """
from nbddp.capabilities.private import on_rank as peer_check
known = peer_check.check
def fails(descriptors, store, rank, size):
    store.wait([f'{peer_check.KEY}/0'])  # rank 0 waits now: it has said what it is connected to
    raise ValueError('mine')
mine = rank
if rank == 1: peer_check.check = fails
try: dist.init_process_group('gloo')
finally: peer_check.check = known"""
    with pytest.raises(nbddp.WorkerFailed, match="mine") as failed:
        values(pool, code)
    assert [state.status for state in failed.value.states] == ["interrupted", "failed"]
    assert values(pool, SUMMED + ", mine") == [(2.0, 0), (2.0, 1)]


def test_ranks_that_do_not_connect_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time that the program has given to init_process_group."""
    import torch.distributed as dist

    monkeypatch.setattr(on_rank, "SLICE", timedelta(seconds=0.05))
    store = dist.PrefixStore("group", dist.HashStore())
    store.set_timeout(timedelta(seconds=0.2))
    store.set(f"{on_rank.KEY}/2", "")
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as near,
        pytest.raises(dist.DistStoreError, match=r"its ranks 0, 3 have not connected to all others after 0\.2 s"),
    ):
        on_rank.check([near.fileno()], store, 1, 4)


def test_group_of_torchs_own_store_is_looked_at_too(pool: WorkerPool) -> None:
    """There others could say what they like, so only other users are told."""
    code = """
from nbddp.capabilities.private import on_rank as peer_check
known, asked = peer_check.check, []
def check(descriptors, store, rank, size):
    asked.append((len(descriptors) > 0, store is None))
    return known(descriptors, store, rank, size)
peer_check.check = check
dist.init_process_group('gloo', init_method='file://' + {path!r}, rank=rank, world_size=world)
dist.destroy_process_group()
peer_check.check = known
asked"""
    folder = os.environ["NBDDP_RUNTIME_DIR"]
    assert values(pool, code.replace("{path!r}", repr(f"{folder}/meets{time.monotonic()}"))) == [[(True, True)]] * 2


HERE, THERE, ELSEWHERE = ("127.0.0.1", 1000), ("127.0.0.1", 2000), ("127.0.0.1", 3000)
COMPARED = {
    "the same connection": ([], [(HERE, THERE)], [THERE], [(THERE, HERE)], []),
    "somebody at my door": ([HERE], [(HERE, THERE), (HERE, ELSEWHERE)], [], [(THERE, HERE)], [(HERE, ELSEWHERE)]),
    "somebody in my place": ([], [(HERE, THERE)], [THERE], [(THERE, ELSEWHERE)], [(HERE, THERE)]),
    "none of the group's": ([], [(HERE, ELSEWHERE)], [THERE], [], []),
}


@pytest.mark.parametrize("case", COMPARED)
def test_connections_are_compared_from_both_ends(case: str) -> None:
    my_doors, my_pairs, their_doors, their_pairs, strange = COMPARED[case]
    mine = on_rank.Endpoints(frozenset(my_doors), dict.fromkeys(my_pairs, 0))
    theirs = on_rank.Endpoints(frozenset(their_doors), dict.fromkeys(their_pairs, 0))
    matched = [pair for pair in my_pairs if pair[::-1] in their_pairs]
    assert mine.compared([b"", theirs.said()]) == (matched, strange)


# -- where anybody listens ----------------------------------------------------------------------------


@contextlib.contextmanager
def watched(agent: int) -> Iterator[set[tuple[str, str]]]:
    """Addresses off the loopback at which any process of the pool, or this one, has listened meanwhile, with its name;
    looked for all the time."""
    found: set[tuple[str, str]] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.03):
            found.update(off_loopback(agent))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.update(off_loopback(agent))


def off_loopback(agent: int) -> Iterator[tuple[str, str]]:
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family += [psutil.Process(), psutil.Process(agent), *psutil.Process(agent).children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.Error):
            for c in connections(process, "inet"):
                listens = c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr)
                if listens and not c.laddr.ip.removeprefix("::ffff:").startswith("127.") and c.laddr.ip != "::1":
                    yield process.name(), c.laddr.ip


ALONE = "dist.init_process_group('gloo', {by}rank=0, world_size=1); time.sleep(0.2); dist.destroy_process_group()"
LISTENING = {
    "init": "time.sleep(0.2 * rank); dist.init_process_group('gloo'); dist.destroy_process_group()",
    "DDP": "from torch.nn.parallel import DistributedDataParallel as DDP\ndist.init_process_group('gloo')\n"
    "DDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward(); time.sleep(0.2); dist.destroy_process_group()",
    "a port of the cell's own": "os.environ['MASTER_PORT'] = '12355'; dist.init_process_group('gloo')\n"
    "time.sleep(0.2); dist.destroy_process_group()",
    "a world of the cell's own": "os.environ['MASTER_PORT'] = '0'\n" + ALONE.format(by=""),
    "tcp://": ALONE.format(by="init_method=f'tcp://localhost:{ports[rank]}', "),
    "tcp:// by name": "import socket\n"
    + ALONE.format(by="init_method=f'tcp://{socket.gethostname()}:{ports[rank]}', "),
    "file://": ALONE.format(by="init_method=f'file://{os.environ[\"NBDDP_RUNTIME_DIR\"]}/alone{rank}', "),
    "a store of the cell's own": "store = dist.TCPStore('localhost', 0, 1, True, wait_for_workers=False)\n"
    "other = dist.TCPStore('0.0.0.0', store.port); other.set('a', 'b'); time.sleep(0.2); del other, store",
    "rpc": "import warnings, torch.distributed.rpc as rpc; warnings.simplefilter('ignore')\n"
    "rpc.init_rpc(f'w{rank}', rank=rank, world_size=world); time.sleep(0.2); rpc.shutdown()",
    "a store in a spawned process": "import multiprocessing as mp\ndef serves():\n"
    "    import torch.distributed as dist\n"
    "    store = dist.TCPStore('localhost', 0, is_master=True, wait_for_workers=False); time.sleep(0.3)\n"
    "child = mp.get_context('spawn').Process(target=serves); child.start(); child.join(); assert child.exitcode == 0",
    "a failure": "dist.init_process_group('gloo')\nif rank: raise ValueError('mine')\ndist.barrier()",
    "after a failure": "dist.init_process_group('gloo'); time.sleep(0.1); dist.destroy_process_group()",
}


@pytest.mark.every(2)
@pytest.mark.parametrize("phase", LISTENING)
def test_nobody_listens_off_the_loopback(pool: WorkerPool, phase: str) -> None:
    assert pool.agent is not None
    with watched(pool.agent.hello.pid) as found, held_port() as one, held_port() as other:
        code = f"ports = {one, other}\n{LISTENING[phase]}"
        if phase == "a failure":
            with pytest.raises(nbddp.WorkerFailed, match="mine"):
                values(pool, code)
        else:
            values(pool, code)
    assert found == set()


def test_nobody_listens_off_the_loopback_before_the_first_cell_and_in_what_the_pool_does_itself() -> None:
    agent = AgentClient.launch(os.environ)
    agent.wait_warm()
    with watched(agent.hello.pid) as found, WorkerPool(nproc=2, agent=agent) as pool:
        pool.bench("all_reduce", sizes=[1024], repeat=3, warmup=1)
        train = (
            "from torch.nn.parallel import DistributedDataParallel as DDP\ndist.init_process_group('gloo')\n"
            "DDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward(); dist.destroy_process_group()"
        )
        pool.run_cell(PREPARE + train, trace=True, check=True, screen=NullScreen())
        pool.trace()
        assert pool.workers
    assert found == set()


def test_variables_of_interfaces_are_the_users_if_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbddp.launch import torchrun_env

    worker, topology = _placed()
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    ours = torchrun_env.of_worker(worker, topology, {"NCCL_SOCKET_IFNAME": "eth0"})
    assert [ours.get(name) for name in names] == ["lo", None, "lo"]


def _placed() -> tuple[Any, Any]:
    from nbddp.launch.machine import node_of
    from nbddp.launch.topology import Topology

    node = node_of({"index": 0, "host": "here", "cores": 2})
    topology = Topology.plan([node], nproc=2, nnodes=1, gpus_per_proc=None, oversubscribe=False, device="cpu")
    return topology.workers[0], topology


# -- the parts ----------------------------------------------------------------------------------------


def test_names_of_this_machine_are_known() -> None:
    assert all(
        map(store_client.is_local, ["localhost", "127.0.0.1", "127.1.2.3", "::1", "0.0.0.0", socket.gethostname()])
    )
    own = [a.address for found in psutil.net_if_addrs().values() for a in found]
    assert all(store_client.is_local(address) for address in own if address.count(".") == 3)
    assert not store_client.is_local("198.51.100.7"), "of a network for examples"


def test_family_is_what_descends_from_its_root() -> None:
    code = (
        "import os, sys, time\nif os.fork(): sys.stdin.readline()\nelse: print(os.getpid(), flush=True); time.sleep(60)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as root:  # type: ignore[call-overload]
        grandchild = psutil.Process(int(root.stdout.readline()))
        family = sock_owner.ProcessTree(root.pid, [os.getppid()])
        assert all(map(family.has, [root.pid, grandchild.pid, os.getppid()]))
        assert not any(map(family.has, [os.getpid(), 1, 2**22 + 1]))
        grandchild.kill()
        root.communicate("\n")
    assert not family.has(root.pid), "it has ended"


@needs_kernel
def test_gate_says_who_is_refused_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(socket.create_connection(door.getsockname()))
        far = stack.enter_context(door.accept()[0])
        elsewhere = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(elsewhere.kill)
        family = sock_owner.ProcessTree(elsewhere.pid)
        mine, theirs = (
            store_guard.PoolMembersOnly(sock_owner.ProcessTree(os.getpid())),
            store_guard.PoolMembersOnly(family),
        )
        for judge in (mine, theirs):
            stack.callback(judge.close)
        assert [*mine([far]), *theirs([far])] == ["", "from a process outside the pool"]
        monkeypatch.setattr(family, "holders", lambda inodes: ({}, True))
        assert theirs([far]) == [""], "a process of the pool that /proc hides may have it"
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert mine([far]) == [f"from uid {os.getuid()}"]


@needs_kernel
def test_kernel_says_whose_a_connection_is_by_either_protocol() -> None:
    with sock_owner.SockDiag() as kernel:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with contextlib.ExitStack() as stack:
                door = stack.enter_context(socket.create_server((host, 0), family=family))
                near = stack.enter_context(socket.create_connection(door.getsockname()[:2]))
                here, there = sock_owner.ends(near)
                waiting = kernel.owner(there, here)
                assert waiting is not None
                assert not waiting.holds, "nobody has accepted it"
                far = stack.enter_context(door.accept()[0])
                owner = kernel.owner(there, here)
                assert owner == sock_owner.SocketOwner(
                    os.geteuid(), os.fstat(far.fileno()).st_ino, sock_owner.ESTABLISHED
                )
                assert sock_owner.ProcessTree(os.getpid()).holders({owner.inode, 1}) == (
                    {owner.inode: os.getpid()},
                    False,
                )
                near.close()
                closed = kernel.owner(here, there)
                assert closed is None or not closed.holds


@pytest.fixture
def echoing() -> Iterator[tuple[int, list[int], store_guard.StoreProxy]]:
    """A gate that lets everybody in, before what says everything back; its port, how many it serves, the gate."""
    hidden, serving = socket.create_server(("127.0.0.1", 0)), [0]

    def echo(there: socket.socket) -> None:
        serving[0] += 1
        with there, contextlib.suppress(OSError):
            while data := there.recv(1 << 16):
                there.sendall(data)
        serving[0] -= 1

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=(hidden.accept()[0],)).start()

    threading.Thread(target=serve).start()
    doors = store_guard.local_doors()
    port = doors[0].getsockname()[1]
    made = store_guard.StoreProxy(
        doors, lambda came: [""] * len(came), lambda: socket.create_connection(hidden.getsockname())
    )
    yield port, serving, made
    made.close()
    until(lambda: serving == [0])
    hidden.shutdown(socket.SHUT_RDWR)
    hidden.close()


@needs_kernel
def test_gate_passes_on_all_bytes_in_order_to_a_slow_reader(
    echoing: tuple[int, list[int], store_guard.StoreProxy],
) -> None:
    sent = os.urandom(1 << 20) * 20
    with socket.create_connection(("127.0.0.1", echoing[0])) as one:
        writer = threading.Thread(target=one.sendall, args=(sent,))
        writer.start()
        time.sleep(0.2)  # all that lies between is full
        came = bytearray()
        while len(came) < len(sent):
            came += one.recv(1 << 16)
        writer.join()
        assert came == sent
        with socket.create_connection(("127.0.0.1", echoing[0])) as other:
            other.sendall(b"both")
            assert other.recv(4) == b"both"
    until(lambda: echoing[1] == [0])


@needs_kernel
def test_gate_that_closes_cuts_all_off(echoing: tuple[int, list[int], store_guard.StoreProxy]) -> None:
    port, serving, made = echoing
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"here")
        assert one.recv(4) == b"here"
        files = len(os.listdir("/proc/self/fd"))
        made.close()
        assert one.recv(1) == b""
        until(lambda: serving == [0])
        assert len(os.listdir("/proc/self/fd")) < files
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    made.close = lambda: None  # type: ignore[method-assign]  # the fixture's


@needs_kernel
def test_nobody_else_can_listen_at_the_stores_port_under_the_name_localhost() -> None:
    served = store_guard.open_store(os.getpid())
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match=r"in use|assign"):
                other.bind((host, served.port))
    served.close()


def test_without_a_guard_the_store_is_open_as_torchruns_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_host, "guard_row", lambda: None)
    served = store_host.opened(OpenStore(), os.getpid(), os.getppid())
    served.store.set("key", "value")
    assert served.store.get("key") == b"value"
    assert served.unguarded == "any process on this machine can reach the ranks' store"
    served.close()
    for asked in (OpenStore(outside="127.0.0.1", key="00"), OpenStore(of=("127.0.0.1", 9), key="00")):
        with pytest.raises(OSError, match="nothing here leads ranks of several hosts to one store"):
            store_host.opened(asked, os.getpid(), os.getppid())


def test_without_a_guard_a_ranks_stores_and_groups_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_guard, "guard_row", lambda: None)
    made = rank_guard.guard.__wrapped__()

    def init(store: Any) -> None: ...

    assert made.store_made(init) is init
    assert made.group_made([], None, 0, 2) is False


def test_a_guard_that_cannot_be_loaded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no reason to go on without."""
    monkeypatch.setattr(rank_guard, "guard_row", lambda: Guard(store="", rank="nbddp.nothing.here:guard"))
    with pytest.raises(ModuleNotFoundError, match=r"nbddp\.nothing"):
        rank_guard.guard.__wrapped__()
