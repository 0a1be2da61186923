"""What users may rely on is what Tab offers, and nothing else."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import nbddp
from nbddp import errors, teach
from nbddp.launch.options import START, options_of

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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nprocs": 4}, "unexpected keyword argument 'nprocs'; did you mean nproc?"),
        ({"keep_warm": 60.0}, "it is an option of lines alone: --keep-warm"),
        ({"nproc": -1}, "'-1' is not a number of workers; use a positive number such as 2"),
        ({"nproc": 2.5}, "Pool(nproc=2.5): nproc is of type int or str, not float"),
        ({"nproc": True}, "nproc is of type int or str, not bool"),
        ({"nnodes": (3, 1)}, "'3:1' counts backwards; write it as 1:3"),
        ({"device": "gpu"}, "device is one of auto, cpu, cuda"),
        ({"env": "A=1"}, "env is of type Mapping[str, str], not str"),
        ({"keep_alive": "10m"}, "keep_alive is of type float, not str"),
        ({"slurm": "1:00:00"}, "slurm is of type Slurm or bool, not str"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_starts(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((nbddp.BadInput, TypeError), match=re.escape(said)):
        nbddp.Pool(**wrong)


def test_each_option_of_start_is_an_argument_with_a_type() -> None:
    given = inspect.signature(nbddp.Pool).parameters
    of_line = {o.name for o in options_of(START) if not o.into and o.name != "keep_warm"}
    assert {*given} == of_line
    assert all(each.annotation is not inspect.Parameter.empty for each in given.values())
    assert nbddp.Pool.__doc__ is not None
    assert [name for name in given if not re.search(rf"\b{name}\b", nbddp.Pool.__doc__)] == []
