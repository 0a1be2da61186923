"""`nbddp.Pool` as a program uses it: its examples run, and what it returns is a figure, text and data."""

from __future__ import annotations

import gzip
import inspect
import json
import math
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
from nbddp.capabilities.hosts.public import CheckupResult
from nbddp.capabilities.hosts.report import HostsReport
from nbddp.capabilities.prove.proof import Proof
from nbddp.capabilities.prove.public import ProofResult
from nbddp.capabilities.sanitizer.findings import Finding, SanitizerFindings
from nbddp.capabilities.sanitizer.public import FindingsResult
from nbddp.capabilities.sanitizer.recording import Place
from nbddp.capabilities.trace.public import TraceResult
from nbddp.errors import warn_deprecated
from nbddp.figures.result import Result
from tests.unit.test_checkup import one

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


THINGS = {
    **{f"nbddp.{name}": getattr(nbddp, name) for name in nbddp.__all__},
    **{f"nbddp.export.{name}": value for name, value in vars(nbddp.export).items() if name in nbddp.export.__all__},
    **{f"nbddp.teach.{name}": getattr(nbddp.teach, name) for name in nbddp.teach.__all__},
    "nbddp.teach.check.on": nbddp.teach.check.on,
    **{
        f"{kind.__name__}.{name}": getattr(kind, name)
        for kind in (nbddp.RankValues, nbddp.Panel, nbddp.Slurm, Result, TraceResult)
        for name in dir(kind) if not name.startswith("_") and inspect.isfunction(getattr(kind, name))
    },
}  # fmt: skip
COMPILED = {  # a shell of IPython, hosts, Slurm, or another pool
    "nbddp.load_ipython_extension", "nbddp.AgentFailed", "nbddp.CellSyntaxError", "nbddp.CommandStopped",
    "nbddp.SlurmRefused", "nbddp.Pool", "nbddp.teach.grade",
}  # fmt: skip
CONSTANTS = {"nbddp.export.C10D", "nbddp.export.SRUN", "nbddp.export.STATIC"}  # the module describes them


