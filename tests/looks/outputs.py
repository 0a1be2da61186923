"""One cell for each kind of output that nbddp has, in the order in which a notebook runs them.

A cell that has to be seen while it runs waits for a file, which whoever looks makes: nothing depends on time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WAIT = """
import os, time
def wait_until_seen(name):
    while not os.path.exists(f'seen-{name}'): time.sleep(0.05)
"""


@dataclass(frozen=True)
class Output:
    """name: of its picture; code: the cell; error: whether it ends with one.

    measured: its words depend on measurements or on this machine, so only its shape is compared.
    during: a text that is on the screen at some moment while the cell runs; that moment has a picture too. holds: the
    cell waits there until the file `seen-NAME` exists; otherwise it is run again where a second look is needed.
    stop: Stop is pressed at that moment.
    after: the cell that is run again before this one is.
    hidden: it only prepares later cells and has no picture.
    loose: its parts depend on the cells before, so only its picture and its contrast are looked at.
    """

    name: str
    code: str
    error: bool = False
    measured: bool = False
    during: str = ""
    holds: bool = False
    stop: bool = False
    hidden: bool = False
    loose: bool = False
    needs: tuple[str, ...] = ()
    after: str = ""


TRAIN = """%%ddp
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]), bucket_cap_mb=2)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    model(torch.randn(64 * (1 + dist.get_rank()), 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()"""

OUTPUTS = (
    Output("load", "%load_ext nbddp", hidden=True),
    Output("no pool", "%ddp stop", hidden=True),
    Output("start", "%ddp start --nproc 4", during="nbddp: ", after="no pool"),
    Output(
        "folded",
        "%%ddp\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
        "t = torch.ones(1) * dist.get_rank()\ndist.all_reduce(t)\nprint('every rank has the sum')\nt",
    ),
    Output(
        "differs",
        "%%ddp\nimport os, sys\nrank = int(os.environ['RANK'])\n"
        "print(f'I have samples {100 * rank} to {100 * rank + 99}')\n"
        "if rank == 2: print('only rank 2 has a complaint', file=sys.stderr)",
    ),
    Output(
        "cut",
        "%%ddp --ranks 0\nfor i in range(1000): print('line', i)",
        measured=True,
    ),
    Output(
        "warnings",
        "%%ddp\nimport os\nfrom datetime import datetime\nnow = datetime.now().strftime('%m%d %H:%M:%S.%f')\n"
        "head = f'[rank{os.environ[\"RANK\"]}]:[W{now} ProcessGroup.cpp:123]'\n"
        "_ = os.write(2, f'{head} Warning: the device is guessed\\n'.encode())",
    ),
    Output(
        "rich",
        "%%ddp --ranks 0-1\nfrom IPython.display import HTML, Markdown, display\n"
        "display(Markdown('The loss is **0.25**'))\nHTML('<table><tr><th>loss</th><td>0.25</td></tr></table>')",
    ),
    Output(
        "bar",
        f"%%ddp --ranks 0-1{WAIT}from tqdm.auto import tqdm\nwith tqdm(total=10, desc='epoch') as bar:\n"
        "    bar.update(4)\n    bar.refresh()\n    wait_until_seen('bar')\n    bar.update(6)\nprint('through')",
        measured=True,
        during=r"rank 1 │ epoch: +40%",
        holds=True,
    ),
    Output(
        "widget",
        "%%ddp --ranks 0\nimport ipywidgets\nipywidgets.IntSlider(3, description='depth')",
    ),
    Output(
        "error",
        "%%ddp\nimport torch, torch.distributed as dist\ndist.init_process_group()\n\ndef train(batch):\n"
        "    if dist.get_rank() == 2:\n        raise ValueError('batch 7 has no labels')\n"
        "    dist.all_reduce(torch.ones(4))\n    return 'trained'\n\ntrain(7)",
        error=True,
    ),
    Output("errors", "%ddp errors", measured=True, needs=("error",)),
    Output(
        "deadlock",
        "%%ddp --hang-after 4\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(4))",
        error=True,
        during="waiting in",
    ),
    Output(
        "stop",
        "%%ddp\nimport time\nwhile True:\n    time.sleep(0.1)",
        error=True,
        during="running: ",
        stop=True,
    ),
    Output(
        "mismatch",
        "%%ddp --check\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
        "dist.all_reduce(torch.ones(4 + (dist.get_rank() == 2)))",
        error=True,
        measured=True,  # which rank notices it first
    ),
    Output("timeout", "%%ddp --timeout 1\nimport time\nwhile True:\n    time.sleep(0.1)", error=True),
    Output(
        "restarted",
        "%%ddp --max-restarts 1\nimport os, time\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '1':\n        raise OSError('the first attempt finds no data')\n"
        "    time.sleep(60)\nprint('trained')",
    ),
    Output(
        "script",
        "%%writefile hello.py\nimport os, sys\nprint(f'{sys.argv[1:]} on {os.environ[\"WORLD_SIZE\"]} ranks')",
        hidden=True,
    ),
    Output("run", "%ddp run hello.py --lr 0.1", needs=("script",)),
    Output(
        "later",
        "%%ddp --ranks 0\nimport os, threading, time\ndef later():\n"
        "    while not os.path.exists('seen-later'): time.sleep(0.05)\n"
        "    print('checkpoint 7 is written')\n    open('said-later', 'w').close()\n"
        "threading.Thread(target=later).start()",
        hidden=True,
    ),
    Output(
        "said later",
        "import os, time\nopen('seen-later', 'w').close()\nwhile not os.path.exists('said-later'): time.sleep(0.05)",
        hidden=True,
        needs=("later",),
    ),
    Output("late", "%%ddp --ranks 0\nprint('the next cell')", needs=("said later",)),
    Output(
        "breakpoint",
        "%%ddp --ranks 0-1\nimport os\nloss = 0.25\nbreakpoint()\nprint('trained')",
        error=True,
        during=r"breakpoint|stopped",
        stop=True,
    ),
    Output(
        "died",
        "%%ddp\nimport os, signal, torch, torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        error=True,
        measured=True,
    ),
    Output("mistake", "%ddp start --nproc 2 --nnodes 3 --gpus-per-proc 3", error=True),
    Output("status", "%ddp status", needs=("died",)),
    Output("topology", "%ddp topology"),
    Output("planned", "%ddp topology --nnodes 2 --gpus-per-node 4 --gpus-per-proc 2"),
    Output("two", "%ddp start --nproc 2", hidden=True),
    Output("train", TRAIN, hidden=True, needs=("two",)),
    Output("timings", "%ddp timings", measured=True, needs=("train",)),
    Output("memory", "%ddp memory", measured=True, needs=("train",)),
    Output("allocated", TRAIN.replace("%%ddp", "%%ddp --memory", 1), hidden=True, needs=("two",)),
    Output("timeline", "%ddp memory --timeline", measured=True, needs=("allocated",)),
    Output("compare", "%ddp compare model optimizer", needs=("train",), measured=True),
    Output(
        "differing",
        "%%ddp\nwith torch.no_grad(): model.module[3].bias += 0.5 * (dist.get_rank() == 1)",
        hidden=True,
        needs=("train",),
    ),
    Output("compared", "%ddp compare model", needs=("train", "differing"), measured=True),
    Output(
        "bench",
        "%ddp bench all_reduce --min 1KiB --max 1MiB --repeat 4",
        measured=True,
        during=r"all_reduce of",
    ),
    Output(
        "forecast",
        "%ddp forecast --inter-node 25GB/s --latency 10us --nodes 64",
        measured=True,
        needs=("train",),
    ),
    Output("trace", "%%ddp --trace step.json\ndist.all_reduce(torch.ones(8))", measured=True, needs=("train",)),
    Output("stacks", "%ddp stacks", measured=True),
    Output("panel", "%ddp panel", loose=True),
    Output("explorer", "from nbddp.teach import explore\nexplore.layout()"),
    Output(
        "check",
        "from nbddp.teach import check\ndef share_of(items, rank, world_size):\n    import os, time\n"
        "    while not os.path.exists('seen-check'): time.sleep(0.05)\n    return items[rank::4]\n"
        "check.share_of(share_of)",
        during="nbddp: checking share_of|running: ",
        holds=True,
    ),
    Output(
        "checked",
        "def share_of(items, rank, world_size):\n    return items[rank::world_size]\ncheck.share_of(share_of)",
        needs=("check",),
    ),
    Output("predict", "from nbddp.teach import predict\npredict.local_rank()"),
    Output("doctor", "%ddp doctor", measured=True),
    Output("help", "%ddp", measured=True),
)
NAMES = tuple(o.name for o in OUTPUTS if not o.hidden)


def chosen(names: Iterable[str]) -> Sequence[Output]:
    """The outputs of these names, with the cells that they need, in order."""
    by_name = {o.name: o for o in OUTPUTS}
    wanted, more = {"load", "no pool", "start"}, list(names)
    while more:
        wanted.add(name := more.pop())
        more += by_name[name].needs
    return [o for o in OUTPUTS if o.name in wanted]
