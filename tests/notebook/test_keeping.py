"""`--keep-warm`: the warm process outlives its kernel, alone; it serves its own user, once, and only who could have
started it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from nbddp.agent import runtime_dir
from nbddp.agent.client import AgentClient, ask
from nbddp.capabilities.completion.lines import complete_cell
from nbddp.capabilities.terminal import main as terminal
from nbddp.capabilities.warm import client as warm_client
from nbddp.capabilities.warm import fingerprint, server
from nbddp.capabilities.warm.client import WaitingProcess
from nbddp.errors import AgentFailed, BadInput
from nbddp.launch import options
from nbddp.pool.pool import WorkerPool
from tests import places
from tests.kernels import Kernel
from tests.notebook.test_orphans import AGENT, until
from tests.processes import still_running

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing is kept here")
ROOT = places.ROOT
NOBODY = 65534
COLD = True  # what waits here is what these tests have left


@pytest.fixture(scope="module", autouse=True)
def _runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of pools of this file's own; in the end nothing is in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDDP_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield
        for one in warm_client.waiting():
            one.end()
        until(lambda: not runtime_dir.running())
        assert list(server.folder().iterdir()) == []


@pytest.fixture
def warm() -> WaitingProcess:
    """A warm process that waits, the last test's if it has left it."""
    for left in warm_client.waiting()[1:]:
        left.end()
    if not warm_client.waiting():
        agent = AgentClient.launch(os.environ)
        agent.wait_warm()
        agent.keep(600)
        agent.close()
    return only()


def taken(env: Mapping[str, str] = os.environ) -> AgentClient:
    agent = AgentClient.launch(env, asked(env))
    assert agent.process is None
    agent.wait_warm()
    return agent


def only() -> WaitingProcess:
    until(lambda: len(warm_client.waiting()) == 1)
    return warm_client.waiting()[0]


def over(one: WaitingProcess) -> bool:
    return not one.identity.alive() and not one.place.exists()


def asked(env: Mapping[str, str] = os.environ) -> warm_client.AskedProcess:
    found = ask(env)
    assert found is not None
    return found


# -- in a kernel --------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    for one in warm_client.waiting():
        one.end()
    made = Kernel(cwd=str(tmp_path))
    assert made.run("%load_ext nbddp").ok
    yield made
    made.close()


def family(kernel: Kernel) -> list[psutil.Process]:
    agent = psutil.Process(int(kernel.run(AGENT + "print(agent.hello.pid)").text()))
    return [agent, *agent.children(recursive=True)]


def restart(kernel: Kernel, *, kill: bool) -> None:
    if kill:
        psutil.Process(kernel.pid).kill()
    kernel.manager.restart_kernel(now=kill)
    kernel.client.wait_for_ready(timeout=60)