@pytest.mark.parametrize("name", sorted({*THINGS} - CONSTANTS))
def test_the_example_of_a_name_runs(pool: nbddp.Pool, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A name has an example, which uses it."""
    text = example_of(THINGS[name])
    assert name.rpartition(".")[2] in text
    code = compile(text, f"<example of {name}>", "exec")
    monkeypatch.chdir(tmp_path)
    if name.endswith(".to_frame"):
        pytest.importorskip("pandas")
    if name not in COMPILED:
        exec(code, {"nbddp": nbddp, "pool": pool})


@pytest.mark.parametrize("name", ["nbddp.Panel", "nbddp.Slurm", "nbddp.export.Job", "nbddp.export.Launch", *(
    name for name in THINGS if inspect.isfunction(THINGS[name])
)])  # fmt: skip
def test_a_name_says_what_it_takes(name: str) -> None:
    words = THINGS[name].__doc__ or ""
    taken = [each for each in inspect.signature(THINGS[name]).parameters if each != "self"]
    assert [each for each in taken if not re.search(rf"\b{each}\b", words)] == []


ITEM = r"\b`?{}`?(?:(?:,| and) `?\w+`?)* \((?!default)([^)]*)\)"  # `name (type)`, or `one, other (type)`
METHODS = {f"Pool.{name}": getattr(nbddp.Pool, name) for name in dir(nbddp.Pool) if not name.startswith("_")}
OF_RUN_CELL = {"check", "logs", "memory", "sanitize", "timings", "trace"}  # `call` refers to it


def undescribed(name: str, thing: Any) -> list[str]:
    """Arguments without type, with a default that is not described, or with one that has an address."""
    text = re.sub(r"\n *Example:\n\n(?:(?: {4,}.*)?\n)+", "\n", inspect.cleandoc(thing.__doc__ or ""))
    found = []
    for each in inspect.signature(thing).parameters.values():
        if each.name in {"self", "pool"} and name not in {"nbddp.Panel", "nbddp.teach.check.on"}:
            continue
        described = re.search(ITEM.format(each.name), text)
        if described is None:
            if not (name == "Pool.call" and each.name in OF_RUN_CELL):
                found.append(f"{each.name} has no type")
            continue
        rest = re.split(r"\n- |\n\n", text[described.start() :])[0]
        if each.default is not each.empty and not re.search(r"\b[Dd]efaults?\b|as for `call`", rest):
            found.append(f"{each.name} has no default")
        if " at 0x" in str(each.default):
            found.append(f"{each.name} shows an address")
    return found


def test_each_argument_has_type_and_default() -> None:
    said = {**METHODS, **{name: thing for name, thing in THINGS.items() if name not in CONSTANTS}}
    own = {"nbddp.load_ipython_extension", "nbddp.NotSent", "nbddp.Panel", "nbddp.Pool", "nbddp.Slurm"}
    own |= {name for name in said if name.startswith(("nbddp.export.", "nbddp.teach.check."))}
    asked = {name: thing for name, thing in said.items() if name in own or inspect.isfunction(thing)}
    assert len(asked) > 40
    assert {name: why for name, thing in asked.items() if (why := undescribed(name, thing))} == {}


@pytest.mark.parametrize("name", names())
def test_a_method_says_what_it_takes_and_raises(name: str) -> None:
    words = getattr(nbddp.Pool, name).__doc__
    code = getattr(nbddp.Pool, name).__code__
    taken = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    assert [each for each in taken if not re.search(rf"\b{each}\b", words)] == []
    assert "Raises" in words or not taken or name == "checkup"


def results(pool: nbddp.Pool) -> dict[str, Result[Any]]:
    setup = "import torch, os; rank = int(os.environ['RANK']); model = torch.nn.Linear(4, 2)"
    pool.run_cell(setup, memory=True, trace=True, sanitize=True)
    pool.call(train, trace=True)
    asked: dict[str, Callable[[], Result[Any]]] = {
        "timings": pool.timings, "memory": pool.memory, "topology": pool.topology, "status": pool.status,
        "bench": lambda: pool.bench(sizes=[1024, 65536], repeat=2), "compare": lambda: pool.compare("rank"),
        "forecast": lambda: pool.forecast(inter_node="25GB/s", nodes=2), "collectives": pool.collectives,
        "trace": pool.trace, "sizes": lambda: pool.sizes("model"),
        "allocations": lambda: pool.allocations(whole=True), "findings": pool.findings,
        "prove": lambda: ProofResult(PROOF), "checkup": lambda: CheckupResult(HOSTS),
    }  # fmt: skip
    return {name: ask() for name, ask in asked.items()}


PROOF = Proof("differs", "differs: by a lot", "step", 2, 16, "float64", math.inf, 1e-9, "net.weight", 0.5, 0.25)
HOSTS = HostsReport({"nodea": one(limits={"nofile": [1024, 1 << 20]})})
WITH_FIGURE = {"timings", "memory", "topology", "bench", "forecast", "collectives", "trace", "allocations"}
OWN_NOTES = {"collectives", "findings"}  # which say what was not measured


def test_what_a_method_finds_is_figure_text_and_data(pool: nbddp.Pool, monkeypatch: Any, tmp_path: Path) -> None:
    """Each field of the data is documented, and the data can be written as JSON."""
    frames: list[list[dict[str, Any]]] = []
    frame = types.SimpleNamespace(attrs={})
    pandas = types.SimpleNamespace(DataFrame=lambda rows, columns: frames.append(rows) or frame)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    for name, found in results(pool).items():
        data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert data.pop("simulated_gpus") is False
        assert data.pop("notes") == [] or name in OWN_NOTES
        assert found.to_frame() is frame
        row = frames[-1][0] if frames[-1] else type(found)._columns
        fields = {*data, *row} - {"simulated_gpus"}
        words = type(found).__doc__ or ""
        assert [each for each in fields if f"`{each}`" not in words] == [], name
        bundle, _ = found._repr_mimebundle_()
        assert bundle["text/plain"] == str(found) == repr(found)
        assert found._repr_html_() == bundle["text/html"]
        assert ("image/png" in bundle) == (name in WITH_FIGURE), name
        if "image/png" in bundle:
            found.save(str(tmp_path / "figure.png"))
            assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"
        else:
            with pytest.raises(TypeError, match=rf"^{type(found).__name__} has no figure; write str"):
                found.save(str(tmp_path / "figure.png"))


def test_results_are_those_of_the_run(pool: nbddp.Pool, tmp_path: Path) -> None:
    """Each number that the program determines is in the data."""
    found = results(pool)
    collectives = found["collectives"].to_dict()
    assert [row["rank"] for row in collectives["ranks"]] == [0, 1]
    for row in collectives["ranks"]:
        parts = [row[f"{part}_s"] for part in ("compute", "exposed", "copies", "idle")]
        assert row["program_s"] == pytest.approx(sum(parts))
    sums = {kind["collective"]: kind["calls"] for kind in collectives["collectives"]}
    assert sums["all_reduce"] == 6, "one bucket in each of 6 steps"
    assert {row["total_bytes"] for row in found["sizes"].to_dict()["sizes"]} == {(4 * 2 + 2) * 4}
    assert len(found["findings"]) == 0
    assert not found["findings"]
    allocated = found["allocations"].to_dict()
    assert [row["rank"] for row in allocated["ranks"]] == [0, 1]
    assert all(row["peak_bytes"] == max(held for _, held in row["curve"]) for row in allocated["ranks"])
    trace = found["trace"]
    assert isinstance(trace, TraceResult)
    trace.write(str(tmp_path / "trace.json.gz"))
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert events == trace.to_dict()["events"]
    assert sum(event["ph"] == "X" for event in events) == trace.to_dict()["spans"] > 0


def test_a_verdict_is_plain_data() -> None:
    proof = ProofResult(PROOF)
    assert (proof.proven, proof.verdict, proof.to_dict()["largest"]) == (False, "differs", None), "infinity is no JSON"
    (row,) = CheckupResult(HOSTS).to_dict()["hosts"]
    assert (row["host"], row["open_files"], row["not_reached_by"]) == ("nodea", 1024, [])
    assert "allows 1024 (ulimit -n)" in CheckupResult(HOSTS).to_dict()["findings"][0]


def test_findings_are_counted_and_told() -> None:
    place = Place("train.py", 9, "step", "loss.backward()")
    mistake = Finding("past-ddp", "what", ("seen on rank 1",), "it matters", place, ranks=(1,), weight=70)
    some = SanitizerFindings((mistake,), (), 2, 3, ("not all was recorded",))
    found = FindingsResult(some, notes=("not all was recorded", "simulated"))
    assert (len(found), bool(found)) == (1, True)
    (row,) = found.to_dict()["findings"]
    assert (row["kind"], row["degree"], row["ranks"]) == ("past-ddp", "wrong", [1])
    assert (row["file"], row["line"]) == ("train.py", 9)
    assert str(found).splitlines()[-2:] == ["not all was recorded", "simulated"]
    assert (str(found).count("not all"), found._repr_html_().count("not all")) == (1, 1), "a note is told once"
    with pytest.warns(DeprecationWarning, match="FindingsResult as a sequence is deprecated"):
        assert [each.kind for each in found] == ["past-ddp"]  # type: ignore[attr-defined]


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


def test_each_result_makes_a_frame(pool: nbddp.Pool) -> None:
    pandas = pytest.importorskip("pandas")
    for name, found in results(pool).items():
        frame = found.to_frame()
        assert isinstance(frame, pandas.DataFrame), name
        assert len(frame) == len(found._rows()) > 0 or name == "findings"
        assert not frame["simulated_gpus"].any()
        assert frame.attrs["notes"] == list(found.notes)


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
