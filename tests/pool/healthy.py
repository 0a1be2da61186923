"""Healthy programs that look dead: ordinary torchrun programs in which a rank waits long, and rightly, for another.

`PROGRAMS`: name → (world size, program). Each keeps ranks waiting for `SECONDS` and ends by itself. A deadlock would be
reported after `HANG_AFTER`, a quarter of that and at most 1 s: the ranks are asked often enough for a wrong verdict to
show.
NBDDP_HEALTHY_SECONDS=8 makes it 8 s and 1 s.
"""

from __future__ import annotations

import itertools
import os

SECONDS = float(os.environ.get("NBDDP_HEALTHY_SECONDS", "1.2"))
HANG_AFTER = min(SECONDS / 4, 1.0)
TOGETHER = 6  # calls that are looped in one program
PREPARE = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SECONDS = {seconds}
def is_late():
    return rank == world - 1
def together(began):
    "All ranks agree whether to go on."
    go = torch.tensor([float(time.monotonic() - began < SECONDS)])
    dist.all_reduce(go, op=dist.ReduceOp.MIN)
    return go.item() > 0
dist.init_process_group("gloo")
"""
FINISH = '\nprint("done", flush=True)\ndist.destroy_process_group()\n'

LOOP = """
began = time.monotonic()
while together(began):
    for _ in range(10):
        {calls}
"""
CALLS = {
    "all_reduce": "dist.all_reduce(torch.ones(1000))",
    "broadcast": "dist.broadcast(torch.ones(1000), 1)",
    "reduce": "dist.reduce(torch.ones(1000), 1)",
    "all_gather": "dist.all_gather([torch.ones(100) for _ in range(world)], torch.ones(100))",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(torch.ones(100 * world), torch.ones(100))",
    "gather": "dist.gather(torch.ones(9), [torch.ones(9) for _ in range(world)] if rank == 1 else None, dst=1)",
    "scatter": "dist.scatter(torch.ones(9), [torch.ones(9) for _ in range(world)] if rank == 1 else None, src=1)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(torch.ones(9), torch.ones(9 * world))",
    "all_to_all_single": "dist.all_to_all_single(torch.ones(4 * world), torch.ones(4 * world))",
    "barrier": "dist.barrier()",
    "all_gather_object": "dist.all_gather_object([None] * world, {'rank': rank})",
    "broadcast_object_list": "dist.broadcast_object_list([rank, 'x' * rank], src=1)",
    "gather_object": "dist.gather_object({'rank': rank}, [None] * world if rank == 1 else None, dst=1)",
    "scatter_object_list": "dist.scatter_object_list([None], list(range(world)) if rank == 1 else None, src=1)",
    "async all_reduce": "[w.wait() for w in [dist.all_reduce(torch.ones(50), async_op=True) for _ in range(4)]]",
    "coalesced all_reduce": (
        "with dist.distributed_c10d._coalescing_manager():\n"
        "            dist.all_reduce(torch.ones(9)); dist.all_reduce(torch.ones(9))"
    ),
    "functional all_reduce": (
        "torch.distributed._functional_collectives.all_reduce(torch.ones(9), 'sum', dist.group.WORLD).sum()"
    ),
    "ring of isend and irecv": (
        "got = [dist.isend(torch.ones(9), (rank + 1) % world), dist.irecv(torch.ones(9), (rank - 1) % world)]\n"
        "        [w.wait() for w in got]"
    ),
    "chain of send and recv": (
        "if rank: dist.recv(torch.ones(9), rank - 1)\n        if rank < world - 1: dist.send(torch.ones(9), rank + 1)"
    ),
    "send to whoever receives from any": (
        "if rank == 0: [dist.recv(torch.ones(9)) for _ in range(world - 1)]\n        else: dist.send(torch.ones(9), 0)"
    ),
    "tags in another order": (
        "w = [dist.isend(torch.ones(9), (rank + 1) % world, tag=t) for t in (1, 2)]\n"
        "        w += [dist.irecv(torch.ones(9), (rank - 1) % world, tag=t) for t in (2, 1)]\n"
        "        [x.wait() for x in w]"
    ),
    "send_object_list": (
        "if rank == 0: [dist.recv_object_list([None], src) for src in range(1, world)]\n"
        "        else: dist.send_object_list([rank], 0)"
    ),
    "new_group": "dist.destroy_process_group(dist.new_group([0, 1]) ) if rank < 2 else dist.new_group([0, 1])",
}
BIG = {
    "batch_isend_irecv of 160 MB": """
out, into, other = torch.ones(40_000_000), torch.empty(40_000_000), 1 - rank
began = time.monotonic()
while together(began):
    both = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, into, other)]
    for work in dist.batch_isend_irecv(both): work.wait()
""",
    "isend and irecv of 160 MB": """
out, into, other = torch.ones(40_000_000), torch.empty(40_000_000), 1 - rank
began = time.monotonic()
while together(began):
    works = [dist.isend(out, other), dist.irecv(into, other)]
    for work in works: work.wait()