def test_a_restarted_kernel_finds_torch_imported_and_nothing_else(kernel: Kernel) -> None:
    """Asked for by a line, then by the configuration; the kernel killed in a cell, then restarted in order."""
    assert kernel.run("%%ddp --nproc 2 --keep-warm 5m\nimport torch\nkept = 5").ok
    assert "stays for 5m" in kernel.run("%ddp status").text()
    before = family(kernel)
    kernel.send("%%ddp\nimport time; time.sleep(600)")
    restart(kernel, kill=True)
    one = only()
    until(lambda: not still_running(before))
    process = psutil.Process(one.identity.pid)
    assert process.children(recursive=True) == []
    ends = {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert {end for end in ends if not end.startswith("socket:")} == {os.devnull, str(one.place / "agent.log")}
    assert runtime_dir.running() == []

    assert kernel.run("%load_ext nbddp").ok
    assert warm_client.waiting() == []
    shown = kernel.run("%%ddp --nproc 2\nprint('kept' in globals())")
    assert shown.text() == "ranks 0–1 │ False\n", shown.error
    assert family(kernel)[0].parent() == process, "which keeps it"
    refused = kernel.run("%config DDPMagics.keep_warm = 'long'")
    assert "'long' is not a time; type a number with its unit, such as 10m" in refused.error + refused.text("stderr")
    assert kernel.run("%config DDPMagics.keep_warm = '4m'").ok
    assert "stays for 4m" in kernel.run("%ddp status").text()
    before = family(kernel)
    restart(kernel, kill=False)
    until(lambda: not still_running(before))
    assert 200 < only().left <= 240

    assert kernel.run("%load_ext nbddp").ok
    assert kernel.run("%ddp start --nproc 1").ok
    before = family(kernel)
    assert psutil.Process(kernel.pid) not in before[0].parents()
    assert kernel.run("%ddp stop").ok
    until(lambda: not still_running(before))
    assert warm_client.waiting() == []


@pytest.mark.more
def test_nothing_is_kept_unasked_nor_before_it_is_warm(kernel: Kernel) -> None:
    assert kernel.run("%ddp start --nproc 1").ok
    before = family(kernel)
    restart(kernel, kill=False)
    until(lambda: not still_running(before))
    assert warm_client.waiting() == []
    kernel.run("%load_ext nbddp\n%config DDPMagics.keep_warm = '4m'")
    until(lambda: len(runtime_dir.running()) == 1)  # it imports
    importing = psutil.Process(json.loads((runtime_dir.running()[0] / runtime_dir.RECORD).read_text())["pid"])
    psutil.Process(kernel.pid).kill()
    until(lambda: not still_running([importing]))
    until(lambda: not runtime_dir.running())
    assert warm_client.waiting() == []


# -- one owner -----------------------------------------------------------------------------------


def test_of_two_kernels_one_takes_it(warm: WaitingProcess) -> None:
    stopped = psutil.Process(warm.identity.pid)
    stopped.suspend()  # it could be the first one's before the second asks
    first, second = asked(), asked()
    stopped.resume()
    connection = first.answer()
    assert connection is not None
    assert second.answer() is None
    assert not second.home.exists()
    assert ask(os.environ) is None
    connection.close()  # its owner's end, although the process goes on
    assert only().identity != warm.identity


def test_the_next_owner_has_a_folder_and_a_log_of_its_own(warm: WaitingProcess) -> None:
    agent = taken({**os.environ, "JPY_PARENT_PID": "7"})
    try:
        assert agent.wait_warm().more["unkept"] == ""
        assert agent.home in runtime_dir.running()
        assert agent.request("status")["keep"] == 600
        own = Path(f"/proc/{agent.hello.pid}/fd")
        assert os.readlink(own / "2") == str(agent.home / "agent.log")
        assert os.readlink(f"/proc/{agent.hello.pid}/cwd") == os.getcwd()
    finally:
        agent.close()
    assert not agent.home.exists()
    assert only().left > 590


@pytest.mark.parametrize("name", ["..", ".", "warm", "/tmp", "../..", "abcdef"])
def test_it_serves_no_folder_but_a_pools_own(name: str, tmp_path: Path) -> None:
    """The folder is removed with the pool, with all that is in it."""
    with pytest.raises(AgentFailed):
        runtime_dir.named(name)
    (tmp_path / "kept").touch()
    with pytest.raises(ValueError, match="was not created by nbddp"):
        runtime_dir.remove(tmp_path, [])
    assert (tmp_path / "kept").exists()


def test_another_user_is_refused(warm: WaitingProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends, although the folder lets them in."""
    if os.getuid() != 0:
        pytest.skip("only root may run a process of another user")
    door = runtime_dir.socket_of(warm.place)
    ask = f"""
import os, socket
os.setuid({NOBODY})
s = socket.socket(socket.AF_UNIX); s.connect({str(door)!r})
try:
    s.sendall(b'{{"op":"end"}}\\n')
    print(s.recv(100))
except (ConnectionResetError, BrokenPipeError):  # closed, before or after it has come
    print(b"")
"""
    opened = [p for p in [warm.place, *warm.place.parents] if not p.stat().st_mode & 0o001]
    modes = {p: p.stat().st_mode for p in opened}
    try:
        for path in opened:
            path.chmod(0o711)
        door.chmod(0o777)
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.stdout.strip() == "b''", done.stderr
    assert warm.identity.alive()
    assert WaitingProcess(warm.place, {**warm.facts, "pid": os.getpid()}).connect() is None, (
        "another process listens there"
    )
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    assert warm.connect() is None, "another user's process listens there"


# -- who could have started it -------------------------------------------------------------------


def in_folder(path: Path) -> Callable[[], object]:
    before = os.getcwd()
    os.chdir(path)
    return lambda: os.chdir(before)


def with_mask(path: Path) -> Callable[[], object]:
    before = os.umask(0o027)
    return lambda: os.umask(before)


def with_limit(path: Path) -> Callable[[], object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def with_fewer_cores(path: Path) -> Callable[[], object]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    return lambda: os.sched_setaffinity(0, before)


def with_path(path: Path) -> Callable[[], object]:
    before = dict(os.environ)
    os.environ["LD_LIBRARY_PATH"] = str(path)
    return lambda: (os.environ.clear(), os.environ.update(before))


def with_unknown(path: Path) -> Callable[[], object]:
    before = dict(os.environ)
    os.environ["SOMETHING_NEW"] = "1"
    return lambda: (os.environ.clear(), os.environ.update(before))


@pytest.mark.parametrize("change", [in_folder, with_mask, with_limit, with_fewer_cores, with_path, with_unknown])
def test_who_could_not_have_started_it_does_not_get_it(
    warm: WaitingProcess, change: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    if change is with_fewer_cores and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one core")
    undo = change(tmp_path)
    try:
        assert ask(os.environ) is None
    finally:
        undo()
    assert warm.identity.alive(), "others may use it"
    assert fingerprint.differing(warm.facts["inherited"], fingerprint.inherited(os.environ)) == []


def test_variables_of_a_front_end_do_not_matter() -> None:
    env = {**os.environ, "JPY_PARENT_PID": "1", "TERM": "vt100", "PWD": "/"}
    assert fingerprint.differing(fingerprint.inherited(os.environ), fingerprint.inherited(env)) == []


COPIED = """
import os, psutil, time
from pathlib import Path
from nbddp.agent.client import AgentClient, ask
from nbddp.capabilities.warm import fingerprint, client as warm_client

def used(home):  # by the agent, or the process that it has become
    return any(str(home) in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))

library = Path(os.environ["PYTHONPATH"], "sitecustomize.py")
agent = AgentClient.launch(os.environ); agent.wait_warm(); agent.keep(60); agent.request("status")
library.write_text("x = 2")
agent.close()
end = time.monotonic() + 20
while used(agent.home):
    assert not warm_client.waiting(), "kept, although a library has changed while its owner lived"
    assert time.monotonic() < end, "neither kept nor ended"
    time.sleep(0.01)
while time.time() < library.stat().st_ctime + 0.2:  # what is younger than the process is in doubt
    time.sleep(0.01)

agent = AgentClient.launch(os.environ); agent.wait_warm(); agent.keep(60); agent.close()
end = time.monotonic() + 20
while not warm_client.waiting():
    assert time.monotonic() < end, "not kept"
    time.sleep(0.01)
one = warm_client.waiting()[0]
changed = Path(fingerprint.ROOT, "errors.py")
changed.write_text(changed.read_text() + "# more")
assert ask(os.environ) is None
assert not warm_client.waiting() and not one.identity.alive(), "ended: nobody can use it"
"""


@pytest.mark.more
def test_a_changed_library_and_a_changed_file_of_nbddp_end_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("x = 1")
    shutil.copytree(ROOT / "nbddp", tmp_path / "nbddp", ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "NBDDP_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COPIED], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr


IMPORTING = """
import importlib.util, os, sys, time
from pathlib import Path
from nbddp.capabilities.warm import fingerprint
imports = fingerprint.Imports()
import found.part
assert importlib.util.find_spec("missing") is None
assert importlib.util.find_spec("found.missing") is None
imports.end(); imports.take()
before = imports.changed()
if before: print(before); raise SystemExit
folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
exec(sys.argv[1])
print(imports.changed())
"""
CHANGES = {
    "a module is edited": "(folder / 'found/part.py').write_text('x = 2')",
    "and its times set back": "p = folder / 'found/part.py'; s = p.stat(); p.write_text('x = 2'); "
    "os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))",
    "another version is installed": "(folder / 'found-1.dist-info').rename(folder / 'found-2.dist-info')",
    "a module is there that was not": "(folder / 'missing.py').touch()",
    "a part of a package is there that was not": "(folder / 'found/missing.py').touch()",
    "a module stands before one that was imported": "(folder / 'hashlib.py').touch()",
    "a module is gone": "(folder / 'found/part.py').unlink()",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package that was there long before."""
    (tmp_path / "found").mkdir()
    (tmp_path / "found-1.dist-info").mkdir()
    (tmp_path / "found" / "__init__.py").touch()
    (tmp_path / "found" / "part.py").write_text("x = 1")
    return tmp_path


def importing(package: Path, change: str) -> str:
    newest = max(path.stat().st_ctime for path in package.rglob("*"))
    until(lambda: time.time() > newest + 0.2)  # what is younger than the process is in doubt
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, change], capture_output=True, text=True, env=env, cwd=package, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_imported_is_known(package: Path, change: str) -> None:
    assert importing(package, change).startswith(str(package))


