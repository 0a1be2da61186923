"""Lesson 11: commands and scripts that a real shell and a real torchrun understand, and the checks of its exercises."""

from __future__ import annotations

import json
import os
import re
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
from tests.lessons.answers import NOTEBOOKS, cells
from tests.ports import quiet_port
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
    job_id = quiet_port() % 10000  # so that the port that follows from it may well be free
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
    assert shown.words == made.describe()


def test_the_right_table_is_what_torchrun_would_say() -> None:
    """The reference against the planned topology, whose numbers are tested against torchrun's."""
    for slurm, hosts in TASKS:
        placed = nbddp.analysis.placement.planned(nnodes=len(hosts), nproc=int(slurm["SLURM_NTASKS"]) // len(hosts))
        worker = placed.workers[int(slurm["SLURM_PROCID"])]
        made = {name: right(slurm, hosts) for name, right in RIGHT.items()}
        assert (made["RANK"], made["LOCAL_RANK"]) == (str(worker.rank), str(worker.local_rank))
        assert made["WORLD_SIZE"] == str(worker.world_size)
        assert slurm["SLURM_NODEID"] == str(worker.node)
    answers = [("value", {**{n: r(*t) for n, r in RIGHT.items()}, "MASTER_PORT": "2000"}) for t in TASKS]
    assert judged({0: answers}) == "ok"
