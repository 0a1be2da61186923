"""Which versions a machine has, without importing any of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

from nbddp import __version__

DRIVERS_OWN = Path("/proc/driver/nvidia/version")
OF_DRIVER = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")
OF_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([^']+)'", re.MULTILINE)
CUDA, DRIVER = "CUDA of torch", "NVIDIA driver"
OF_GPUS = (CUDA, DRIVER)  # the notebook's machine need not have them
NONE = "none"
Versions = Mapping[str, str]  # name → version


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


# -- which of them differ between machines ---------------------------------------------------------


def otherwise(theirs: Versions, ours: Versions) -> dict[str, str]:
    """Of what matters between a host and the notebook's machine: name → what the host has, where that is another."""
    return {
        name: theirs.get(name, NONE) for name, here in ours.items() if name not in OF_GPUS and theirs.get(name) != here
    }


def differing(hosts: Mapping[str, Versions], names: tuple[str, ...] = OF_GPUS) -> list[str]:
    """What differs between hosts, a line each: `NVIDIA driver: 550.54 on nodea, none on nodeb`."""
    lines = []
    for name in names:
        groups: dict[str, list[str]] = {}
        for host, found in hosts.items():
            groups.setdefault(found.get(name, NONE), []).append(host)
        if len(groups) > 1:
            said = "; ".join(f"{version} on {', '.join(which)}" for version, which in groups.items())
            lines.append(f"the hosts differ in {name}: {said}")
    return lines
