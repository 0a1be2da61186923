"""Lesson 11: commands and scripts that a real shell and a real torchrun understand, and the checks of its exercises."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings

import nbddp
from nbddp.errors import BadInput
from nbddp.export import C10D, SRUN, STATIC, Launch, sbatch_script, script, torchrun_line
from nbddp.lessons.l11_launching.exercise import RIGHT, TASKS, judged
from nbddp.lessons.l11_launching.figure import draw_launching
from nbddp.lessons.l11_launching.simulation import GLOO, plan_launch
from nbddp.teach import check
from tests.lessons.answers import NOTEBOOKS, Mutant, cells, defined, exercise, solution
from tests.unit.test_launching import directives, words

AWKWARD = (
    "two words",
    "it's",
    'say "hi"',
    "$HOME",
    "`id`",
    "a\\b",
    "*",
    "~",
    "#no",
    "!x",
    "",
    "line\nbreak",
    "--nnodes",
)
DUMP = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
found = {"argv": sys.argv[1:], "env": {n: os.environ[n] for n in names}}
json.dump(found, open(os.path.join(os.path.dirname(__file__), "rank" + os.environ["RANK"] + ".json"), "w"))
"""
BIN = str(Path(sys.executable).parent)


def shell(text: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Run text with bash; its output. Where torchrun is installed comes first, but after what `env` puts in PATH."""
    have = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    have |= {"PATH": f"{BIN}:{os.environ['PATH']}", **(env or {})}
    done = subprocess.run(
        ["bash", "-c", text], cwd=cwd, env=have, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def ranks(folder: Path) -> dict[int, Any]:
    return {int(f.stem[4:]): json.loads(f.read_text()) for f in folder.glob("rank*.json")}


# -- the torchrun line -----------------------------------------------------------------------


def test_the_shapes_of_the_lines() -> None:
    two = Launch(nnodes=2, nproc=4, host="h", port=1234, run_id="7", max_restarts=3)
    c10d = "--rdzv-backend c10d --rdzv-endpoint h:1234 --rdzv-id 7 --nproc-per-node 4 --max-restarts 3 train.py"
    assert torchrun_line(two) == torchrun_line(two, 1) == f"torchrun --nnodes 2 {c10d}"
    assert torchrun_line(Launch()) == "torchrun --standalone --nproc-per-node 2 train.py"
    static = Launch(nnodes=2, nproc=4, host="h", port=1234, rendezvous=STATIC)
    for node in range(2):
        assert torchrun_line(static, node) == (
            f"torchrun --nnodes 2 --node-rank {node} --master-addr h --master-port 1234 --nproc-per-node 4 train.py"
        )
    assert "--nnodes 1:4 " in torchrun_line(Launch(nnodes=4, min_nodes=1))
    assert "[::1]:29400" in torchrun_line(Launch(nnodes=2, host="::1"))
    assert torchrun_line(Launch(script="-x.py")).endswith(" ./-x.py")


def test_a_real_torchrun_gets_awkward_paths_and_words(tmp_path: Path) -> None:
    folder = tmp_path / 'Ada\'s "runs" $HOME'
    folder.mkdir()
    (folder / "train me.py").write_text(DUMP)
    shell(torchrun_line(Launch(str(folder / "train me.py"), AWKWARD)), tmp_path)
    found = ranks(folder)
    assert sorted(found) == [0, 1]
    assert all(tuple(f["argv"]) == AWKWARD for f in found.values())


# -- the batch script ------------------------------------------------------------------------

# What cannot be here is a cluster: srun runs its command once per task, scontrol knows one host, all on this machine.
FAKE_SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((n = 0; n < NODES; n++)); do for ((l = 0; l < TASKS; l++)); do
  SLURM_NODEID=$n SLURM_PROCID=$((n * TASKS + l)) SLURM_LOCALID=$l SLURM_NTASKS=$((NODES * TASKS)) "$@" & jobs+=($!)
done; done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""
FAKE_SCONTROL = '#!/bin/bash\n[[ "$*" == "show hostnames two[1-2]" ]] && printf "localhost\\nother\\n"\n'


def submit(text: str, folder: Path) -> None:
    """Run a batch script as Slurm would, on a cluster of this machine alone."""
    fakes = folder / "bin"
    fakes.mkdir()
    for name, body in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (fakes / name).write_text(body)
        (fakes / name).chmod(0o755)
    asked = directives(text)
    job_id = free_port() % 10000  # so that the port that follows from it may well be free
    env = {
        "PATH": f"{fakes}:{BIN}:{os.environ['PATH']}", "NODES": asked["nodes"], "TASKS": asked["ntasks-per-node"],
        "SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": "two[1-2]", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
    }  # fmt: skip
    (folder / "job.sbatch").write_text(text)
    shell("bash -n job.sbatch && bash job.sbatch", folder, env)


@pytest.mark.more
@pytest.mark.parametrize("rendezvous", [C10D, STATIC, SRUN])
def test_the_batch_script_gives_every_rank_its_place(tmp_path: Path, rendezvous: str) -> None:
    folder = tmp_path / 'it\'s "$here"'
    folder.mkdir()
    (folder / "my train.py").write_text(DUMP)
    nproc = 1 if rendezvous == C10D else 2
    launch = Launch(str(folder / "my train.py"), AWKWARD, 2, nproc, rendezvous=rendezvous)
    submit(sbatch_script(launch), tmp_path)
    found = ranks(folder)
    assert sorted(found) == list(range(2 * nproc))
    for rank, facts in found.items():
        assert tuple(facts["argv"]) == AWKWARD
        node, local = divmod(rank, nproc)
        assert facts["env"] == {
            "RANK": str(rank), "WORLD_SIZE": str(2 * nproc), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)
        }  # fmt: skip


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize("rendezvous", [C10D, STATIC, SRUN])
@settings(max_examples=10)
@given(arguments=words)
def test_bash_can_read_every_batch_script(rendezvous: str, nnodes: int, arguments: list[str]) -> None:
    text = sbatch_script(Launch("it's.py", tuple(arguments), nnodes, rendezvous=rendezvous))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- cells → script --------------------------------------------------------------------------

FIRST = "%%ddp --nproc 2\nimport torch, torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()"
SECOND = "%%ddp\nt = torch.ones(1); dist.all_reduce(t)\nif rank == 0: print('sum', int(t))"


@pytest.mark.torchrun
def test_a_script_of_cells_runs_under_torchrun(tmp_path: Path) -> None:
    again = "%%ddp\nif not dist.is_initialized():\n    dist.init_process_group()"
    text = script(["%load_ext nbddp", FIRST, "here = 1", SECOND, again, SECOND, "%%ddp"])
    assert "load_ext" not in text
    assert "here = 1" not in text
    (tmp_path / "train.py").write_text(text)
    assert shell(torchrun_line(Launch(gpus_per_proc=0)), tmp_path) == "sum 2\nsum 2\n"


def test_a_second_group_is_refused_since_torchrun_would_hang() -> None:
    with pytest.raises(BadInput, match="cells 1 and 3 both call init_process_group"):
        script([FIRST, SECOND, FIRST])


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (["x = 1"], "there is no %%ddp cell"),
        (["%%ddp\n!ls"], "cell 1: '!ls' is IPython syntax"),
        (["%%ddp\nx = 1\n%timeit x"], "'%timeit x' is IPython syntax"),
        (["%%ddp\nx ="], "cell 1 is not Python that can run as a script"),
        (["%%ddp\nawait f()"], "'await' outside function"),
        (["%%ddp\nx = 1", "%%ddp\nfrom __future__ import annotations"], "the script is not Python"),
        (["%%ddp --ranks 0\nx = 1"], "runs on some ranks only"),
        (["%%ddp --bogus\nx = 1"], "has no option --bogus"),
    ],
)
def test_what_cannot_be_a_script_is_refused(cells: list[str], says: str) -> None:
    with pytest.raises(BadInput) as refused:
        script(cells)
    assert says in str(refused.value)


def test_the_saved_lesson_prints_the_same_losses_under_torchrun_as_in_the_notebook() -> None:
    (path,) = (NOTEBOOKS / "solutions").glob("11-*.ipynb")
    printed = [
        re.findall(r"step \d: .*", "".join(o.get("text", "") for o in c.outputs))
        for c in nbformat.read(path, 4).cells
        if c.cell_type == "code"
    ]
    (here, there) = [lines for lines in printed if lines]
    assert here == there
    assert len(here) == 3


def test_the_lesson_ends_a_node_that_waits_for_one_that_failed_and_tells_why(tmp_path: Path) -> None:
    (text,) = [c.text for c in cells("11") if "def run_nodes" in c.text]
    space: dict[str, Any] = {"Path": Path, "tempfile": tempfile, "folder": SimpleNamespace(name=str(tmp_path))}
    exec(text.partition("\nfor _ in range(2):")[0], space)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    waits = f"{sys.executable} -c '{deaf}'"
    began = time.monotonic()
    printed, errors = space["run_nodes"]([waits, "sh -c 'sleep 1; echo broken >&2; exit 1'"], rest=0.5)
    assert time.monotonic() - began < 20
    assert printed == ["1\n", ""]
    assert errors == "broken\n"


def test_the_figure_has_the_commands_and_the_words_of_the_plan() -> None:
    made = plan_launch(2, 2, GLOO, STATIC)
    shown = draw_launching(made)
    texts = [t.get_text() for axes in shown.figure.axes for t in axes.texts]
    assert made.lines()[1][1] in texts
    assert "on node 1" in texts
    assert shown.words == made.words()
    assert all(t.get_fontsize() >= 6.5 for axes in shown.figure.axes for t in axes.texts)


VARIABLES = """
def variables_of(slurm, hosts):
    port = str(20000 + int(slurm["SLURM_JOB_ID"]) % 10000)
    found = dict(RANK=slurm["SLURM_PROCID"], LOCAL_RANK=slurm["SLURM_LOCALID"], WORLD_SIZE=slurm["SLURM_NTASKS"],
                 MASTER_ADDR=hosts[0], MASTER_PORT=port)
    {}
    return found
"""


def wrong(name: str, change: str, says: str) -> Mutant:
    return Mutant(name, VARIABLES.format(change), says)


WRONG_VARIABLES = [
    wrong("local rank", "found['RANK'] = slurm['SLURM_LOCALID']", "expected '4', got '0'; that is the task's number"),
    wrong("node id", "found['RANK'] = slurm['SLURM_NODEID']", "it is torchrun's --node-rank"),
    wrong("from one", "found['RANK'] = str(int(slurm['SLURM_PROCID']) + 1)", "counted from 0"),
    wrong("global", "found['LOCAL_RANK'] = slurm['SLURM_PROCID']", "the second node has no such GPU"),
    wrong("local by node", "found['LOCAL_RANK'] = slurm['SLURM_NODEID']", "would take the same GPU"),
    wrong("nodes", "found['WORLD_SIZE'] = slurm['SLURM_NNODES']", "number of nodes; ranks are processes"),
    wrong("local size", "found['WORLD_SIZE'] = str(int(slurm['SLURM_NTASKS']) // len(hosts))", "the local world size"),
    wrong("one less", "found['WORLD_SIZE'] = str(int(slurm['SLURM_NTASKS']) - 1)", "one more"),
    wrong("own node", "found['MASTER_ADDR'] = slurm['SLURMD_NODENAME']", "would wait at itself for all ranks"),
    wrong("last node", "found['MASTER_ADDR'] = hosts[-1]", "runs on the first node"),
    wrong("the list", "found['MASTER_ADDR'] = slurm['SLURM_JOB_NODELIST']", "return one host's name"),
    wrong("localhost", "found['MASTER_ADDR'] = 'localhost'", "its own localhost"),
    wrong("own port", "found['MASTER_PORT'] = str(20000 + int(slurm['SLURM_PROCID']))", "differs from task 0's"),
    wrong("random port", "import random; found['MASTER_PORT'] = str(random.randint(2000, 60000))", "differs from"),
    wrong("job id", "found['MASTER_PORT'] = slurm['SLURM_JOB_ID'][:3]", "from 1024 to 65535"),
    wrong("numbers", "found['RANK'] = int(found['RANK'])", "RANK is 0; an environment variable is a string: '0'"),
    wrong("left out", "del found['MASTER_PORT']", "MASTER_PORT is missing in the dict"),
    wrong("pairs", "found = list(found.items())", "return a dict of"),
    wrong("own environment", "import os; found['RANK'] = os.environ['SLURM_PROCID']", "task 0 of 8 on gpu01: it"),
    wrong("its own", "import os; found['MASTER_PORT'] = '1' + os.environ['RANK'] * 4", "use only the arguments"),
    wrong("own rank", "import os; found['RANK'] = os.environ['RANK']", "different answers for RANK"),
    wrong("torch's", "import torch.distributed as d; found['RANK'] = str(d.get_rank())", "contain everything"),
    wrong("all hosts", "found['MASTER_ADDR'] = ','.join(hosts)", "the name of the one where"),
    wrong("a list", "found['MASTER_ADDR'] = hosts", "an environment variable is one string"),
    wrong("with its port", "found['MASTER_ADDR'] += ':29500'", "the port belongs in MASTER_PORT"),
    wrong("always 8", "found['WORLD_SIZE'] = '8'", "the same for every task of every job"),
    wrong("times nodes", "found['WORLD_SIZE'] = str(int(slurm['SLURM_NTASKS']) * len(hosts))", "all nodes already"),
    wrong("nodes by tasks", "found['RANK'] = str(int(slurm['SLURM_NODEID']) * int(slurm['SLURM_NTASKS']) + "
          "int(slurm['SLURM_LOCALID']))", "SLURM_NTASKS counts the tasks of all nodes; a node has"),
    Mutant("unwritten", "def variables_of(slurm, hosts): ...", "still to be written"),
]  # fmt: skip
RIGHT_VARIABLES = [
    VARIABLES.format("import os\n    found = {**os.environ, **found}"),  # the rest is the rank's own
    VARIABLES.format("found['MASTER_PORT'] = '23456'"),
    VARIABLES.format(
        "each = int(slurm['SLURM_NTASKS']) // len(hosts)\n"
        "    found['RANK'] = str(int(slurm['SLURM_NODEID']) * each + int(slurm['SLURM_LOCALID']))"
    ),
]


@pytest.mark.parametrize("mutant", WRONG_VARIABLES, ids=str)
def test_wrong_variables_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.variables_of)


def test_right_variables_pass(pool: nbddp.Pool) -> None:
    assert check.variables_of(solution("11", "variables_of"))
    for source in RIGHT_VARIABLES:
        assert check.variables_of(defined(source, "variables_of")), source
    assert "still to be written" in check.variables_of(exercise("11", "variables_of")).line


def test_the_right_table_is_what_torchrun_would_say() -> None:
    """The reference against the planned topology, whose numbers are tested against torchrun's."""
    for slurm, hosts in TASKS:
        placed = nbddp.launch.topology.planned(nnodes=len(hosts), nproc=int(slurm["SLURM_NTASKS"]) // len(hosts))
        worker = placed.workers[int(slurm["SLURM_PROCID"])]
        made = {name: right(slurm, hosts) for name, right in RIGHT.items()}
        assert (made["RANK"], made["LOCAL_RANK"]) == (str(worker.rank), str(worker.local_rank))
        assert made["WORLD_SIZE"] == str(worker.world_size)
        assert slurm["SLURM_NODEID"] == str(worker.node)
    answers = [("value", {**{n: r(*t) for n, r in RIGHT.items()}, "MASTER_PORT": "2000"}) for t in TASKS]
    assert judged({0: answers}) == "ok"


NODES = "def nodes_of(text):\n    "
SPELL = """
def nodes_of(text):
    name, bracket, rest = text.partition("[")
    if not bracket:
        return {alone}
    found = []
    for part in rest.rstrip("]").split(","):
        a, _, b = part.partition("-")
        found += [{each} for n in range(int(a), int(b or a) + 1)]
    return {whole}
"""


def spelled(alone: str = "[text]", each: str = "f'{name}{n:0{len(a)}d}'", whole: str = "found") -> str:
    return SPELL.replace("{alone}", alone).replace("{each}", each).replace("{whole}", whole)


WRONG_NODES = [
    Mutant("as it came", NODES + "return [text]", "that is the list as Slurm writes it"),
    Mutant("no zeros", spelled(each="f'{name}{n}'"), "there is a gpu01 and no gpu1"),
    Mutant("end left out", spelled().replace("int(b or a) + 1", "int(b or int(a) + 1)"), "the range ends with its"),
    Mutant("commas", NODES + "return text.split(',')", "separates numbers, not hosts"),
    Mutant("numbers", spelled(each="f'{n:0{len(a)}d}'"), "each needs the name in front"),
    Mutant("first", spelled(whole="found[:1]"), "the first host alone"),
    Mutant("a text", spelled(alone="text"), "return a list of names"),
    Mutant("raises", spelled().replace("int(b or a)", "int(b)"), "nodes_of('gpu[01-03,07]') raised ValueError"),
    Mutant("unwritten", NODES + "...", "still to be written"),
    Mutant("letters", spelled(each="n").replace("[n for n in range(int(a), int(b or a) + 1)]", "name + part"),
           "adds its letters one by one"),
    Mutant("two digits", spelled(each="f'{name}{n:02d}'"), "keep the leading zeros"),
    Mutant("early return", spelled().replace("    return found", "        return found"), "a return inside the loop"),
    Mutant("ends", spelled().replace("for n in range(int(a), int(b or a) + 1)", "for n in map(int, part.split('-'))"),
           "the numbers between its ends"),
    Mutant("a set", spelled(whole="set(found)"), "got {'gpu1', 'gpu2', 'gpu3'}"),
    Mutant("yields", NODES + "yield text", "got <generator object nodes_of>"),
    Mutant("prints", spelled(alone="[text]", whole="print(found)"), "without a value to return"),
]  # fmt: skip
RIGHT_NODES = [
    spelled(each="name + str(n).zfill(len(a))"),
    """
    import re
    def nodes_of(text):
        found = re.fullmatch(r"(.*?)(?:\\[(.*)\\])?", text)
        if found[2] is None:
            return (text,)
        spans = [(p.split("-") * 2)[:2] for p in found[2].split(",")]
        return [found[1] + str(n).rjust(len(a), "0") for a, b in spans for n in range(int(a), 1 + int(b))]
    """,
]


@pytest.mark.parametrize("mutant", WRONG_NODES, ids=str)
def test_wrong_hosts_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.nodes_of)


def test_right_hosts_pass(pool: nbddp.Pool) -> None:
    assert check.nodes_of(solution("11", "nodes_of"))
    for source in RIGHT_NODES:
        assert check.nodes_of(defined(source, "nodes_of")), source
    assert "still to be written" in check.nodes_of(exercise("11", "nodes_of")).line
