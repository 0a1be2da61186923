"""What users may rely on is what Tab offers, and nothing else."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp import errors, teach
from nbddp.launch.options import START, options_of
from tests import places

ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
NAMES = {"NotSent", "Panel", "Pool", "RankValues", "Slurm", "export", "load_ipython_extension", "teach"}
OF_POOL = {
    "allocations", "attach", "bench", "call", "checkup", "collectives", "compare", "findings", "forecast", "memory",
    "prove", "pull", "push", "restart", "run", "run_cell", "run_script", "running", "scale", "sizes", "start",
    "status", "stop", "sync", "timings", "topology", "trace", "world_size",
}  # fmt: skip


def offered(of: object) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_tab_offers_the_public_names_alone() -> None:
    assert offered(nbddp) == NAMES | ERRORS
    assert offered(teach) == {"check", "explore", "grade", "predict"}
    assert offered(nbddp.Pool) == offered(nbddp.Pool()) == OF_POOL
    assert offered(nbddp.Panel) == offered(nbddp.Panel()) == {"close", "pool"}
    assert offered(nbddp.Slurm) == {field.name for field in dataclasses.fields(nbddp.Slurm)}
    assert offered(nbddp.RankValues) == {"by_rank", "count", "index", "ranks"}
    assert "__version__" in dir(nbddp)


def test_every_name_that_tab_offers_is_there_and_says_what_it_is() -> None:
    for of in (nbddp, teach, nbddp.export, nbddp.Pool, nbddp.RankValues, nbddp.Panel):
        for name in offered(of):
            assert getattr(getattr(of, name), "__doc__", None), f"{of}.{name}"


def test_a_panel_has_the_public_pool() -> None:
    pool = nbddp.Pool(nproc=2)
    assert nbddp.Panel(pool).pool is pool
    panel = nbddp.Panel()
    assert type(panel.pool) is nbddp.Pool
    assert str(panel).startswith("no workers are running")
    with pytest.warns(DeprecationWarning, match="nbddp.Panel.state is deprecated, and nbddp 0.3 will not have it"):
        assert panel.state.ranks == ()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"nbddp.Panel has no 'nothing'"):
        panel.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_no_method_takes_what_a_program_cannot_make() -> None:
    """An argument's type is Python's own, or a public name."""
    known = {"LogOptions", "Sanitize"}  # a str or a bool does as well
    for name in OF_POOL - {"running", "world_size"}:
        for each in [*inspect.signature(getattr(nbddp.Pool, name)).parameters.values()][1:]:
            words = set(re.findall(r"[A-Z]\w+", str(each.annotation)))
            assert words <= {"None", "Sequence", "Mapping", "Callable", "Any", "P", "T"} | known, f"{name}: {each}"


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


PROGRAM = places.ROOT / "tests" / "data" / "user_program.py"


def test_the_users_program_has_every_public_name() -> None:
    """So a type checker has seen each of them."""
    used = {n.attr for n in ast.walk(ast.parse(PROGRAM.read_text())) if isinstance(n, ast.Attribute)}
    names = {*nbddp.__all__, *nbddp.export.__all__, *offered(nbddp.Pool), *offered(nbddp.RankValues)}
    assert (names | offered(nbddp.Panel)) - used == {"export", "teach"}, "modules are imported"


@pytest.mark.more  # `python -m mypy` checks the same
@pytest.mark.parametrize("checker", ["mypy --config-file pyproject.toml --cache-dir cache", "pyright"])
def test_a_type_checker_knows_what_a_program_gets(checker: str, tmp_path: Path) -> None:
    """It refuses the lines that are marked as wrong, and no other."""
    name, *options = checker.split()
    found = shutil.which(name)
    if importlib.util.find_spec(name) is None and found is None:
        pytest.skip(f"{name} is not installed")
    start = [found] if importlib.util.find_spec(name) is None and found else [sys.executable, "-m", name]
    shutil.copy(places.ROOT / "pyproject.toml", tmp_path)  # which has mypy leave torch alone
    (tmp_path / PROGRAM.name).write_text(re.sub(r"# type: ignore\S+", "", PROGRAM.read_text()))
    command = [*start, *options, PROGRAM.name]
    env = {**os.environ, "MYPYPATH": str(places.ROOT), "PYTHONPATH": str(places.ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    refused = {int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+)?(?: -|:) error:? ", ran.stdout)}
    wrong = {n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if "# wrong" in line}
    assert refused == wrong, ran.stdout + ran.stderr


def test_the_types_are_shipped() -> None:
    assert (places.ROOT / "nbddp" / "py.typed").exists()
    assert "Typing :: Typed" in (places.ROOT / "pyproject.toml").read_text()


CLIENTS = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "smtplib", "ftplib"}


def test_no_module_can_send_anything_to_a_site() -> None:
    """As the FAQ promises: connections are those of the pool."""
    for path in sorted((places.ROOT / "nbddp").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not any(name.split(".")[0] in source for name in CLIENTS):
            continue
        tree = ast.parse(source)
        imports = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        imports |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not imports & CLIENTS, path
