"""What a rank has printed is shown though its process was killed before it was sent, and nothing of other runs is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbddp
from nbddp.agent.gather import AgentRequests
from nbddp.agent.server import Child, NodeAgent
from nbddp.capabilities.spool import copies, on_agent, part
from nbddp.errors import AgentFailed
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.codec import Message
from tests.pool.test_bounded import LOUD
from tests.screens import Hearing

KILLED = "import os\nif os.environ['RANK'] == '1': {}; os.kill(os.getpid(), 9)"


def printed(pool: WorkerPool, does: str) -> list[str]:
    """The log of rank 1, which does this and is killed."""
    with pytest.raises(nbddp.WorkerFailed, match="killed by SIGKILL"):
        pool.run_cell(does, screen=NullScreen())
    assert pool.last_run is not None
    log = pool.last_run.outputs[1].log
    return log.read_text().splitlines() if log.exists() else []


def test_the_last_words_of_a_rank_that_printed_much_and_died_are_there(pool: WorkerPool) -> None:
    assert printed(pool, LOUD + KILLED.format("print('the last')"))[-1] == "the last"


@pytest.mark.parametrize("says", ["print('the last')", "os.write(1, b'the last\\n')", "pass"])
def test_it_is_text_of_that_run_alone(pool: WorkerPool, says: str) -> None:
    pool.run_cell("print('earlier')", screen=NullScreen())
    assert printed(pool, KILLED.format(says)) == ["the last"] * (says != "pass")


def test_it_is_there_too_where_a_cell_has_left_a_process_that_holds_the_pipes(pool: WorkerPool) -> None:
    pool.run_cell("import subprocess\nleft = subprocess.Popen(['sleep', '600'])", screen=NullScreen())
    assert printed(pool, KILLED.format("os.write(1, b'the last\\n')")) == ["the last"]


@given(st.lists(st.text(max_size=40), max_size=40), st.integers(0, 1000), st.binary(max_size=8))
@settings(max_examples=60)
def test_a_copy_has_the_end_of_what_was_written_and_says_how_much_is_lost(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], came: int, left: bytes
) -> None:
    path = str(tmp_path_factory.mktemp("kept") / "worker-0.stdout")
    failed: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "HALF", 64)
        copy = copies.StreamCopy(path, lambda *why: failed.append(why))
        for run in (1, 2):
            for text in texts:
                copy.write(run, f"{run}{text}" if run == 1 else text)
    whole = "".join(texts).encode("utf-8", "replace") + left
    came = min(came, len("".join(texts)))
    lost, found = copies.missing(path, 2, came, left)
    assert found == whole.decode("utf-8", "replace")[came + lost :]
    assert lost == 0 or len(found.encode("utf-8", "replace")) >= 24
    assert copies.missing(path, 3, 0) == (0, "")
    assert failed == []
    os.close(copy._file)


def test_a_full_disk_is_told_once_a_cell_and_the_cell_goes_on(pool: WorkerPool) -> None:
    full = (
        "import os\nprint('before')\nfor copy in get_ipython().kernel.parts['spool'].copies.values(): "
        "fd = os.open('/dev/full', os.O_WRONLY); os.dup2(fd, copy._file); os.close(fd)\nprint('said'); print('more')\n7"
    )
    for code, why in ((full, "No space left on device"), ("print('again')\n7", "Invalid argument")):
        shown = Hearing()
        assert list(pool.run_cell(code, want_value=True, screen=shown)) == [7, 7]
        (told,) = [line for line in shown.said if "could not be saved" in line]
        assert told.startswith(f"output of ranks 0–1 could not be saved: {why} (/")
    pool.restart()


# -- on the agent ------------------------------------------------------------------------------------


def test_a_full_disk_does_not_end_the_agent_and_what_was_left_is_known(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"terminate called")
    os.close(write)
    child, peer = Child("worker", 7, 0.0, rank=3, log="/dev/full"), SimpleNamespace(came=[read])
    node = NodeAgent(tmp_path, 0, 0)
    node.children[7] = child
    on_agent.hold(node, peer, {"pid": 7, "streams": ["stderr"]})  # type: ignore[arg-type]
    assert read in node.held
    for hear in node.ended:
        hear(child)
    assert not node.held
    asked = {"run": 1, "ranks": [(rank, {"stdout": 0, "stderr": 0}) for rank in (2, 3)]}
    assert on_agent.written(node, peer, asked) == {"written": [(3, "stderr", 0, "terminate called")]}  # type: ignore[arg-type]


def test_text_that_the_locale_cannot_write_does_not_end_the_agent(tmp_path: Path) -> None:
    """No error of a capability does: it is in the agent's log."""
    code = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from nbddp.agent.gather import AgentRequests
from nbddp.agent.server import Child, NodeAgent
from nbddp.capabilities.spool import on_agent
home = Path(sys.argv[1])
read, write = os.pipe()
os.write(write, b"terminate called\\n  what():  5 \\xe2\\x82\\xac fehlen\\n")
os.close(write)
agent = NodeAgent(home, 0, 0)
agent.ended.append(lambda child: 1 / 0)
pid = os.fork() or os._exit(0)
agent.children[pid] = Child("worker", pid, 0.0, rank=3, log=str(home / "log"))
on_agent.hold(agent, SimpleNamespace(came=[read]), {"pid": pid, "streams": ["stderr"]})
while pid in agent.children: agent._reap()
"""
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert "ZeroDivisionError" in done.stderr
    assert "terminate called\n  what():  5 \u20ac fehlen" in (tmp_path / "log").read_text("utf-8")


def test_why_cpp_aborts_is_told_whole_though_its_text_came_in_two_pieces(pool: WorkerPool) -> None:
    does = """import os, time
if os.environ['RANK'] == '1':
    os.write(2, b"terminate called after throwing an instance of '"); time.sleep(0.05)
    os.write(2, b"std::runtime_error'\\n  what():  boom\\n"); os.abort()"""
    with pytest.raises(nbddp.WorkerFailed, match="killed by SIGABRT") as failed:
        pool.run_cell(does, screen=NullScreen())
    assert "    terminate called after throwing an instance of 'std::runtime_error'\n" in failed.value.report
    assert "      what():  boom\n" in failed.value.report


def test_an_agent_that_cannot_say_what_a_rank_wrote_takes_no_report_away(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(AgentRequests):
        def answers(self, timeout: float = 30.0) -> list[Message | AgentFailed]:
            return [AgentFailed("its disk is gone")]

    monkeypatch.setattr(part, "AgentRequests", Failing)
    screen = Hearing()
    with pytest.raises(nbddp.WorkerFailed, match="rank 1 died: killed by SIGKILL"):
        pool.run_cell(KILLED.format("pass"), screen=screen)
    assert "last output of rank 1 may be missing: its disk is gone" in screen.said


def test_a_pipe_that_is_written_to_for_ever_is_read_no_further_than_a_pipe_holds() -> None:
    assert len(on_agent.emptied(os.open("/dev/zero", os.O_RDONLY))) == on_agent.LARGEST_PIPE
