"""Why a process has ended, by its log: real logs, cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nbddp.agent.child_logs import cause
from nbddp.agent.client import AgentClient
from nbddp.errors import AgentFailed
from tests import places

ROOT = places.ROOT
CHAINED = """Traceback (most recent call last):
  File "/lib/a.py", line 3, in f
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/lib/b.py", line 4, in g
    raise ValueError(
          ^^^^^^^^^^
"""
OF_TORCH = """ValueError:
Invalid log settings: bogus, must be a comma separated list
of names.
Valid settings:
all, annotation
"""
SAID = "ValueError: Invalid log settings: bogus, must be a comma separated list of names. Valid settings:"
USERS = """Traceback (most recent call last):
  File "<frozen x>", line 1, in y
  File "/nb/queue.py", line 7, in <module>
"""
ODD = "AttributeError: module 'random' has no attribute 'x'"
MISSING = f"""Traceback (most recent call last):
  File "/lib/c.py", line 1
{ODD}"""


@pytest.mark.parametrize(
    ("log", "entries", "said"),
    [
        ("", [], ""),
        ("one\ntwo\n\n", [], "two"),
        (CHAINED + OF_TORCH, [], SAID),
        (CHAINED + "RuntimeError\n", [], "RuntimeError"),
        (CHAINED + "OSError: no\n\nException ignored in: <socket>\n", [], "OSError: no"),
        (CHAINED, [], "^^^^^^^^^^"),
        (CHAINED + "E: " + "x" * 1000, [], "E: " + "x" * 397),
        (USERS + "E: 1", ["notes.py"], "E: 1 (/nb/queue.py line 7)"),
        (USERS + "E: 1", ["queue.py"], "E: 1 (/nb/queue.py line 7); rename /nb/queue.py, which hides the module queue"),
        (MISSING, ["random.py"], f"{ODD}; rename /nb/random.py, which hides the module random"),
        (MISSING, ["random.txt", "string.py"], ODD),
    ],
)
def test_the_error_and_the_users_file_are_named(log: str, entries: list[str], said: str) -> None:
    assert cause(log, "/nb", entries) == said


def test_an_agent_that_does_not_start_names_the_file_that_hides_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None
) -> None:
    (tmp_path / "random.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    agent = AgentClient.launch(os.environ)
    with pytest.raises(
        AgentFailed, match=f"ImportError: .*; rename {tmp_path}/random.py, which hides the module random"
    ):
        agent.wait_warm()
    agent.close()


def test_an_agent_without_room_for_its_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    (tmp_path / "agent.log").touch()
    agent = AgentClient.at(ours, tmp_path, {}, owned=False)
    assert agent.last_words() == "it left no message"
    monkeypatch.setattr("nbddp.agent.client.ROOM", 1 << 60)
    assert agent.last_words().startswith(
        f"the disk of {tmp_path.parent} is full; free some space, or set NBDDP_RUNTIME"
    )
    agent.close()


WITHOUT = "import nbddp\ntry:\n    nbddp.Pool(nproc=1).start()\nexcept nbddp.PoolError as e:\n    print(e)"
FULL = """mount -t tmpfs -o size=64k none "$0" && { head -c 64K /dev/zero > "$0/fill"
NBDDP_RUNTIME_DIR="$0/run" exec "$1" -c "$2"
}"""


def test_an_agent_on_a_full_disk_is_told_as_that(tmp_path: Path) -> None:
    command = ["unshare", "-r", "--mount", "sh", "-c", FULL, str(tmp_path), sys.executable, WITHOUT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    if ran.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(ran.stderr)
    told = f"the disk of {tmp_path}/run/nbddp-0 is full; free some space, or set NBDDP_RUNTIME_DIR"
    assert told in ran.stdout, ran.stdout + ran.stderr


def test_a_machine_without_the_loopback_is_told_what_to_do() -> None:
    """As one with IPv6 alone, or whose device is down."""
    ran = subprocess.run(
        ["unshare", "-r", "--net", sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if ran.stderr.startswith("unshare:"):
        pytest.skip(ran.stderr)
    assert ran.stdout.startswith("the processes of a pool meet at 127.0.0.1, which this machine does not have; ip link")