""",
    "send and recv of 400 MB": """
tensor = torch.ones(100_000_000)
for _ in range(4):
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
""",
    "all_reduce of 1 GB": "tensor = torch.ones(250_000_000)\nfor _ in range(2): dist.all_reduce(tensor)\n",
    "broadcast of 1 GB": "tensor = torch.ones(250_000_000)\nfor _ in range(2): dist.broadcast(tensor, 0)\n",
    "all_gather_into_tensor of 1 GB": (
        "dist.all_gather_into_tensor(torch.empty(250_000_000), torch.ones(125_000_000))\n"
    ),
    "DDP of 60 M parameters": """
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(2000, 2000) for _ in range(15)]))
began = time.monotonic()
while together(began):
    model(torch.ones(2, 2000)).sum().backward()
""",
}
WAITS = {
    "sleeps": "time.sleep(SECONDS)",
    "computes": "end = time.monotonic() + SECONDS\n    while time.monotonic() < end: torch.ones(300, 300).exp().sum()",
    "counts": "end = time.monotonic() + SECONDS\n    while time.monotonic() < end: pass",
    "loads data": (
        "class Slow(torch.utils.data.Dataset):\n"
        "        def __len__(self): return 4\n"
        "        def __getitem__(self, i): time.sleep(SECONDS / 2); return i\n"
        "    list(torch.utils.data.DataLoader(Slow(), num_workers=2))"
    ),
    "reads a pipe": (
        "import subprocess\n    subprocess.run(['sh', '-c', f'sleep {SECONDS}; echo x'], stdout=subprocess.PIPE)"
    ),
    "waits for a file lock": (
        "import fcntl, subprocess, sys, tempfile\n"
        "    lock = tempfile.NamedTemporaryFile()\n"
        "    code = 'import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); '\n"
        "    code += 'print(1, flush=True); time.sleep(float(sys.argv[2]))'\n"
        "    holder = subprocess.Popen([sys.executable, '-S', '-c', code, lock.name, str(SECONDS)], "
        "stdout=subprocess.PIPE)\n"
        "    holder.stdout.readline()\n"
        "    with open(lock.name) as f: fcntl.flock(f, fcntl.LOCK_EX)\n"
        "    holder.wait()\n    holder.stdout.close()"
    ),
    "waits for a thread of its own": (
        "import threading\n"
        "    event = threading.Event()\n"
        "    threading.Timer(SECONDS, event.set).start()\n    event.wait()"
    ),
    "is stopped": (
        "import subprocess\n"
        "    subprocess.Popen(['sh', '-c', f'kill -STOP {os.getpid()}; sleep {STOPPED}; kill -CONT {os.getpid()}'])\n"
        "    time.sleep(0.5)"
    ),
    "holds the interpreter": "import ctypes; ctypes.PyDLL(None).usleep(int(SECONDS * 1e6))",
    "awaits": "await __import__('asyncio').sleep(SECONDS)",
    "writes a checkpoint": (
        "import tempfile\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        end = time.monotonic() + SECONDS\n"
        "        while time.monotonic() < end: torch.save(torch.ones(5_000_000), folder + '/checkpoint')"
    ),
}
MEETINGS = {
    "all_reduce": "dist.all_reduce(torch.ones(4))",
    "barrier": "dist.barrier()",
    "recv": "[dist.recv(torch.ones(4), world - 1), dist.send(torch.ones(4), world - 1)] if not is_late() else "
    "[f(torch.ones(4), r) for r in range(world - 1) for f in (dist.send, dist.recv)]",
    "recv from any": "dist.recv(torch.ones(4)) if not is_late() else "
    "[dist.send(torch.ones(4), r) for r in range(world - 1)]",
    "isend and irecv": "[w.wait() for r in ([world - 1] if not is_late() else range(world - 1)) "
    "for w in (dist.isend(torch.ones(4), r), dist.irecv(torch.ones(4), r))]",
    "a store's key": "(store.set('key', 'x') if is_late() else store.wait(['key']))",
    "backward": "model(torch.ones(2, 4)).sum().backward()",
    "wait of an async collective": "dist.all_reduce(torch.ones(4), async_op=True).wait()",
    "monitored_barrier": "dist.monitored_barrier()",
}
SLOW_PEER = """
STOPPED = {stopped}
store = dist.distributed_c10d._get_default_store()
model = DDP(torch.nn.Linear(4, 4))
if is_late():
    {wait}
{meet}
"""
OTHERS = {
    "an isend that outlives its sender's part": (2, """
if rank == 0:
    work = dist.isend(torch.ones(50_000_000), 1)
else:
    time.sleep(SECONDS)
    dist.recv(torch.empty(50_000_000), 0)
"""),
    "an all_reduce that one rank does not wait for": (2, """
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
else:
    time.sleep(SECONDS)
    dist.all_reduce(torch.ones(4))
"""),
    "async work of all, waited for late": (4, """