def test_what_changes_while_it_is_imported_is_in_doubt(package: Path) -> None:
    (package / "found" / "part.py").write_text("import pathlib; pathlib.Path(__file__).write_text('x = 2')")
    assert importing(package, "") == str(package / "found" / "part.py")


def test_what_does_not_concern_it_may_change(package: Path) -> None:
    assert importing(package, "(folder / 'notebook.ipynb').touch(); (folder / 'lightning_logs').mkdir()") == ""


# -- its end ---------------------------------------------------------------------------------------


def test_it_ends_when_its_time_is_over(warm: WaitingProcess) -> None:
    agent = taken()
    agent.keep(0.2)
    agent.close()
    until(lambda: not warm_client.waiting() and not list(server.folder().iterdir()))
    assert ask(os.environ) is None


@pytest.mark.more
def test_it_ends_by_sigterm_and_off_ends_it_with_its_owner(warm: WaitingProcess) -> None:
    os.kill(warm.identity.pid, signal.SIGTERM)
    until(lambda: over(warm))
    agent = AgentClient.launch(os.environ)
    agent.wait_warm()
    agent.keep(600)
    agent.keep(0)
    agent.close()
    assert warm_client.waiting() == []


def test_one_that_is_killed_leaves_nothing_in_the_way(warm: WaitingProcess) -> None:
    """While it waits, and between question and answer: whoever asked starts its own."""
    psutil.Process(warm.identity.pid).suspend()
    question = asked()
    psutil.Process(warm.identity.pid).kill()
    assert question.answer() is None
    assert not question.home.exists()
    assert runtime_dir.socket_of(warm.place).exists(), "a socket at which nobody answers"
    assert warm.connect() is None
    until(lambda: not warm.identity.alive())
    assert ask(os.environ) is None
    assert over(warm)


