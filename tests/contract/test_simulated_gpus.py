"""Programs for GPUs on simulated ones: digits of the CPU's program, hardware's words, and a torch that does not fit.

A child process runs all cases of one kind, since an import of torch is what takes long.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nbddp.agent import stop
from nbddp.capabilities.simulated_gpus import probe
from tests.places import ROOT
from tests.ports import held_port

HERE = Path(__file__).parent / "gpu_programs"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
NO_OTHER = "tests.contract.gpu_programs."


def names(file: str, prefix: str) -> list[str]:
    """Of a file's functions, without an import of torch."""
    tree = ast.parse((HERE / file).read_text())
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix(prefix) for name in found if name.startswith(prefix)]


def begin(module: str, *args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", NO_OTHER + module, *args]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**ENV, **env}, cwd=ROOT, **pipes)


def answer(child: subprocess.Popen[str], word: str) -> Any:
    out, errors = child.communicate(timeout=150)
    lines = [line for line in out.splitlines() if line.startswith(word)]
    assert lines, f"exit code {child.returncode}\n{out[-2000:]}\n{errors[-3000:]}"
    return json.loads(lines[-1].removeprefix(word))


@functools.cache
def said() -> Any:
    return answer(begin("cases"), "RAISED")


@functools.cache
def returned(kind: str) -> list[Any]:
    """What each of two ranks has returned."""
    with held_port() as port:
        around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [begin("ranks", kind, RANK=str(n), LOCAL_RANK=str(n), **around) for n in range(2)]
        return [answer(rank, "RETURNED") for rank in ranks]


@pytest.mark.parametrize("name", names("cases.py", "case_"))
def test_a_program_for_a_gpu(name: str) -> None:
    assert said()["cases"][name] == ""


def test_a_hundred_wrong_programs_get_hardwares_words() -> None:
    found = said()["wrong"]
    assert len(found) >= 100
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.more
@pytest.mark.parametrize("name", names("ranks.py", "program_") + names("idioms.py", "program_"))
def test_two_ranks_return_what_they_return_on_the_cpu(name: str) -> None:
    on_cpu, on_gpus = returned("cpu"), returned("cuda")
    assert name in on_cpu[0]
    assert [one[name] for one in on_gpus] == [one[name] for one in on_cpu]


@pytest.mark.more
def test_processes_of_a_program_have_gpus_and_share_them() -> None:
    found = answer(begin("spawned"), "FOUND")
    assert found["sent"] == [
        ["Parameter", "cuda:0", [1.0], True], ["Parameter", "cuda:1", [1.0], True],
        ["Tensor", "cuda:0", [0.0, 0.0], False], ["Tensor", "cuda:1", [1.0, 1.0], False],
    ]  # fmt: skip
    assert found["loaded"] == [["cuda:1", 0.0], ["cuda:1", 1.0]]
    assert (found["shared"], found["there"], found["here"]) == (True, ["cuda:0", 0], [1.0, 1.0, 1.0])
    assert "of which 8.5" in found["full"]
    assert "has 6.10 GiB memory in use. Including non-PyTorch memory" in found["full"]
    assert found["later"] == 10 << 30


BREAKS = {  # what is changed before the child's trial → how it ends
    "a slot of the guard is the next one's": (
        "real = machine._virtual\n"
        "machine._virtual = lambda body: [n for n in real(body) if n != 'exchangeDevice']\n",
        "was killed by",
    ),
    "a slot of the hooks is missing": (
        "real = machine._virtual\n"
        "machine._virtual = lambda body: [n for n in real(body) if n != 'hasCUDA']\n",
        "the header has no function hasCUDA",
    ),
    "the keys are elsewhere": ("machine.IMPL = 32\n", "key_set_ was found at 0 places"),
    "the machine is unknown": ("machine.STREAM_CODE = {}\n", "is not known"),
}  # fmt: skip
CHANGED = """
from nbddp.capabilities.simulated_gpus.on_rank import machine
{}
from nbddp.capabilities.simulated_gpus.on_rank.trial import try_all
try_all()
"""


@pytest.mark.parametrize(
    "how", [next(iter(BREAKS)), *(pytest.param(how, marks=pytest.mark.more) for how in list(BREAKS)[1:])]
)
def test_a_torch_that_does_not_fit_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = BREAKS[how]
    monkeypatch.setattr(probe, "CHILD", CHANGED.format(change))
    why = probe.unusable(tmp_path)
    assert why is not None
    assert "cannot simulate GPUs here (a trial" in why
    assert words in why
    assert "it is known to work with 2.6" in why
    monkeypatch.setattr(probe, "CHILD", "raise SystemExit('never asked')")
    assert probe.unusable(tmp_path) == why  # it is remembered


def test_a_torch_that_fits_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory is overwritten here: torch's destructors, which run after Python's end, find what they call."""
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    assert probe.unusable(tmp_path) is None
    monkeypatch.setattr(probe, "CHILD", "raise SystemExit('never asked')")
    assert probe.unusable(tmp_path) is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_an_answer_cut_short_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CHILD", "import os; os.abort()")
    assert "SIGABRT" in (probe.unusable(tmp_path) or "")
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(probe, "CHILD", "raise SystemExit('the second')")
    for broken in ('{"unus', "[]", "null", '{"unusable": 1}'):
        path.write_text(broken)
        assert "the second" in (probe.unusable(tmp_path) or "")


PASSING = {"MemoryError": "raise MemoryError", "SIGKILL": "import os; os.kill(os.getpid(), 9)",
           "did not finish within": "import time; time.sleep(60)"}  # fmt: skip


@pytest.mark.parametrize("words", PASSING)
def test_what_may_be_otherwise_tomorrow_is_not_remembered(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CHILD", PASSING[words])
    monkeypatch.setattr(probe, "SECONDS", 0.5 if "time" in PASSING[words] else 60)
    assert words in (probe.unusable(tmp_path) or "")
    assert list(tmp_path.iterdir()) == []


def test_stop_ends_a_trial_and_says_nothing_of_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    child = f"import os, time; open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{os.getpgid(0)}}.'); time.sleep(60)"
    monkeypatch.setattr(probe, "CHILD", child)

    def press() -> None:
        while not (started.exists() and started.read_text().endswith(".")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt), stop.heard_at_checks():
        probe.unusable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["started"]
    pid, group = map(int, started.read_text()[:-1].split())
    assert group != os.getpgid(0)  # a front end interrupts the kernel's whole group
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
