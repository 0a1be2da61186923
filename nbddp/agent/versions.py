"""Which versions a machine has, without importing any of them."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

from nbddp import __version__
from nbddp.agent.version_diff import CUDA, DRIVER

DRIVERS_OWN = Path("/proc/driver/nvidia/version")
OF_DRIVER = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")
OF_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([^']+)'", re.MULTILINE)


def versions() -> dict[str, str]:
    """What has to be the same on all hosts, as it is here; what is not here has no entry."""
    found = {"nbddp": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "ipyparallel"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {name: what for name, what in ((CUDA, torchs_cuda()), (DRIVER, driver())) if what}


def torchs_cuda() -> str:
    """The CUDA that torch was built with, as its file says; empty if it was built without, or is not here."""
    spec = util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    return _found(OF_CUDA, Path(spec.origin).with_name("version.py"))


def driver(file: Path = DRIVERS_OWN) -> str:
    """The version of NVIDIA's driver; empty if there is none (or it is not Linux's)."""
    return _found(OF_DRIVER, file)


def _found(words: re.Pattern[str], file: Path) -> str:
    try:
        found = words.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""
