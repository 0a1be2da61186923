"""A pool on nodes of Slurm: asked for, waited for, used, kept, taken away, given back. By a real Slurm of two nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import nbddp
from nbddp.capabilities.slurm import allocation, commands, held_jobs
from nbddp.capabilities.slurm.allocation import Allocation
from nbddp.capabilities.slurm.commands import Slurm, arguments, line_of
from nbddp.errors import AgentFailed, PoolNotRunning
from nbddp.launch.options import LaunchSpec, parse_cell
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.hosts.slurm_hosts import HERE, MISSING
from tests.hosts.slurm_hosts import slurm as running_slurm
from tests.waiting import until

real = pytest.mark.skipif(not HERE, reason=MISSING)
INIT = "import os, torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
TWO = Slurm(nodes=2)


# -- words ----------------------------------------------------------------------------------------


def test_a_line_says_what_is_asked_of_slurm() -> None:
    spec = parse_cell("--slurm --nodes 2 --nproc 4 --gpus-per-node a100:4 --partition gpu --time 1:00:00").slurm
    assert spec == Slurm(nodes=2, gpus_per_node="a100:4", partition="gpu", time="1:00:00")
    assert arguments(spec, 4) == [
        "--ntasks-per-node=1", "--nodes=2", "--partition=gpu", "--time=1:00:00", "--gpus-per-node=a100:4",
    ]  # fmt: skip
    assert arguments(Slurm(nodes=2), 4)[:2] == ["--ntasks-per-node=1", "--cpus-per-task=4"]
    assert arguments(Slurm(more="--exclusive --comment 'my job'"), None)[1:] == ["--exclusive", "--comment", "my job"]
    for line in ("--slurm", "--slurm 7", "--slurm --nodes 2 --slurm-options '--mem=0 -J x'"):
        assert line_of(parse_cell(line).slurm) == line  # type: ignore[arg-type]
    assert parse_cell("--slurm --nnodes 2").slurm == Slurm(nodes=2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nodes 2", "--nodes needs --slurm; add --slurm, or remove --nodes"),
        ("--keep-alive 10m", "--keep-alive needs --hosts or --slurm; add one of them, or use --keep-warm"),
        ("--slurm --hosts a,b", "--slurm chooses the hosts, so it cannot be combined with --hosts a,b; remove one"),
        ("--slurm 7 --nodes 2", "--slurm 7 already has its nodes; remove --nodes"),
        ("--slurm gpu", "'gpu' is not a job number; squeue --me lists yours"),
        ("--slurm --time", "--time needs a value; write it as --time T"),
        ("--via mpiexec", "--via mpiexec needs --hosts"),
        ("--hosts a --via 'kubectl exec x'", "lacks {host} and {command}; write a command such as 'kubectl exec -i"),
    ],
)
def test_what_does_not_fit_together_is_said(line: str, words: str) -> None:
    with pytest.raises(nbddp.BadInput) as caught:
        parse_cell(line)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("PENDING|Resources|2026-03-01T10:05:00",
         "is waiting: nodes are not free yet (Resources); expected to start 2026-03-01 10:05"),
        ("PENDING|Priority|N/A", "is waiting: other jobs come first (Priority)"),
        ("PENDING|QOSMaxNodePerUserLimit|N/A", "is waiting: QOSMaxNodePerUserLimit"),
        ("PENDING|PartitionNodeLimit|N/A", "cannot start as requested: the partition does not have, or does not allow"),
        ("CONFIGURING|None|N/A", "its nodes are starting"),
        ("", "Slurm has not reported on it yet"),
    ],
)  # fmt: skip
def test_the_queue_is_told_in_words(row: str, words: str) -> None:
    assert words in commands.waiting_words(7, row)
    assert "Stop" not in commands.waiting_words(7, row), "that is for whoever holds the job"


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        ("slurmstepd-n2: error: *** STEP 5.2 ON n2 CANCELLED AT 2026-11-22T22:09:27 ***\n", "CANCELLED",
         "Slurm job 7 was cancelled"),
        ("error: *** STEP 5.2 ON n2 CANCELLED AT 2026-11-22T22:09:27 ***\n", "COMPLETING", "Slurm job 7 was cancelled"),
        ("error: *** STEP 5.2 ON n2 CANCELLED AT 2026-11-22T22:09:27 DUE TO TIME LIMIT ***", "COMPLETING",
         "Slurm job 7 has reached its time limit"),
        ("error: *** JOB 5 ON n2 CANCELLED AT 2026-11-22T22:09:27 DUE TO PREEMPTION ***", "",
         "Slurm job 7 was preempted"),
        ("error: *** JOB 5 ON n2 CANCELLED AT 2026-11-22T22:09:27 DUE TO JOB REQUEUE ***", "PENDING",
         "Slurm job 7 was requeued"),
        ("error: *** STEP 5 ON n2 CANCELLED AT 2026-11-22T22:09:27 DUE TO SOMETHING NEW ***", "",
         "Slurm job 7 was stopped because of something new"),
        ("error: *** STEP 5.2 ON n2 CANCELLED AT 2026-11-22T22:09:27 ***", "RUNNING",
         "Slurm has stopped a step of job 7, which keeps running"),
        ("", "NODE_FAIL", "Slurm job 7 has lost a node"),
        ("srun: error: n1: task 0: Killed", "RUNNING", ""),
    ],
)  # fmt: skip
def test_what_became_of_a_job_is_told_in_words(said: str, state: str, words: str) -> None:
    assert commands.ended_words(7, said, state) == words


@pytest.mark.parametrize(
    ("text", "seconds"), [("1-02:03:04", 93784.0), ("59:30", 3570.0), ("0:07", 7.0), ("UNLIMITED", None), ("", None)]
)
def test_the_time_that_is_left_is_read(text: str, seconds: float | None) -> None:
    assert commands.seconds_left(text) == seconds


def test_no_job_and_no_way_here_is_in_the_environment_of_slurms_commands() -> None:
    env = {"SLURM_CONF": "c", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SSH_CONNECTION": "x", "SALLOC_ACCOUNT": "a",
           "PMIX_RANK": "0", "HOME": "/h"}  # fmt: skip
    assert commands.outside(env) == {"SLURM_CONF": "c", "SALLOC_ACCOUNT": "a", "HOME": "/h"}
    assert commands.job_of(env) == 7
    assert commands.job_of({}) is None


def test_without_slurm_it_is_said_what_reaches_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(nbddp.BadInput, match="salloc is not on PATH; --hosts reaches hosts by ssh"):
        allocation.needs("salloc")


# -- a real one -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, running_slurm(tmp_path_factory.mktemp("slurm")) as conf:
        patch.setenv("SLURM_CONF", str(conf))
        patch.delenv("SLURM_JOB_ID", raising=False)
        yield conf


@pytest.fixture(scope="module")
def far(conf: Path) -> Iterator[WorkerPool]:
    with WorkerPool(nproc=2, slurm=Slurm(nodes=2, time="60")) as pool:
        yield pool


def queue() -> dict[int, str]:
    """Job → state, of those that have not ended."""
    done = subprocess.run(["squeue", "-h", "-o", "%i %T"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {int(job): state for job, state in rows if state != "COMPLETING"}


@real
def test_ranks_are_on_the_nodes_that_slurm_gives(far: WorkerPool) -> None:
    assert queue() == {far.parts.of("slurm").allocations[0].job: "RUNNING"}
    code = f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\nos.environ['SLURMD_NODENAME'], t.item()"
    found = far.run_cell(code, want_value=True, screen=NullScreen())
    assert list(found) == [("n1", 4.0), ("n1", 4.0), ("n2", 4.0), ("n2", 4.0)]
    misleading = "[k for k in os.environ if k.startswith(('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP', 'PMI'))]"
    assert list(far.run_cell(misleading, want_value=True, screen=NullScreen())) == [[]] * 4
    (words,) = far.parts.of("slurm").holds()
    assert "on n[1-2], 59m " in words


@real
def test_new_workers_and_failures_keep_the_allocation(far: WorkerPool) -> None:
    held = queue()
    with pytest.raises(nbddp.WorkerFailed, match="rank 3 died: killed by SIGKILL"):
        far.run_cell("import os\nif os.environ['RANK'] == '3': os.kill(os.getpid(), 9)", screen=NullScreen())
    far.ensure(LaunchSpec(fresh=True))
    assert queue() == held
    assert far.ensure(LaunchSpec(slurm=Slurm())) == [], "--slurm alone is the pool's own"
    with pytest.raises(nbddp.BadInput, match=r"the pool runs in Slurm \(--slurm --nodes 2 --time 60\); %ddp stop ends"):
        far.ensure(LaunchSpec(slurm=Slurm(nodes=1)))


@real
def test_the_queue_is_shown_and_stop_takes_the_job_out_of_it(far: WorkerPool, tmp_path: Path) -> None:
    held, shown = queue(), list[str]()

    def progress(text: str) -> None:
        shown.append(text)
        if "is waiting" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Allocation.new(Slurm(nodes=2, more="--exclusive"), None, tmp_path / "log", progress)
    assert shown[0] == "requesting nodes from Slurm"
    assert "nodes are not free yet (Resources)" in shown[-1]
    until(lambda: queue() == held)


@real
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            Slurm(partition="none"),
            "Slurm granted no nodes: Job submit/allocate failed: Invalid partition name specified",
        ),
        (Slurm(time="soon"), "Invalid --time specification"),
        (Slurm(more="--no-such"), "salloc"),
    ],
)
def test_what_slurm_refuses_is_told_in_its_words(conf: Path, tmp_path: Path, asked: Slurm, words: str) -> None:
    with pytest.raises(AgentFailed, match=words):
        Allocation.new(asked, 1, tmp_path / "log", lambda text: None)


@real
@pytest.mark.more
def test_a_job_that_somebody_else_has_is_used_and_left(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["salloc", "--no-shell", "-N1", "-J", "other"], check=True, capture_output=True)
    job = next(job for job in queue() if job_name(job) == "other")
    try:
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
        assert held_jobs.offers()[0].startswith(
            f"this notebook kernel is in Slurm job {job} on 2 nodes; %ddp start --slurm"
        )
        with WorkerPool(nproc=1, slurm=True) as pool:
            assert pool.parts.of("slurm").allocations[0].job == job
            assert list(pool.run_cell("1 + 1", want_value=True, screen=NullScreen())) == [2]
        assert queue()[job] == "RUNNING"
    finally:
        subprocess.run(["scancel", str(job)], check=True)
    until(lambda: job not in queue())
    with pytest.raises(nbddp.BadInput, match=rf"Slurm job {job} .*squeue --me lists your jobs"):
        Allocation.standing(job)


def job_name(job: int) -> str:
    return allocation.ask("squeue", "--noheader", f"--jobs={job}", "--format=%j").strip()


@real
@pytest.mark.more
def test_nodes_are_held_where_no_agent_starts_and_stop_gives_them_back(conf: Path) -> None:
    pool = WorkerPool(nproc=1, slurm=Slurm(nodes=1), python="/no/such/python")
    with pytest.raises(
        AgentFailed, match=r"n\d has no /no/such/python: .*; Slurm job \d+ is still allocated: the next"
    ):
        pool.start()
    (held,) = pool.parts.of("slurm").allocations
    assert held.job in queue()
    pool.ensure(LaunchSpec(nproc=1, slurm=Slurm(nodes=1), python=sys.executable))
    assert pool.parts.of("slurm").allocations == [held]
    pool.stop()
    until(lambda: held.job not in queue())


@real
@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_a_job_that_is_taken_away_is_told_with_why(conf: Path, how: str) -> None:
    with WorkerPool(nproc=1, slurm=Slurm(nodes=1)) as pool:
        (held,) = pool.parts.of("slurm").allocations
        node = held.hosts[0].name
        take = {
            "cancelled": ["scancel", str(held.job)],
            "preempted": ["srun", "-purgent", f"--nodelist={node}", "--exclusive", "true"],
        }[how]
        taken: list[subprocess.Popen[bytes]] = []
        timer = threading.Timer(0.5, lambda: taken.append(subprocess.Popen(take)))
        timer.start()
        with pytest.raises(nbddp.WorkerFailed) as caught:
            pool.run_cell("import time\ntime.sleep(60)", screen=NullScreen())
        # Slurm's SIGTERM may end the rank before anybody knows why the job ends
        reasons = (f"Slurm job {held.job} was {how}", f"Slurm job {held.job} is ending")
        assert any(reason in caught.value.report for reason in reasons)
        with pytest.raises(PoolNotRunning, match=rf"because {node} is gone \(Slurm job {held.job} was {how}\)"):
            pool.ensure(LaunchSpec())
        taken[0].wait(30)
    until(lambda: held.job not in queue())


KERNEL = """
import sys
from nbddp.launch.options import LaunchSpec
from nbddp.pool.pool import WorkerPool
from nbddp.capabilities.slurm.commands import Slurm
pool = WorkerPool()
pool.ensure(LaunchSpec(nproc=1, slurm=Slurm(nodes=1), keep_alive=float(sys.argv[1]) or None))
print(pool.parts.of("slurm").allocations[0].job, flush=True)
sys.stdin.read()
"""


def killed_kernel(keep: float) -> int:
    """The job of a kernel that was killed while it had a pool."""
    command = [sys.executable, "-c", KERNEL, str(keep)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        job = int(kernel.stdout.readline())
        kernel.send_signal(signal.SIGKILL)
        return job


@pytest.mark.more
@real
def test_nodes_are_given_back_when_the_kernel_is_killed(conf: Path) -> None:
    job = killed_kernel(0)
    until(lambda: job not in queue())


@real
@pytest.mark.more
def test_nodes_that_are_kept_are_taken_by_the_next_kernel(conf: Path) -> None:
    job = killed_kernel(600)
    until(lambda: [kept.job for kept in allocation.kept()] == [job])
    assert queue()[job] == "RUNNING"
    with WorkerPool() as other, pytest.raises(nbddp.BadInput, match="this pool runs on this machine; %ddp stop ends"):
        other.attach()
    pool = WorkerPool()
    pool.attach()
    assert pool.world_size == 1
    assert pool.parts.of("slurm").allocations[0].job == job
    assert allocation.kept() == []
    with pytest.raises(nbddp.BadInput, match="no Slurm job is kept for a kernel of this machine"):
        held_jobs.to_attach(None)
    pool.stop()
    until(lambda: job not in queue())


@real
@pytest.mark.more
def test_nodes_that_nobody_takes_are_given_back(conf: Path) -> None:
    job = killed_kernel(2)
    until(lambda: job not in queue())
    assert allocation.kept() == []


@real
def test_nodes_are_given_back_where_salloc_is_killed(conf: Path) -> None:
    held = Allocation.new(Slurm(nodes=1), 1, conf.parent / "log", lambda text: None)
    salloc = max((p for p in psutil.Process().children() if p.name() == "salloc"), key=psutil.Process.create_time)
    salloc.kill()
    until(lambda: held.job not in queue())
    held.release()


@real
def test_the_end_of_a_job_is_told_before_it_comes(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the next cell, or while one runs; once, and not if the job was given more time."""
    held = Allocation.new(Slurm(nodes=1, time="6"), 1, conf.parent / "log", lambda text: None)
    try:
        here = held_jobs.HeldJobs()
        here.hold(held)
        assert here.notes() == [], "five minutes and more are left"
        here._ends[held] = time.monotonic() + 1.0
        assert here.notes() == [], "it was given more time"
        subprocess.run(["scontrol", "update", f"JobId={held.job}", "TimeLimit=4"], check=True)
        here._ends[held] = time.monotonic() + commands.LONG_BEFORE + 0.3
        told: list[str] = []
        here.remind(told.append)
        until(lambda: told)
        assert told[0].startswith(f"Slurm job {held.job} ends in ")
        assert here.notes() == [], "once"
    finally:
        held.release()


def test_what_a_run_is_told_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(nproc=1) as pool:
        pool.runs.ranks  # noqa: B018
        said = threading.Timer(0.3, lambda: pool.current.tell("a word") if pool.current else None)
        said.start()
        pool.run_cell("import time\ntime.sleep(1)")
    assert "a word" in capsys.readouterr().out
