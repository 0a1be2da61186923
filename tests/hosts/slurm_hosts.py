"""A Slurm of two nodes on this machine: real munged, slurmctld and slurmds, with files and keys of the test's own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nbddp.agent.controller import quiet_ports

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "salloc")
HERE = os.geteuid() == 0 and all(shutil.which(program, path=PATH) for program in NEEDED)
MISSING = "needs root and Slurm (apt-get install slurmctld slurmd slurm-client munge)"
CPUS = 4
SEES_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
UP = 40.0  # seconds until the nodes are idle
SETTINGS = """
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
"""


def names_are_possible() -> bool:
    """Whether a process may have an /etc/hosts of its own."""
    return subprocess.run([*SEES_HOSTS, os.devnull, "true"], capture_output=True).returncode == 0


@contextmanager
def slurm(folder: Path, nodes: int = 2, names: bool = False) -> Iterator[Path]:
    """Its configuration, which SLURM_CONF is to name; it runs until the block ends. names: the daemons and their
    jobs find the nodes' names in /etc/hosts."""
    host, socket_path = socket.gethostname().split(".")[0], folder / "munge.sock"
    (folder / "state").mkdir()
    os.chmod(folder, 0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    claim, (control, *ports) = quiet_ports(nodes + 1)
    nodes_named = [f"n{i + 1}" for i in range(nodes)]
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {' '.join(nodes_named)} {host}\n")
    rows = [
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={control}\nAuthInfo=socket={socket_path}",
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool.%n\nSlurmctldPidFile={folder}/control.pid",
        f"SlurmdPidFile={folder}/%n.pid\nSlurmctldLogFile={folder}/control.log\nSlurmdLogFile={folder}/%n.log",
        SETTINGS,
        *(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
            for name, port in zip(nodes_named, ports, strict=True)
        ),
        "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL",
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP",
    ]
    conf = folder / "slurm.conf"
    conf.write_text("\n".join([*rows, ""]))
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": PATH}
    munged = ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={socket_path}",
              f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
              f"--seed-file={folder}/seed"]  # fmt: skip
    commands = [munged, ["slurmctld", "-D", "-i", "-f", str(conf)],
                *(["slurmd", "-D", "-f", str(conf), "-N", name] for name in nodes_named)]  # fmt: skip
    prefix = [*SEES_HOSTS, str(hosts)] if names else []
    with ExitStack() as stack, claim:
        for command in commands:
            stack.enter_context(_running([*prefix, *command], env, folder / f"{command[0]}.out"))
            if command[0] == "munged":
                _until(socket_path.exists)
            if command[0] == "slurmctld":  # a slurmd that does not find it tries again much later
                _until(lambda: " is UP" in _said(env, "scontrol", "ping"))
        _until(lambda: _idle(env, nodes_named) == nodes)
        yield conf


@contextmanager
def _running(command: list[str], env: dict[str, str], said: Path) -> Iterator[None]:
    with said.open("ab") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(env: dict[str, str], names: list[str]) -> int:
    return len(
        set(_said(env, "sinfo", "-h", "-N", "-p", "all", "-o", "%N-%T").split()) & {f"{name}-idle" for name in names}
    )


def _said(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def _until(done) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + UP
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
