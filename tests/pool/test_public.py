"""`nbddp.Pool` as a program uses it: its examples run, and what it returns is a figure, text and data."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import nbddp
from nbddp.output.result import Result
from nbddp.protocol.deprecation import warn_deprecated

SETUP = """
import torch
def step(model, x, y):
    model.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
x, y = torch.randn(8, 4), torch.randn(8, 2)
"""
ELSEWHERE = {"attach", "scale", "sync"}  # Slurm, and more nodes than one
SLOW = {"prove", "restart", "run_script", "stop"}  # new processes
OWN_PAGE = {"running", "world_size"}  # an attribute needs no example


def train() -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def pool() -> Iterator[nbddp.Pool]:
    with nbddp.Pool(nproc=2) as made:
        made.run(train)
        yield made


def names() -> list[Any]:
    found = [name for name in dir(nbddp.Pool) if not name.startswith("_") and name not in OWN_PAGE]
    return [pytest.param(name, marks=[pytest.mark.more] * (name in SLOW)) for name in found]


def example_of(thing: object) -> str:
    """What stands below `Example:` in a docstring."""
    found = re.search(r"\n( *)Example:\n\n((?:\1 +.*\n?|\n)+)", thing.__doc__ or "")
    return textwrap.dedent(found[2]) if found else ""


@pytest.mark.parametrize("name", names())
def test_the_example_of_a_method_runs(pool: nbddp.Pool, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    code = compile(example_of(getattr(nbddp.Pool, name)), f"<example of {name}>", "exec")
    assert f"pool.{name}(" in example_of(getattr(nbddp.Pool, name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; assert sys.argv[1:] == ['--epochs', '1']")
    if name not in ELSEWHERE:
        exec(code, {"nbddp": nbddp, "pool": pool, "train": train, "SETUP": SETUP})


@pytest.mark.parametrize("thing", ["Panel", "Pool", "RankValues", "Slurm"])
def test_the_example_of_a_class_can_be_run(pool: nbddp.Pool, thing: str) -> None:
    code = compile(example_of(getattr(nbddp, thing)), thing, "exec")
    if thing != "Pool":  # which would start another one
        exec(code, {"nbddp": nbddp, "pool": pool})


@pytest.mark.parametrize("name", names())
def test_a_method_says_what_it_takes_and_raises(name: str) -> None:
    words = getattr(nbddp.Pool, name).__doc__
    code = getattr(nbddp.Pool, name).__code__
    taken = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    assert [each for each in taken if not re.search(rf"\b{each}\b", words)] == []
    assert "Raises" in words or not taken or name == "checkup"


def results(pool: nbddp.Pool) -> dict[str, Result[Any]]:
    pool.run_cell("import torch, os; rank = int(os.environ['RANK']); model = torch.nn.Linear(4, 2)")
    asked: dict[str, Callable[[], Result[Any]]] = {
        "timings": pool.timings, "memory": pool.memory, "topology": pool.topology, "status": pool.status,
        "bench": lambda: pool.bench(sizes=[1024, 65536], repeat=2), "compare": lambda: pool.compare("rank"),
        "forecast": lambda: pool.forecast(inter_node="25GB/s", nodes=2),
    }  # fmt: skip
    return {name: ask() for name, ask in asked.items()}


def test_what_a_method_finds_is_figure_text_and_data(pool: nbddp.Pool, monkeypatch: Any, tmp_path: Path) -> None:
    """Each field of the data is documented, and the data can be written as JSON."""
    frames: list[list[dict[str, Any]]] = []
    frame = types.SimpleNamespace(attrs={})
    pandas = types.SimpleNamespace(DataFrame=lambda rows, columns: frames.append(rows) or frame)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    for name, found in results(pool).items():
        data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert data.pop("simulated_gpus") is False
        assert data.pop("notes") == []
        assert found.to_frame() is frame
        fields = {*data, *frames[-1][0]} - {"simulated_gpus"}
        words = type(found).__doc__ or ""
        assert [each for each in fields if f"`{each}`" not in words] == [], name
        bundle, _ = found._repr_mimebundle_()
        assert bundle["text/plain"] == str(found) == repr(found)
        assert found._repr_html_() == bundle["text/html"]
        assert ("image/png" in bundle) == (name not in ("compare", "status")), name
        if "image/png" in bundle:
            found.save(str(tmp_path / "figure.png"))
            assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"


def test_simulated_gpus_are_marked_in_data_text_and_figure(pool: nbddp.Pool) -> None:
    note = "Simulated GPUs: so it is."
    heights = []
    for found in (pool.timings(), pool.status()):  # a figure and a table
        marked = replace(found, simulated_gpus=True, notes=(note,))
        data = marked.to_dict()
        assert (data["simulated_gpus"], data["notes"]) == (True, [note])
        assert note in str(marked)
        assert note in marked._repr_html_()
        heights += [
            Image.open(BytesIO(each._drawn.png())).height for each in (found, marked) if hasattr(each._drawn, "png")
        ]
    assert heights[0] < heights[1], "the figure has the line too"


def test_without_pandas_the_error_says_what_to_type(pool: nbddp.Pool, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_frame\(\) needs pandas .*; pip install pandas, or use to_dict\(\)"):
        pool.status().to_frame()


def test_the_old_way_of_use_works_for_one_release_and_warns(pool: nbddp.Pool) -> None:
    with pytest.warns(
        DeprecationWarning, match=r"TimingsResult.model is deprecated, and nbddp 0.3 .*; use to_dict"
    ) as told:
        assert pool.timings().model == "Linear"
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"StatusResult\['info'\] is deprecated"):
        assert pool.status()["info"]
    with pytest.warns(DeprecationWarning, match="nbddp.Pool.last_run is deprecated, and nbddp 0.3 will not have it"):
        assert pool.last_run is not None
    with pytest.raises(AttributeError, match=r"nbddp.Pool has no 'nothing'; help\(nbddp.Pool\) lists what it has"):
        getattr(pool, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match="StatusResult has no 'nothing'"):
        getattr(pool.status(), "nothing")  # noqa: B009


def test_a_deprecation_names_what_goes_when_and_what_to_write() -> None:
    def old() -> None:
        warn_deprecated("nbddp.old", "use nbddp.new", "0.9")

    with pytest.warns(
        DeprecationWarning, match=r"^nbddp.old is deprecated, and nbddp 0.9 will not have it; use nbddp.new$"
    ):
        old()
