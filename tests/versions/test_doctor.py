"""Every seam is tried, each can be taken away, and then its loss is told and cells run where that is promised."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.agent import server
from nbddp.agent.client import AgentClient
from nbddp.capabilities.doctor.examination import examine, findings, messages, versions
from nbddp.capabilities.doctor.findings import Findings
from nbddp.capabilities.doctor.seams import SEAMS, ProbeResult, Seam
from nbddp.compat import system, torch
from nbddp.errors import AgentFailed
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.pool.rpc import RankRpc
from nbddp.protocol.run_spec import Question
from tests import places
from tests.kernels import HAS_AUTORELOAD, Kernel
from tests.pool.faults import NO_RECORDER, RECORDS
from tests.unit.test_doctor import MACHINE, WORKING
from tests.versions import hidden

ROOT = places.ROOT
# of torch 2.8 to 2.10: the recorder is off unless it is told to record
NEWEST_DIFFERS = {"flight recorder", "flight recorder's keys"}

# what IPython 8 does not do, and what IPython 7 cannot on a newer Python, needs no seam
UNTRIED = {"history of errors", *(() if HAS_AUTORELOAD else ["files of autoreload"])}


@pytest.fixture(scope="module")
def here() -> Findings:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")  # ipykernel captures nothing under pytest
        return examine()


@pytest.fixture(scope="module")
def without() -> dict[str, ProbeResult]:
    """What comes of trying each seam where it has been taken away."""
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.versions.hidden"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {key: ProbeResult(present, works, why) for key, present, works, why in rows}


def test_every_seam_is_tried_here_and_works(here: Findings) -> None:
    assert here.ended == ""
    assert set(here.verdicts) == {seam.key for seam in SEAMS}
    assert {seam.key for seam, _ in here.broken()} <= NEWEST_DIFFERS
    assert here.verdicts["abort of groups"].works is None
    assert here.machine["cores"] >= 1


@pytest.mark.parametrize("seam", SEAMS, ids=lambda s: s.key)
def test_a_seam_that_is_taken_away_is_told_with_its_loss(without: dict[str, ProbeResult], seam: Seam) -> None:
    if seam.key == "flight recorder's keys" and not RECORDS:
        pytest.skip(NO_RECORDER)
    verdict = without[seam.key]
    if seam.key in UNTRIED:
        assert verdict.works is None
        return
    assert verdict.works is False
    assert verdict.why
    told = " ".join(str(Findings({}, {}, {**WORKING, seam.key: verdict})).split())
    assert f"{seam.library}: {seam.key}: {' '.join(verdict.why.split())}. Lost: {seam.without}" in told


def test_a_reducer_that_refuses_our_group_gets_its_own(without: dict[str, ProbeResult]) -> None:
    assert without["DDP's reducer"].why == "a step of DDP shows no bucket"  # and no TypeError


def test_what_no_cell_runs_without_is_named() -> None:
    class Client:
        ids = _engines = ()

    with pytest.raises(nbddp.NbddpError, match=r"ipyparallel lacks _io_loop, .*_mux_stream.*; install ipyparallel 9"):
        RankRpc(Client)


def test_workers_start_without_the_compiler_and_not_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, torch.COMPILER, None)
    assert server.import_all((torch.COMPILER,)) == ""
    assert server.import_all(("no_such_torch",)).startswith("no_such_torch: ")


@pytest.fixture(scope="module")
def spared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """A pool of two whose workers lack everything that can be spared, all at once."""
    folder = tmp_path_factory.mktemp("site")
    hidden.in_agents(folder, hidden.all_spared)
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for the agent alone, from which all workers come
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
            pool = stack.enter_context(WorkerPool(nproc=2))
            assert pool.ask(0, Question.of("seams"), timeout=10)
        yield pool


def run(pool: WorkerPool, code: str) -> list[Any]:
    return list(pool.run_cell(code, want_value=True, screen=NullScreen()))


@pytest.mark.more
def test_workers_without_them_say_so(spared: WorkerPool) -> None:
    missing = set(spared.ask(0, Question.of("seams"), timeout=10))
    assert missing >= {"flight recorder", "tables of groups", "default group", "store of env://", "end of backward"}
    assert "pool of 2: its workers lack " in str(examine(spared, ("-c", "")))


def told(pool: WorkerPool) -> list[str]:
    """What a pool's shortcomings are, when they are known."""
    end = time.monotonic() + 60
    while not pool.parts.of("doctor").done():
        assert time.monotonic() < end
        time.sleep(0.05)
    return [line for line in pool.shortcomings() if line != system.lost()]


def test_what_does_not_work_is_told_of_a_pool_that_has_warmed_up(spared: WorkerPool) -> None:
    (line,) = [line for line in told(spared) if line.startswith("torch ")]
    assert line.startswith(f"torch {versions()['torch']} lacks what nbddp relies on: flight recorder (fewer deadlocks")
    assert line.endswith("%ddp doctor shows details")
    assert spared.ensure(LaunchSpec()) == [], "a cell does not say it"


