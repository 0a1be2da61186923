"""A look at another thread changes nothing in the program: it holds no frame, so no name lives longer for it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ipykernel
import pytest
import tornado
import zmq

from nbddp.deadlock.on_rank import frames, threads
from nbddp.deadlock.on_rank import position as worker_position
from nbddp.deadlock.on_rank.frames import SeenFrame

DIED: list[int] = []


class Dies:
    """Notes in which thread it dies."""

    def __del__(self) -> None:
        DIED.append(threading.get_ident())


def has_one(depth: int) -> int:
    one = Dies()
    return has_one(depth - 1) if depth else sum(range(50)) + (one is None)


@contextmanager
def beside(look: Any) -> Iterator[list[int]]:
    """A thread looks as often as it can. Yields a list of as many numbers as it has looked."""
    ended, looks = threading.Event(), []

    def looking() -> None:
        while not ended.is_set():
            look()
            looks.append(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=looking)
    thread.start()
    try:
        yield looks
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def of_main() -> list[SeenFrame]:
    return frames.of(threading.main_thread().ident or 0)


def names_of_main() -> None:
    for frame in of_main()[:3]:
        try:
            frame.get("depth", "nothing")
        except frames.Moved:
            return


def position() -> None:
    worker_position.position({}, None, 0, [])


@pytest.fixture(params=[False, True], ids=["", "while the collector runs Python"])
def collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the collector at work at almost every object that is made, and Python code in it."""
    before = gc.get_threshold()
    if request.param:
        gc.callbacks.append(pauses)
        gc.set_threshold(5, 1_000_000, 1_000_000)
    yield
    if request.param:
        gc.callbacks.remove(pauses)
        gc.set_threshold(*before)


def pauses(*what: Any) -> None:
    """Other threads run meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0)


@pytest.mark.every(2)
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("look", [frames.of_all, of_main, names_of_main, position])
def test_what_a_look_sees_dies_where_and_when_it_would_have_without(look: Any) -> None:
    DIED.clear()
    with beside(look) as looks:
        called = 0
        while called < 50 or len(looks) < 50:
            has_one(10)
            called += 1
            assert len(DIED) == 11 * called, "none is left when its function has returned"
    assert set(DIED) == {threading.get_ident()}


@pytest.mark.parametrize("on", [True, False])
def test_collector_is_as_it_was_after_a_look(on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        seen = [frames.of(threading.get_ident()) != [], frames.of(1) == [], len(frames.of_all()) >= 0, gc.isenabled()]
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [True, True, True, on]


def test_frames_are_those_of_the_thread_and_its_names_are_read() -> None:
    seen: list[Any] = []

    def looking() -> None:
        its = of_main()
        inner = next(f for f in its if f.name == "inner")
        outer = its[inner.depth + 1]
        seen.extend([outer.name, outer.file == __file__, inner.get("number", "nothing"), outer.get("words")])

    def inner(number: int) -> None:
        thread = threading.Thread(target=looking)
        thread.start()
        thread.join()

    def outer() -> None:
        words = "one two"
        inner(len(words))

    outer()
    assert seen == ["outer", True, (7, None), ("one two",)]


def test_thread_that_has_moved_on_or_ended_gives_no_names() -> None:
    go, gone, known = threading.Event(), threading.Event(), []

    def at_work() -> None:
        number = 7
        known.append(number)
        go.wait()
        gone.wait()

    thread = threading.Thread(target=at_work)
    thread.start()

    def place() -> SeenFrame | None:
        return next((f for f in frames.of(thread.ident or 0) if f.name == "at_work" and known), None)

    def line_after(line: int) -> SeenFrame:
        while (found := place()) is None or found.line <= line:
            time.sleep(0.001)
        return found

    first = line_after(at_work.__code__.co_firstlineno + 2)
    assert first.get("number") == (7,)
    go.set()
    second = line_after(first.line)
    with pytest.raises(frames.Moved):
        first.get("number")
    gone.set()
    thread.join()
    with pytest.raises(frames.Moved):
        second.get("number")
    assert frames.of(thread.ident or 0) == []


def test_own_frames_and_a_joined_thread_are_read_too() -> None:
    number = 3
    (here, *_) = frames.outwards(sys._getframe())
    assert (here.name, here.get("number", "nothing")) == (sys._getframe().f_code.co_name, (number, None))
    seen: list[int] = []

    def looking() -> None:
        me, until = threading.get_ident(), time.monotonic() + 30
        while me not in seen and time.monotonic() < until:  # the main thread comes to its join
            seen.append(threads.speaker({**frames.of_all(), me: frames.of(me)}))

    thread = threading.Thread(target=looking)
    thread.start()
    thread.join()
    assert seen[-1] == thread.ident


def test_what_pip_has_installed_anywhere_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --target` puts packages beside what may be the user's own modules."""
    (tmp_path / "made-1.0.dist-info").mkdir()
    record = "made/__init__.py,,\nmade/sub/a.py,,\nsingle.py,,\n../bin/made,,\nmade-1.0.dist-info/RECORD,,\n"
    (tmp_path / "made-1.0.dist-info" / "RECORD").write_text(record)
    (tmp_path / "closed-1.0.dist-info" / "RECORD").mkdir(parents=True)  # stands for one that may not be read
    (tmp_path / "old-1.0.dist-info").mkdir()
    (tmp_path / "old-1.0.dist-info" / "RECORD").write_bytes(b"caf\xe9.py,,\n")
    installed = frames._installed(str(tmp_path))
    files = ["made/sub/a.py", "single.py", "made_by_me/a.py", "train.py", "singles.py"]
    assert [str(tmp_path / f).startswith(tuple(installed)) for f in files] == [True, True, False, False, False]
    monkeypatch.syspath_prepend(str(tmp_path))
    frames._elsewhere.cache_clear()
    tops = [frames.package(str(tmp_path / f)) for f in [*files, "lib/python3/site-packages/other/a.py"]]
    frames._elsewhere.cache_clear()
    assert tops == ["made", "single", "", "", "", "other"]
    assert frames.is_user(f"{frames.ROOT}-course/train.py", {}), "a folder whose name begins like the package's"


HANGS = """
import nbddp, ipykernel, tornado, zmq
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
with WorkerPool(nproc=2) as pool:
    try:
        pool.run_cell(
            "import torch.distributed as dist; dist.init_process_group('gloo')\\n"
            "if dist.get_rank() == 0: dist.barrier()", screen=NullScreen(), hang_after=0.5, timeout=20)
    except nbddp.RunFailed as e:
        print(ipykernel.__file__, type(e).__name__, e, sep="|")
"""


def test_a_deadlock_is_named_wherever_the_machinery_is_installed(tmp_path: Path) -> None:
    """Its threads had frames of files in a folder on PYTHONPATH, and were taken for the program's."""
    for module in (ipykernel, tornado, zmq):
        folder = Path(str(module.__file__)).parent
        (tmp_path / folder.name).symlink_to(folder)
    path = os.pathsep.join([str(tmp_path), str(Path(frames.ROOT).parent)])
    ran = subprocess.run([sys.executable, "-c", HANGS], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                         text=True, timeout=90)  # fmt: skip
    place, kind, words = ran.stdout.strip().split("|")
    assert place.startswith(str(tmp_path))
    assert kind == "RunHung"
    assert "rank 1 has finished the cell without calling it" in words
