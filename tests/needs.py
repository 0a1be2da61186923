"""What tests need besides Python packages, and which of it is missing: `python -m tests.needs`.

`--apt` prints the names of Debian's missing packages alone, for a script. Nothing but the standard library is needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec

SBIN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Need:
    """A program that tests run: any of `programs`, from Debian's `package`, for the tests of `what`. module: instead, a
    Python package that has it, which `package` of PyPI installs."""

    what: str
    programs: tuple[str, ...]
    package: str
    root: bool = False  # whether the tests also need root
    module: str = ""

    @property
    def found(self) -> bool:
        if self.module:
            return find_spec(self.module) is not None
        return any(shutil.which(program, path=SBIN) for program in self.programs)


BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
NEEDS = (
    Need("widgets and figures in a browser", BROWSERS, "chromium-headless-shell"),
    Need("the grader's sandbox", ("bwrap",), "bubblewrap"),
    Need("other hosts by ssh", ("sshd",), "openssh-server"),
    Need("agents that MPI starts", ("mpiexec",), "openmpi-bin"),
    Need("cables between hosts", ("ip",), "iproute2", root=True),
    Need("Slurm's nodes", ("slurmctld",), "slurmctld slurmd slurm-client munge", root=True),
    Need("accessibility by axe-core", ("axe-core",), "axe-playwright-python", module="axe_playwright_python"),
)


def missing() -> list[Need]:
    return [need for need in NEEDS if not need.found]


def describe() -> list[str]:
    """What is missing, a line each, and the command that installs it; one line if nothing is."""
    lost, root = missing(), not hasattr(os, "geteuid") or os.geteuid() == 0
    lines = [f"not tested here: {need.what} (no {need.programs[0]})" for need in lost]
    lines += [f"not tested here: {need.what} (needs root)" for need in NEEDS if need.root and need.found and not root]
    for install, of in (("apt-get install", False), ("pip install", True)):
        if some := [need.package for need in lost if bool(need.module) is of]:
            lines.append(f"to test all of it: {install} {' '.join(some)}")
    return lines or ["nothing that tests need is missing here"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.needs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--apt", action="store_true", help="print the missing Debian packages alone")
    if parser.parse_args().apt:
        print(" ".join(need.package for need in missing() if not need.module))
        return 0
    print("\n".join(describe()))
    return int(bool(missing()))


if __name__ == "__main__":
    sys.exit(main())