@pytest.mark.more
def test_the_next_pool_of_the_same_versions_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDDP_RUNTIME_DIR", str(tmp_path))
    with WorkerPool(nproc=1) as first:
        before = told(first)
    (path,) = tmp_path.glob("nbddp-*/seams/*")
    found = findings(messages(path.read_bytes()), "")
    assert set(found.verdicts) == {seam.key for seam in SEAMS}
    with WorkerPool(nproc=1) as second:
        assert second.parts.of("doctor").done(), "nothing was tried again"
        assert told(second) == before


def test_trials_that_die_are_told_and_the_pool_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "import sys\nif sys.argv[:1] == ['-m']:\n    import os\n    from nbddp.capabilities.doctor import seams\n"
    dies += "    seams.SEAMS = ()\n"
    dies += "    import nbddp.capabilities.doctor.probe_runner as trials\n    trials.machine = os.abort\n"
    (tmp_path / "sitecustomize.py").write_text(dies)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    with WorkerPool(nproc=1) as pool:
        said = "the compatibility checks ended unexpectedly (signal 6); %ddp doctor repeats them"
        assert told(pool) == [said]
        assert run(pool, "1") == [1]


def test_trials_that_cannot_be_started_are_told_and_the_pool_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = AgentClient.request

    def refusing(agent: AgentClient, op: str, **fields: Any) -> Any:
        if fields.get("kind") == "trials":
            raise AgentFailed("no more processes")
        return request(agent, op, **fields)

    monkeypatch.setattr(AgentClient, "request", refusing)
    monkeypatch.setenv("NBDDP_RUNTIME_DIR", str(tmp_path))
    with WorkerPool(nproc=1) as pool:
        said = "the compatibility checks could not be started (no more processes); %ddp doctor repeats them"
        assert told(pool) == [said]
        assert run(pool, "1") == [1]


def test_start_and_status_say_it(four: Kernel) -> None:
    says = (
        "from nbddp.capabilities.doctor.background import Probes\nwas = Probes.describe\nProbes.describe = lambda "
        "self: ['torch 2 lacks it']"
    )
    assert four.run(says).ok
    assert "torch 2 lacks it\n" in four.run("%ddp start").text()
    assert "torch 2 lacks it\n" in four.run("%ddp status").text()
    assert "lacks" not in four.run("%%ddp\nprint(1)").text()
    assert four.run("Probes.describe = was").ok


SUM = "import os, torch, torch.distributed as dist\nt = torch.tensor([float(os.environ['RANK'])])\n"


def test_cells_run_without_them(spared: WorkerPool) -> None:
    code = SUM + "dist.init_process_group('gloo')\ndist.all_reduce(t)\nt.item()"
    for _ in range(3):  # a group that is left over is ended by the next run's
        assert run(spared, code) == [1.0, 1.0]


def test_ddp_trains_without_them(spared: WorkerPool) -> None:
    code = SUM + (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo')\n"
        "model = DDP(torch.nn.Linear(1, 1, bias=False))\n"
        "model(t.view(1, 1)).sum().backward()\nmodel.module.weight.grad.item()"
    )
    assert run(spared, code) == [0.5, 0.5]
    with pytest.raises(nbddp.NbddpError, match="steps cannot be recorded with this torch; %ddp doctor"):
        spared.timings()
    assert spared.compare("model").equal


def test_a_failure_is_reported_without_them_and_the_next_cell_runs(spared: WorkerPool) -> None:
    code = (
        SUM + "dist.init_process_group('gloo')\nif dist.get_rank() == 1:\n    raise ValueError('mine')\ndist.barrier()"
    )
    with pytest.raises(nbddp.RunFailed, match="mine") as failed:
        run(spared, code)
    assert [s.status for s in failed.value.states] == ["interrupted", "failed"]
    assert run(spared, SUM + "dist.init_process_group('gloo')\ndist.all_reduce(t)\nt.item()") == [1.0, 1.0]


def test_the_text_is_aligned_and_fits_a_terminal() -> None:
    why = "a name that is missing " * 8
    text = str(Findings({"Python": "3.13.0"}, MACHINE, {**WORKING, SEAMS[3].key: ProbeResult(False, False, why)}))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert "2 cores · 24 GiB of memory · 2 GPUs: NVIDIA H100" in lines
    head = next(i for i, line in enumerate(lines) if line.startswith("library "))
    at = lines[head].index("works")
    rows = lines[head + 1 : head + 1 + len(SEAMS)]
    assert [row[at : at + 5].strip() for row in rows] == ["no" if i == 3 else "yes" for i in range(len(SEAMS))]


@pytest.mark.more
def test_doctor_in_a_notebook_tells_of_the_pool_and_imports_no_torch(four: Kernel) -> None:
    shown = four.run("%ddp doctor")
    assert shown.ok, shown.error
    text = shown.displays[-1]["text/plain"]
    names = "have all private APIs" if RECORDS else "lack flight recorder"
    assert text.splitlines()[2] == f"pool of 4: its workers {names}"
    assert f"torch {versions()['torch']}" in text
    assert "flight recorder" in text
    assert four.run("import sys\nassert 'torch' not in sys.modules").ok


@pytest.mark.more
def test_doctor_in_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nbddp", "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Python ")
    assert f"{len(SEAMS)} private APIs: " in done.stdout
