"""What users may rely on is what Tab offers, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import nbddp
from nbddp import errors, teach

ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
NAMES = {"NotSent", "Panel", "Pool", "RankValues", "Slurm", "export", "load_ipython_extension", "teach"}
OF_POOL = {
    "allocations", "attach", "bench", "call", "checkup", "collectives", "compare", "findings", "forecast", "memory",
    "prove", "pull", "push", "restart", "run", "run_cell", "run_script", "running", "scale", "sizes", "start", "stop",
    "sync", "timings", "trace", "world_size",
}  # fmt: skip


def offered(of: object) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_tab_offers_the_public_names_alone() -> None:
    assert offered(nbddp) == NAMES | ERRORS
    assert offered(teach) == {"check", "explore", "grade", "predict"}
    assert offered(nbddp.Pool) == offered(nbddp.Pool()) == OF_POOL
    assert "__version__" in dir(nbddp)


def test_every_name_that_tab_offers_is_there_and_says_what_it_is() -> None:
    for of in (nbddp, teach, nbddp.export, nbddp.Pool, nbddp.RankValues):
        for name in offered(of):
            assert getattr(getattr(of, name), "__doc__", None), f"{of}.{name}"


def test_tab_and_its_names_import_nothing_heavy() -> None:
    code = (
        "import sys, nbddp\ndir(nbddp), nbddp.teach, dir(nbddp.teach), nbddp.Pool\ndir(nbddp.Pool())\n"
        "print({'torch', 'IPython', 'matplotlib', 'ipywidgets', 'pandas', 'numpy'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, stdout=-1, text=True).stdout == "set()\n"
