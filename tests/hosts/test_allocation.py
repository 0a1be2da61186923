"""What Slurm's commands answer when they are not well, played by scripts; `test_slurm` has the real ones."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from nbddp.capabilities.slurm.allocation import Allocation
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.capabilities.slurm.holder import Holder
from nbddp.errors import AgentFailed
from nbddp.protocol.codec import encode


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command of Slurm's is put."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def play(commands: Path, name: str, script: str) -> None:
    (commands / name).write_text(f"#!/bin/sh\n{script}\n")
    (commands / name).chmod(0o755)


def test_nodes_are_not_given_back_because_slurm_does_not_answer(commands: Path) -> None:
    play(commands, "scontrol", "echo n1")
    held = Allocation(7, "n1", None)
    play(commands, "scontrol", "echo 'JobId=7 JobState=RUNNING'")
    assert not held.over
    play(commands, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert held.over
    play(commands, "scontrol", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(AgentFailed, match="scontrol show job says: Unable to contact slurm controller"):
        _ = held.over


def test_stop_takes_a_job_out_of_the_queue_at_once(commands: Path, tmp_path: Path) -> None:
    play(commands, "salloc", f"trap 'touch {tmp_path}/told; exit 1' TERM\nwhile :; do sleep 0.05; done")

    def stopped(text: str) -> None:
        time.sleep(0.5)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Allocation.new(Slurm(), 1, tmp_path / "salloc.log", stopped)
    assert (tmp_path / "told").exists()
    assert time.monotonic() - began < 4


def test_a_job_whose_salloc_was_killed_is_found_and_cancelled(commands: Path, tmp_path: Path) -> None:
    play(commands, "salloc", f'echo "$@" >{tmp_path}/asked; kill -9 $$')
    play(commands, "squeue", f"echo 8 nbddp 00; sed 's/.*comment=\\(nbddp [0-9a-f]*\\).*/7 \\1/' {tmp_path}/asked")
    play(commands, "scancel", f'echo "$@" >>{tmp_path}/cancelled')
    with pytest.raises(AgentFailed, match="Slurm granted no nodes: salloc printed nothing"):
        Allocation.new(Slurm(), 1, tmp_path / "salloc.log", lambda text: None)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_a_kernel_that_goes_while_it_takes_nodes_leaves_them_to_the_next(tmp_path: Path) -> None:
    holder = Holder(7, "n1")
    holder.keep = 30.0
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as second:
        door.bind(str(tmp_path / "door"))
        door.listen()
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(tmp_path / "door"))
            first.sendall(encode({"op": "take"}))
        second.connect(str(tmp_path / "door"))
        second.sendall(encode({"op": "take"}))
        read, owner = holder._wait(door)
        assert owner.pid == os.getpid()
        assert second.recv(100) == encode({"taken": 7})
        os.close(read)