works = [dist.all_reduce(torch.ones(1_000_000), async_op=True) for _ in range(8)]
time.sleep(SECONDS if rank % 2 else 0)
[w.wait() for w in works]
"""),
    "two subgroups at their own pace": (
        4,
        """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = groups[rank // 2]
began, go = time.monotonic(), torch.ones(1)
while go.item():
    go.fill_(time.monotonic() - began < SECONDS * (1 + rank // 2) / 2)
    dist.all_reduce(go, op=dist.ReduceOp.MIN, group=mine)
dist.barrier()
""",
    ),
    "a collective in a thread, the main thread computes": (2, """
import threading
def train():
    began = time.monotonic()
    while together(began): dist.all_reduce(torch.ones(1000))
thread = threading.Thread(target=train)
thread.start()
while thread.is_alive(): torch.ones(100, 100).exp()
thread.join()
"""),
    "a collective in a thread, the main thread joins": (2, """
import threading
def train():
    time.sleep(SECONDS * rank)
    dist.all_reduce(torch.ones(1000))
thread = threading.Thread(target=train)
thread.start(); thread.join()
"""),
    "recv in a thread, send in the main thread": (2, """
import threading
def receive():
    for _ in range(60): dist.recv(torch.empty(1000), 1 - rank)
thread = threading.Thread(target=receive)
thread.start()
for _ in range(60):
    time.sleep(SECONDS / 60)
    dist.send(torch.ones(1000), 1 - rank)
thread.join()
"""),
    "a rank is done early, two go on without it": (4, """
pair = dist.new_group([2, 3])
if rank > 1:
    began = time.monotonic()
    for _ in range(25):
        time.sleep(SECONDS / 25 * (rank == 3))
        dist.all_reduce(torch.ones(9), group=pair)
"""),
    "uneven batches inside Join": (2, """
from torch.distributed.algorithms.join import Join
model = DDP(torch.nn.Linear(4, 4))
with Join([model]):
    for step in range(10 + 15 * rank):
        time.sleep(SECONDS / 25)
        model(torch.ones(2, 4)).sum().backward()
"""),
    "a pipeline that fills slowly": (4, """
for micro in range(3):
    if rank: dist.recv(torch.empty(9), rank - 1)
    time.sleep(SECONDS / 8)
    if rank < world - 1: dist.send(torch.ones(9), rank + 1)
"""),
    "init is reached late": (4, """
dist.barrier()
dist.destroy_process_group()
time.sleep(SECONDS if is_late() else 0)
dist.init_process_group("gloo")
"""),
    "new_group is reached late": (4, """
time.sleep(SECONDS if is_late() else 0)
group = dist.new_group([0, 3])
if rank in (0, 3): dist.barrier(group)
"""),
    "a key that a process outside the pool sets": (2, """
import subprocess, sys, datetime
if rank == 0:
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = "import sys, time, torch.distributed as d; time.sleep(1); "
    code += "d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False).set('key', 'x')"
    child = subprocess.Popen([sys.executable, "-c", code, str(own.port)])
    own.wait(["key"], datetime.timedelta(seconds=60))
    child.wait()
dist.barrier()
"""),
    "a callback calls the next collective": (2, """
def again(future):
    time.sleep(SECONDS / 2)
    return dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
work = dist.all_reduce(torch.ones(4), async_op=True)
work.get_future().then(again).wait()
"""),
    "FSDP2 with a slow rank": (2, """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
for step in range(4):
    time.sleep(SECONDS / 4 * rank)
    model(torch.ones(2, 64)).sum().backward()
"""),
    "sixteen ranks that hardly get a core": (
        16,
        """
os.nice(19)
began = time.monotonic()
while together(began):
    dist.barrier()
    dist.send(torch.ones(1000), (rank + 1) % world) if rank % 2 else dist.recv(torch.ones(1000), (rank - 1) % world)
    dist.recv(torch.ones(1000), (rank - 1) % world) if rank % 2 else dist.send(torch.ones(1000), (rank + 1) % world)
""",
    ),
    "barriers while one rank writes for long": (4, """
if rank == 0: time.sleep(2 * SECONDS)
for _ in range(3): dist.barrier()
"""),
}  # fmt: skip


def _programs() -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for first in range(0, len(CALLS), TOGETHER):
        some = dict(itertools.islice(CALLS.items(), first, first + TOGETHER))
        found[f"loops of {', '.join(some)}"] = (4, LOOP.format(calls="\n        ".join(some.values())))
    found |= {name: (2, program) for name, program in BIG.items()}
    for number, (wait, code) in enumerate(WAITS.items()):
        for step in range(2):  # each wait meets two calls, and each call two waits or more
            meet = list(MEETINGS)[(2 * number + step) % len(MEETINGS)]
            slow = SLOW_PEER.format(stopped=SECONDS, wait=code, meet=MEETINGS[meet])
            found[f"{meet}, a rank {wait}"] = (4, slow)
    found |= OTHERS
    return {name: (n, PREPARE.format(seconds=SECONDS) + code + FINISH) for name, (n, code) in found.items()}


PROGRAMS = _programs()
