"""No healthy program is stopped or called dead, however long its ranks wait for each other."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch.torch_version import TorchVersion

from nbddp.deadlock.on_rank import runnable
from nbddp.errors import RunHung
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.codec import from_json
from nbddp.protocol.position import Whereabouts
from nbddp.protocol.run_spec import Question
from tests.lessons.answers import pool_of
from tests.pool import later
from tests.pool.faults import needs_recorder
from tests.pool.healthy import HANG_AFTER, PREPARE, PROGRAMS, SECONDS
from tests.waiting import until


@pytest.fixture(scope="module")
def pool_for() -> Iterator[Callable[[int], WorkerPool]]:
    """A pool of so many workers, made when a program first asks for it."""
    pools: dict[int, WorkerPool] = {}
    with ExitStack() as stack:

        def pool_for(world: int) -> WorkerPool:
            if world not in pools:
                pools[world] = stack.enter_context(pool_of(world))
            return pools[world]

        yield pool_for


HANGS_ON_OLD = ("all_gather_into_tensor of 1 GB",)


@pytest.mark.every(11)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_healthy_program_is_left_alone(pool_for: Callable[[int], WorkerPool], name: str) -> None:
    if name in HANGS_ON_OLD and TorchVersion(torch.__version__) < (2, 7):
        pytest.skip("torch 2.6 hangs in destroy_process_group after a large collective, under torchrun too")
    if "FSDP2" in name and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("torch 2.6 has no fully_shard on CPU")
    world, program = PROGRAMS[name]
    pool = pool_for(world)
    found = pool.run_cell(program + "'done'", want_value=True, hang_after=HANG_AFTER, screen=NullScreen())
    assert list(found) == ["done"] * world
    assert pool.last_run is not None
    assert pool.last_run.deadlock is None


BATCHES = dict(later.batches())


ENDING = 'thread "nbddp-ending"'


def stands(pool: WorkerPool, rank: int) -> list[str]:
    """What may still act on a rank that has ended its cell."""
    while (answer := pool.ask(rank, Question.of("where"))) is None:  # a busy machine: it did not come in time
        pass
    return [*from_json(Whereabouts, answer).acts]


@pytest.mark.every(6)
@pytest.mark.parametrize("name", BATCHES)
def test_a_program_that_calls_later_is_left_alone(pool_for: Callable[[int], WorkerPool], name: str) -> None:
    """And nothing of it stands when it is over, so that the next is judged as well."""
    pool = pool_for(2 * later.PAIRS)
    pool.run_cell(BATCHES[name], hang_after=HANG_AFTER, screen=NullScreen())
    assert pool.last_run is not None
    assert pool.last_run.deadlock is None
    until = time.monotonic() + 10
    while any(stands(pool, rank) for rank in range(pool.world_size)):
        assert time.monotonic() < until, [stands(pool, rank) for rank in range(pool.world_size)]


def test_a_timer_of_the_c_library_is_left_alone(pool_for: Callable[[int], WorkerPool]) -> None:
    pool = pool_for(2)
    pool.run_cell(later.cell((later.TIMER_OF_C, later.MEET)), hang_after=HANG_AFTER, screen=NullScreen())
    (program,) = pool.run_cell(
        "open('/proc/self/comm').read().strip()", ranks=[0], want_value=True, screen=NullScreen()
    )
    until = time.monotonic() + 20
    while ENDING in (found := stands(pool, 0)) and time.monotonic() < until:  # it ends what the test before has left
        time.sleep(0.05)
    pool.ensure(LaunchSpec(fresh=True))  # the timer is not left to the tests that follow
    assert found == [f'thread "{program}" of a library']


def test_a_rank_that_serves_rpc_is_left_alone(pool_for: Callable[[int], WorkerPool]) -> None:
    """Rank 0 has finished its cell, and calls the barrier when rank 3 asks it to."""
    code = (
        "import torch.distributed.rpc as rpc\n"
        "rpc.init_rpc(f'w{rank}', rank=rank, world_size=world)\ndist.barrier()\n"
        "if rank == 3:\n    time.sleep(SECONDS); asked = rpc.rpc_async('w0', dist.barrier)\n"
        "if rank: dist.barrier()\nif rank == 3: asked.wait()\n"
    )
    pool = pool_for(4)
    pool.run_cell(PREPARE.format(seconds=SECONDS) + code, hang_after=HANG_AFTER, timeout=60, screen=NullScreen())
    assert "RPC" in stands(pool, 0)
    pool.run_cell("rpc.shutdown(graceful=False); dist.destroy_process_group()", screen=NullScreen())
    assert "RPC" not in stands(pool, 0)


WIDGETS = "import functools, ipywidgets\nbutton, slider = ipywidgets.Button(), ipywidgets.IntSlider()\nkept = []\n"
CALLED = {  # how a front end comes to call a program
    "a click": "button.on_click(lambda b: kept.append(dist.barrier()))",
    "a click on a function of torch's": "button.on_click(functools.partial(dist.barrier, None))",
    "a change": "slider.observe(lambda change: 0, 'value')",
    "a method that hears of a change": (
        "class It:\n    def changed(self, change): pass\nkept.append(It()); slider.observe(kept[0].changed)"
    ),
    "a message": "slider.on_msg(lambda *it: 0)",
    "interact": "kept.append(ipywidgets.interactive(lambda x: x, x=(0, 3)))",
    "a class of widgets": (
        "import traitlets\nclass Mine(ipywidgets.IntSlider):\n    @traitlets.observe('value')\n"
        "    def changed(self, change): pass\nkept.append(Mine())"
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_callback_of_a_widget_stands_until_the_widget_is_closed(
    pool_for: Callable[[int], WorkerPool], name: str
) -> None:
    pool = pool_for(2)
    pool.run_cell(PREPARE.format(seconds=SECONDS) + WIDGETS + CALLED[name], screen=NullScreen())
    until(lambda: stands(pool, 0) == ["a callback of a widget"])
    pool.run_cell("ipywidgets.Widget.close_all(); button = slider = None; kept.clear()", screen=NullScreen())
    until(lambda: stands(pool, 0) == [])


def test_a_rank_that_a_widget_may_call_is_left_alone(pool_for: Callable[[int], WorkerPool]) -> None:
    """Its button is pressed when it has ended its cell, as in a run in the background."""
    pool = pool_for(2)
    code = f"{WIDGETS}button.on_click(lambda b: dist.barrier())\nbutton.model_id"
    first, _ = pool.run_cell(PREPARE.format(seconds=SECONDS) + code, want_value=True, screen=NullScreen())
    click = {"comm_id": first, "data": {"method": "custom", "content": {"event": "click"}}}
    assert pool.group.wire is not None
    pressed = threading.Timer(SECONDS, pool.group.wire.tell_kernel, (0, "comm_msg", click, [], lambda *said: None))
    pressed.start()
    waits = PREPARE.format(seconds=SECONDS) + "if rank: dist.barrier()"
    pool.run_cell(waits, hang_after=HANG_AFTER, timeout=30, screen=NullScreen())
    pressed.join()
    pool.run_cell("ipywidgets.Widget.close_all(); button = slider = None", screen=NullScreen())


LOADS = "loader = torch.utils.data.DataLoader(range(8), num_workers=1{keep})\n"
LEFT = {  # what a program leaves behind that calls nobody
    "an executor without work": (
        "import concurrent.futures as cf\nex = cf.ThreadPoolExecutor(2)\nex.submit(int).result()\n"
    ),
    "the loop's own executor": "import asyncio\nawait asyncio.to_thread(int)\n",
    "OpenMP's threads": "torch.set_num_threads(3); torch.ones(1000, 1000) @ torch.ones(1000, 1000)\n",
    "a bar": "import tqdm\nbar = tqdm.tqdm(range(3), file=open(os.devnull, 'w'), mininterval=9)\nnext(iter(bar))\n",
    "widgets that call nobody": (
        "import ipywidgets, tqdm.notebook\nbar = tqdm.notebook.tqdm(range(3)); next(iter(bar))\n"
        "both = [ipywidgets.IntSlider(), ipywidgets.Dropdown(options=[('a', abs), ('b', lambda: 0)])]\n"
        "box = ipywidgets.Tab(both); link = ipywidgets.link((both[0], 'value'), (both[0], 'max'))\n"
        "import weakref\nclass Odd: __class__ = property(lambda self: 1 / 0)\n"
        "both[0].odd, both[0].gone = Odd(), weakref.proxy(Odd())\n"
    ),
    "a feeder": "import multiprocessing\nq = multiprocessing.Queue(); q.put(1); q.get()\n",
    "a callback that has been called": (
        "dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: 1).wait()\n"
    ),
    "a loader's handler of SIGCHLD": LOADS.format(keep="") + "list(loader)\n",
    "a loader that keeps its workers": LOADS.format(keep=", persistent_workers=True") + "list(loader)\n",
    "a loader in its middle": LOADS.format(keep="") + "rows = iter(loader); next(rows)\n",
    "a program of its own": "import subprocess\nsubprocess.run(['true'])\nchild = subprocess.Popen(['sleep', '30'])\n",
    "a profile, on a stack that a thread of Python's has had": (
        "import json, threading\ndef deep(n): return deep(n - 1) if n else json.dumps([n])\n"
        "for _ in range(4):\n    had = threading.Thread(target=deep, args=(90,)); had.start(); had.join()\n"
        "with torch.profiler.profile():\n    torch.ones(2).sum()\n"
    ),
    "a backward": "torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()\n",
    "a pool that is closed": (
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(1) as its: its.map(abs, [1])\n"
        "its.join()\n"
    ),
}


@needs_recorder
@pytest.mark.parametrize("name", LEFT)
def test_what_calls_nobody_keeps_no_deadlock_from_being_ended(pool_for: Callable[[int], WorkerPool], name: str) -> None:
    pool = pool_for(2)
    began = time.monotonic()
    code = PREPARE.format(seconds=SECONDS) + LEFT[name] + "if rank: dist.barrier()\n"
    with pytest.raises(RunHung, match=r"rank 1 waits in barrier #.*; rank 0 has finished the cell"):
        pool.run_cell(code, hang_after=HANG_AFTER, timeout=20, screen=NullScreen())
    assert time.monotonic() - began < 10
    pool.run_cell("torch.set_num_threads(1); loader = rows = child = None", screen=NullScreen())


def test_a_stack_is_read_to_its_end_and_no_further() -> None:
    """What lies above it may be anybody's, such as Python's own functions by their addresses."""
    size = mmap.PAGESIZE
    with contextlib.closing(mmap.mmap(-1, 2 * size)) as both:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(both))
        both[:] = struct.pack("Q", 7) * (2 * size // 8)
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + size), size, mmap.PROT_READ)
        runnable.CODE.read()
        assert runnable._words(begin + size - 16) == (7, 7)


def test_a_programs_own_handler_under_a_loaders_still_stands(pool_for: Callable[[int], WorkerPool]) -> None:
    pool = pool_for(2)
    code = "import signal, torch\nsignal.signal(signal.SIGCHLD, lambda *_: None)\n" + LOADS.format(keep="")
    pool.ensure(LaunchSpec(fresh=True))
    pool.run_cell(code + "list(loader)\n", screen=NullScreen())
    until(lambda: stands(pool, 0) == ["its handler of SIGCHLD"])  # at once the loop may have something of its own to do
    pool.ensure(LaunchSpec(fresh=True))
