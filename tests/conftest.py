"""Real parts for all tests: a pool for a module, and a kernel with a pool of four, private to the test run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from nbddp.agent import runtime_dir
from nbddp.agent.client import AgentClient
from nbddp.capabilities.doctor.background import FOLDER
from nbddp.launch.options import LaunchSpec
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from nbddp.teach import check
from tests import needs, warm
from tests.kernels import Kernel, loaded
from tests.lessons.answers import pool_of

pytest.register_assert_rewrite("tests.pool.faults")
# a busy machine is no failure of the example that was just tried
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
MATRIX = "fault matrix"
UNIT, BROWSER = Path(__file__).parent / "unit", "tests/browser/"
LABS = {f"{BROWSER}test_output_by_rank.py", f"{BROWSER}test_panel_browser.py"}  # half of the time
# hundreds of processes would compile nbddp anew, and each of pytest's all tests
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# a shell that runs the tests in the background has the kernels that they start ignore Stop
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def fault_matrix(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes a line of the fault matrix, which is printed when the tests have run."""
    return lambda line: record_property(MATRIX, line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `every(n)` each nth is always run, and the others by `-m more`, or by the
    marker that `every(n, marker)` names."""
    before: Counter[tuple[Path, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None and isinstance(item, pytest.Function):
            if before[item.path, item.originalname] % mark.args[0]:
                item.add_marker([*mark.args, "more"][1])
            before[item.path, item.originalname] += 1
    if "PYTEST_XDIST_WORKER" in os.environ:  # small files last, so that all processes have work until the end
        items.sort(key=lambda item: UNIT in item.path.parents)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n a file's tests share its pools, and files of the browser share two Chromiums."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return f"{BROWSER}{file in LABS}" if file.startswith(BROWSER) else file

    return ByFile(config, log)


def pytest_collection() -> None:
    gc.disable()  # until the tests are there, all that is made stays


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if needs.missing():
        terminalreporter.section("not tested here")
        for line in needs.describe():
            terminalreporter.write_line(line)
    reports = [r for of in terminalreporter.stats.values() for r in of if isinstance(r, pytest.TestReport)]
    lines = {str(line) for r in reports for name, line in r.user_properties if name == MATRIX}
    if lines:
        terminalreporter.section(MATRIX)
        for line in sorted(lines):
            terminalreporter.write_line(line)


def _share_verdicts(runtime: Path, base: Path) -> None:
    """The private APIs are tested once for all processes of a run, not by each pool until one lives long enough."""
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / FOLDER
    shared.mkdir(mode=0o700, exist_ok=True)
    (runtime / FOLDER).symlink_to(shared)


@pytest.fixture(scope="session", autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Pools and IPython profiles of the tests are kept apart from the user's."""
    base = tmp_path_factory.mktemp("run")
    os.environ["NBDDP_RUNTIME_DIR"] = str(base)
    _share_verdicts(runtime_dir.runtime(), tmp_path_factory.getbasetemp())
    os.environ["IPYTHONDIR"] = str(base / "ipython")
    os.environ["PYTHONWARNINGS"] = "ignore"
    yield
    warm.end()


@pytest.fixture(scope="module", autouse=True)
def _agents_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Agents that this process starts are forks of the template; those of a file that sets COLD import torch."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "COLD", False):
            patch.setattr(AgentClient, "launch", classmethod(warm.launch))
        yield


@pytest.fixture(autouse=True)
def _leaves_the_environment() -> Iterator[None]:
    """What a test sets goes with it, and what torch sets in its process: an agent with another environment is cold."""
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that this test starts import torch, and are its process's children."""
    monkeypatch.setattr(AgentClient, "launch", classmethod(warm.start_cold))


class Pools(dict[int, WorkerPool]):
    """World size → a pool of so many, made when it is first asked for."""

    def __missing__(self, nproc: int) -> WorkerPool:
        self[nproc] = warm.begin(nproc)
        self[nproc].start()
        return self[nproc]

    def close(self) -> None:
        while self:
            self.popitem()[1].close()


@pytest.fixture(scope="session")
def _lessons_pools() -> Iterator[Pools]:
    """Pools of the lessons' files, which follow each other."""
    made = Pools()
    yield made
    made.close()


def _is_of_lessons(request: pytest.FixtureRequest) -> bool:
    return request.path.parent.name == "lessons"


@pytest.fixture(scope="module", autouse=True)
def _others_meet_no_pool_of_the_lessons(request: pytest.FixtureRequest, _lessons_pools: Pools) -> None:
    if not _is_of_lessons(request):
        _lessons_pools.close()


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest, _lessons_pools: Pools) -> Iterator[WorkerPool]:
    """A pool of the module's own, on which the lessons' checks run: of two workers, or of NPROC where it says so. Files
    of lessons have new workers of the same pool."""
    nproc = getattr(request.module, "NPROC", 2)
    if not _is_of_lessons(request):
        with pool_of(nproc) as made:
            yield made
        return
    kept = _lessons_pools[nproc]
    kept.ensure(LaunchSpec(nproc=nproc, fresh=True))
    with check.on(kept):
        yield kept


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, WorkerPool]]:
    """A pool of two and one of four, kept for all tests of a file."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture
def two(pools: dict[int, WorkerPool]) -> WorkerPool:
    """The pool of two, whole, with `kept` on each rank: its own rank."""
    pool = pools[2]
    pool.ensure(LaunchSpec())
    pool.run_cell("import os; kept = int(os.environ['RANK'])", screen=NullScreen())
    return pool


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel with nbddp loaded, for tests that leave its pool of four as they found it."""
    folder = tmp_path_factory.mktemp('it\'s a "notebook" folder')
    with loaded(str(folder)) as made:
        yield made


@pytest.fixture
def four(kernel: Kernel) -> Kernel:
    """The kernel with a healthy pool of four workers on one node."""
    shown = kernel.run("%ddp start --nproc 4 --nnodes 1")
    assert shown.ok, shown.error
    return kernel


@pytest.fixture
def cold_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of the test's own, with nbddp loaded: all processes are under it, and it leaves none to another."""
    with loaded(str(tmp_path), warm=False) as made:
        yield made


@pytest.fixture
def new_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of the test's own, with nbddp loaded."""
    with loaded(str(tmp_path)) as made:
        yield made
