"""A batch script of `nbddp.export`, submitted to a real Slurm of two nodes that the test starts on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbddp.export import C10D, SRUN, STATIC, Job, Launch, sbatch_script
from tests.hosts import slurm_hosts

PATIENCE = 90.0  # seconds that a job may take on busy cores
TRAIN = """\
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
told = [int(os.environ[name]) for name in names]
with open(f"rank {dist.get_rank()}.json", "w") as file:  # lines of several ranks may be cut through in a job's log
    json.dump([told, os.environ["SLURMD_NODENAME"], int(total), sys.argv[1:]], file)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.skipif(not slurm_hosts.HERE, reason=slurm_hosts.MISSING)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach a cluster of two nodes; it ends with the module."""
    if not slurm_hosts.names_are_possible():
        pytest.skip("the nodes' names need a mount of their own for /etc/hosts, which is not allowed here")
    with slurm_hosts.slurm(tmp_path_factory.mktemp("slurm"), names=True) as conf:
        path = f"{Path(sys.executable).parent}:{slurm_hosts.PATH}"
        env = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
        yield env
        command(env, "scancel", "--user", "root")


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def command(env: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False).stdout


def submitted(env: dict[str, str], folder: Path, program: str, launch: Launch, job: Job) -> str:
    """What a job wrote, when it has ended."""
    (folder / launch.script).write_text(program)
    (folder / "job.sbatch").write_text(sbatch_script(launch, job))
    done = subprocess.run(["sbatch", "--parsable", "job.sbatch"], env=env, cwd=folder, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    wait_for(f"job {number} ends", lambda: number not in command(env, "squeue", "-h", "-o", "%i").split())
    return (folder / job.output.replace("%j", number)).read_text()


@pytest.mark.cuts
@pytest.mark.parametrize("rendezvous", [C10D, STATIC, SRUN])
def test_a_batch_script_runs_on_every_node_of_a_real_slurm(
    cluster: dict[str, str], tmp_path: Path, rendezvous: str
) -> None:
    launch = Launch("it's train.py", ("--lr", "$HOME '\"#"), nnodes=2, nproc=2, gpus_per_proc=0, rendezvous=rendezvous)
    job = Job(name="it's #1", cpus_per_proc=1, output="a job's log %j.txt", time="00:05:00")
    said = submitted(cluster, tmp_path, TRAIN, launch, job)
    assert len(list(tmp_path.glob("rank *.json"))) == 4, said
    found = [json.loads((tmp_path / f"rank {rank}.json").read_text()) for rank in range(4)]
    for rank, (numbers, _, total, arguments) in enumerate(found):
        assert numbers == [rank, rank % 2, rank // 2, 4, 2]
        assert (total, arguments) == (10, list(launch.arguments))
    where = [node for _, node, _, _ in found]
    assert where in (["n1", "n1", "n2", "n2"], ["n2", "n2", "n1", "n1"]), "c10d may have either node first"


def test_a_rank_that_fails_ends_the_job(cluster: dict[str, str], tmp_path: Path) -> None:
    program = "import os, time\nassert os.environ['RANK'] == '0', 'fails'\ntime.sleep(600)\n"
    launch = Launch("fails.py", nnodes=2, nproc=1, gpus_per_proc=0, rendezvous=SRUN)
    said = submitted(cluster, tmp_path, program, launch, Job(name="fails", cpus_per_proc=1, output="%j.out"))
    told = next(job for job in command(cluster, "scontrol", "show", "job").split("\n\n") if "JobName=fails" in job)
    assert "JobState=FAILED" in told, said  # of the rank's traceback Slurm may lose lines when it ends the others
    assert "task 1: Exited with exit code 1" in said
