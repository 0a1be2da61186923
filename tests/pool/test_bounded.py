"""What a pool leaves behind is bounded: output on disk, logs, folders, and the processes of pools that nobody holds."""

from __future__ import annotations

import gc
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbddp
from nbddp.agent import child_logs, runtime_dir
from nbddp.agent.process_id import ProcessId
from nbddp.capabilities.spool import copies
from nbddp.errors import AgentFailed
from nbddp.output import log_file
from nbddp.output.buffer import RankOutput
from nbddp.output.log_file import LogFile
from nbddp.output.screens import NullScreen
from nbddp.pool.node import RUNS_KEPT
from nbddp.pool.pool import WorkerPool


def until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.01)


# -- a rank's output -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(64, 2000), st.booleans())
@settings(max_examples=60)
def test_a_log_file_has_the_beginning_and_the_end_of_all_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int, held: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "rank0.log"
    log, whole = LogFile(path, most, held), b""
    for i, size in enumerate(sizes):
        line = f"{i}:".encode() + b"x" * size + b"\n"
        whole += line
        log.write(line)
    assert (str(path) in {file.path for file in psutil.Process().open_files()}) == (held and bool(sizes))
    log.close()
    found = path.read_bytes() if path.exists() else b""
    assert log.why == ""
    if len(whole) <= most:
        assert found == whole
        return
    head, _, tail = found.partition(b"\n\xe2\x80\xa6 ")
    said, _, tail = tail.partition(b"\n")
    assert len(found) <= most + 100
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert int(said.split()[0]) == len(whole) - len(head) - len(tail)


@pytest.mark.parametrize(("text", "found"), [("", log_file.LIMIT), ("64MiB", 64 << 20), ("100000", 100_000)])
def test_the_limit_is_settable(text: str, found: int) -> None:
    assert log_file.limit({log_file.SETTING: text}) == found


