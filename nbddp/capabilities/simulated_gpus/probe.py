"""Whether a build of torch can simulate GPUs: tried in a child process once per build, and remembered.

A wrong slot in a C++ table ends a process, and nobody can catch that. So a child tries first.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import nbddp
from nbddp.agent import stop
from nbddp.agent.runtime_dir import cache
from nbddp.compat.extra.versions import versions
from nbddp.errors import AgentFailed
from nbddp.execution.report import signal_name

KNOWN = ("2.6", "2.10", "2.11", "2.13", "2.14", "2.15")  # torch's versions with which the tests have run
SECONDS = 300  # for the child: a first import of torch from a slow disk
FITS = "simulated GPUs fit"
HEARD = 0.1  # seconds in which Stop ends a trial
# ends that tell of the build and not of the moment: a machine without memory may do well tomorrow
CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)}
UNFIT = "machine.Unfit: "  # how the last line begins of a trial that has found another layout, after its package
CHILD = "from nbddp.capabilities.simulated_gpus.on_rank.trial import try_all; try_all()"


def unusable(folder: Path | None = None) -> str | None:
    """Why this interpreter's torch cannot simulate GPUs, as one sentence, or None if it can.

    `folder` keeps the answers (default: `simulated_gpus` in the user's cache folder). The first call for a build of
    torch takes some seconds, the others a millisecond. Nothing in this process is changed. A trial that failed for
    another reason than the build is made again. Raises KeyboardInterrupt, and nothing is kept, if Stop is pressed.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    root = Path(torch.origin).parent
    kept = _kept(folder, root)
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))["unusable"] if kept else None
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        found, lasts = _try()
        if lasts:
            _keep(kept, found)
    return found or None


def _try() -> tuple[str, bool]:
    """Why it cannot, or empty; and whether that is so of the build."""
    code, out, err = _run_child()
    if code is None:
        return _sentence(f"a trial did not finish within {SECONDS} s"), False
    if code == 0 and FITS in out:
        return "", True
    if code < 0:
        return _sentence(f"a trial was killed by {signal_name(code)}"), code in CRASHES
    last = (err.strip().splitlines() or [f"exit code {code}"])[-1]
    return _sentence(f"a trial failed with {last}"), UNFIT in last


def _run_child() -> tuple[int | None, str, str]:
    """Exit status of a trial, None if it was ended since it took too long, and what it has printed. It has a session of
    its own, so that Stop is heard here and not there."""
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(nbddp.__file__).parents[1]), *path])}
    end = time.monotonic() + SECONDS
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    ) as child:  # fmt: skip
        try:
            while time.monotonic() < end:
                stop.check()
                with suppress(subprocess.TimeoutExpired):
                    out, err = child.communicate(timeout=HEARD)
                    return child.returncode, out, err
            return None, "", ""
        finally:
            if child.poll() is None:
                child.kill()


def _sentence(what: str) -> str:
    version = versions().get("torch", "of unknown version")
    return f"torch {version} cannot simulate GPUs here ({what}); it is known to work with {', '.join(KNOWN)}"


def _kept(folder: Path | None, root: Path) -> Path | None:
    """The file with the answer for this build of torch, this Python and this nbddp. None: nothing can be kept."""
    try:
        place = folder or cache() / "simulated_gpus"
        place.mkdir(mode=0o700, exist_ok=True)
    except (OSError, AgentFailed):
        return None
    digest = hashlib.sha256(f"{sys.version} {sys.executable} {root}".encode())
    engine = sorted(Path(__file__).parent.glob("on_rank/*.py"))
    for path in [root / "version.py", *sorted((root / "lib").glob("lib*.*")), *engine]:
        with suppress(OSError):  # a link to nowhere
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return place / f"{digest.hexdigest()[:24]}.json"


def _keep(path: Path | None, found: str) -> None:
    """A reader sees the whole answer or none. If the disk is full, the next pool tries again."""
    if path is None:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        new.write_text(json.dumps({"unusable": found}), encoding="utf-8")
        new.replace(path)