def test_the_terminal_lists_and_ends_it(warm: WaitingProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.main(["status"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"warm process {warm.name} · waits for a kernel in {os.getcwd()} · ")
    assert " left · " in line
    assert " MiB; python -m nbddp stop " in line
    assert terminal.main(["stop", warm.name]) == 0
    assert capsys.readouterr().out == f"warm process {warm.name} ended\n"
    assert over(warm)


# -- the option ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90s", 90), ("2h", 7200), ("1.5m", 90), ("off", 0)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert options.parse_cell(f"--keep-warm {text}").keep_warm == seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10", "'10' has no unit; type 10m for minutes, 10s for seconds, or off"),
        ("x", "'x' is not a time; type a number with its unit, such as 10m, 90s or 2h, or off"),
        ("1000h", "'1000h' is not a time between 0 and a week; type one such as 10m, 90s or 2h, or off"),
        ("0s", "'0s' is not a time between 0 and a week; type one such as 10m, 90s or 2h, or off"),
    ],
)
def test_what_is_no_time_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        options.parse_cell(f"--keep-warm {text}")
    assert str(refused.value) == f"%%ddp --keep-warm: {words}"


def test_it_is_completed() -> None:
    assert complete_cell("--keep-w") == ["--keep-warm"]


def test_where_nothing_can_be_kept_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_START_METHOD", "spawn")
    pool = WorkerPool()
    with pytest.raises(BadInput, match="--keep-warm 1m: NBDDP_START_METHOD=spawn; remove --keep-warm"):
        pool.ensure(options.LaunchSpec(nproc=1, keep_warm=60))
    pool.close()