@pytest.mark.parametrize(("text", "words"), [("much", "'much' is not a size"), ("10", "set 4096 bytes or more")])
def test_a_limit_that_is_none_is_refused_before_anything_runs(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setenv(log_file.SETTING, text)
    with pytest.raises(nbddp.BadInput, match=words):
        pool.run_cell("pass", screen=NullScreen())


LOUD = "line = 'x' * 1023\nfor i in range(12_000): print(i, line)\n"


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_megabytes_of_output_leave_a_few_on_disk(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log_file.SETTING, "1MiB")
    assert pool.agent is not None
    before = size_of(pool.agent.home)  # logs that other tests have filled
    pool.run_cell(LOUD, screen=NullScreen())
    assert pool.last_run is not None
    log = pool.last_run.outputs[1].log
    assert log.stat().st_size < 1.01 * (1 << 20)
    lines = log.read_text().splitlines()
    assert lines[0].startswith("0 x")
    assert lines[-1].startswith("11999 x")
    assert any("bytes omitted" in line for line in lines)
    assert size_of(pool.agent.bulk) < 2 * (2 * copies.HALF + (1 << 20)) + (1 << 20)
    assert size_of(pool.agent.home) < before + (1 << 20), "the folder of pools is often in memory"


def test_runs_of_some_time_ago_are_gone(pool: WorkerPool) -> None:
    assert pool.agent is not None
    for _ in range(RUNS_KEPT + 5):
        pool.run_cell("print(1)", screen=NullScreen())
    assert len(list((pool.agent.bulk / "runs").iterdir())) <= RUNS_KEPT


def test_a_full_disk_of_the_notebooks_side_is_told(tmp_path: Path) -> None:
    out = RankOutput(0, Path("/dev"), "full")
    assert out.take("stream", {"name": "stdout", "text": "a\nb\n"}) == [("stdout", "a"), ("stdout", "b")]
    assert out.why == "No space left on device"
    out.close()


def test_a_log_that_grows_is_cut_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(writer, b"first\n" + b"x" * 100_000 + b"\nlast\n")
    assert not child_logs.cut_log(str(path), 1 << 20)
    assert child_logs.cut_log(str(path), 1000)
    os.write(writer, b"and on\n")
    os.close(writer)
    found = path.read_bytes()
    assert len(found) < 700
    assert found.startswith(b"first\n")
    assert found.endswith(b"last\nand on\n")
    assert not child_logs.cut_log(str(tmp_path / "none.log"))


def test_the_agent_cuts_the_logs_of_its_processes(pool: WorkerPool) -> None:
    log = Path(pool.log_of(0))
    with open(log, "ab") as file:
        file.write(b"x" * (child_logs.MOST + 1))
    until(lambda: log.stat().st_size < child_logs.MOST, "the log is cut")
    with pytest.raises(nbddp.WorkerFailed, match="SIGABRT"):
        pool.run_cell("import os; os.abort()", ranks=[0], screen=NullScreen())


# -- folders --------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBDDP_RUNTIME_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("NBDDP_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "shared").mkdir()
    return tmp_path


def dead(folder: Path, victim: Path) -> Path:
    """A folder as a dead pool leaves it, that names a file of the victim's."""
    found = folder / "abc123"
    found.mkdir(parents=True)
    runtime_dir.record(found, ProcessId(2**22 - 1, 1.0), [str(victim)])
    return found


def test_a_link_in_the_place_of_the_folder_of_pools_is_not_followed(base: Path) -> None:
    victim = base / "precious"
    victim.mkdir(mode=0o700)
    (victim / "thesis.txt").write_text("years of work")
    dead(victim, victim / "thesis.txt")
    (base / "shared" / f"nbddp-{os.getuid()}").symlink_to(victim)
    with pytest.raises(AgentFailed, match="is a link; remove it, or set NBDDP_RUNTIME_DIR to a private folder"):
        runtime_dir.running()
    assert (victim / "thesis.txt").read_text() == "years of work"
    assert (victim / "abc123").exists()


def test_what_is_no_folder_of_a_pool_is_told_and_left_alone(base: Path) -> None:
    victim = base / "precious"
    dead(victim, victim)
    (runtime_dir.runtime() / "fed321").symlink_to(victim / "abc123")
    (runtime_dir.runtime() / "note.txt").write_text("hello")
    assert runtime_dir.running() == []
    assert (victim / "abc123" / runtime_dir.RECORD).exists()
    assert [line.rpartition("/")[2] for line in runtime_dir.strange()] == [
        "fed321 is not a pool's folder and is left alone", "note.txt is not a pool's folder and is left alone",
    ]  # fmt: skip


def test_of_a_dead_pools_files_links_and_folders_are_left(base: Path) -> None:
    victim, link = base / "thesis.txt", base / "link"
    victim.write_text("years of work")
    link.symlink_to(victim)
    own = base / "connection.json"
    own.write_text("{}")
    found = dead(runtime_dir.runtime(), link)
    runtime_dir.record(found, ProcessId(2**22 - 1, 1.0), [str(link), str(base / "shared"), str(own)])
    runtime_dir.bulk(found).joinpath("runs").mkdir()
    assert runtime_dir.running() == []
    assert (victim.exists(), link.is_symlink(), own.exists(), found.exists()) == (True, True, False, False)
    assert list((runtime_dir.cache() / runtime_dir.POOLS).iterdir()) == []


def test_a_folder_that_others_may_read_is_refused(base: Path) -> None:
    folder = runtime_dir.runtime()
    folder.chmod(0o755)
    with pytest.raises(AgentFailed, match="is open to others"):
        runtime_dir.runtime()
    folder.chmod(0o700)
    assert stat.S_IMODE(runtime_dir.cache().stat().st_mode) == 0o700


def test_without_a_cache_folder_output_lies_in_the_pools_own(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "file").write_text("")
    monkeypatch.setenv("NBDDP_CACHE_DIR", str(base / "file"))
    assert runtime_dir.bulk(runtime_dir.runtime()) == runtime_dir.runtime()


# -- pools that nobody holds -------------------------------------------------------------------------


@pytest.mark.usefixtures("cold")
def test_a_pool_that_nobody_holds_ends(pool: WorkerPool) -> None:
    """Beside another, which has made what a process makes once."""
    me = psutil.Process()
    gc.collect()
    before, descriptors, threads = me.children(recursive=True), me.num_fds(), threading.active_count()
    dropped = WorkerPool(nproc=1)
    assert list(dropped.run(os.getpid))
    with pytest.raises(nbddp.WorkerFailed):
        dropped.run_cell("1 / 0", screen=NullScreen())
    del dropped
    gc.collect()
    until(lambda: set(me.children(recursive=True)) <= set(before), "their processes end")
    until(lambda: threading.active_count() <= threads + 1, "their threads end")
    gc.collect()
    until(lambda: me.num_fds() <= descriptors + 4, "their descriptors are closed")


@pytest.mark.more
@pytest.mark.usefixtures("cold")
def test_a_pool_that_is_at_work_is_held(pool: WorkerPool) -> None:
    made = WorkerPool(nproc=1)
    made.start()
    assert list(made.run_cell("import time; time.sleep(0.5); 3", want_value=True, screen=NullScreen())) == [3]
    agent = made.agent
    assert agent is not None
    assert agent.process is not None
    del made
    gc.collect()
    until(lambda: agent.process is not None and agent.process.poll() is not None, "the agent ends")
    assert agent.process.returncode in (0, -signal.SIGTERM)


ORPHAN = """
import os, socket, time
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        server = socket.create_server(("127.0.0.1", 0)); os.write(w, f"{os.getpid()}".encode()); time.sleep(600)
    os._exit(0)
os.wait()
int(os.read(r, 20))
"""
TORCHS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
def listening():
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    mine = {os.readlink(file) for file in files if os.path.islink(file)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in mine for row in rows)
r, w = os.pipe()
if os.fork() == 0:
    os.write(w, bytes([listening()])); os._exit(0)
found = os.read(r, 1)[0], listening()
os.wait(); dist.barrier(); dist.destroy_process_group()
found
"""


def test_a_process_that_has_left_its_rank_ends_with_the_pool_and_nothing_stays_in_the_profile(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where a test of before has compiled
        with WorkerPool(nproc=2) as pool:
            orphans = [psutil.Process(pid) for pid in pool.run_cell(ORPHAN, want_value=True, screen=NullScreen())]
            assert all(p.is_running() for p in orphans)
            in_child, in_rank = zip(*pool.run_cell(TORCHS, want_value=True, screen=NullScreen()), strict=True)
            assert set(in_child) == {0}
            assert min(in_rank) >= 1
            told = pool.run_cell(
                "import os; os.environ['TORCHINDUCTOR_CACHE_DIR']", want_value=True, screen=NullScreen()
            )
            assert set(told) == {str(runtime_dir.cache() / "torchinductor")}
        until(lambda: not any(p.is_running() for p in orphans), "orphans end")
    left = [p for p in (tmp_path / "ipython").rglob("*") if p.is_file() and p.name != "README"]
    assert left == []
