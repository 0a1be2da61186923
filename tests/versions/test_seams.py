"""What is private in torch, ipykernel, IPython and ipyparallel is used in five modules, and nowhere else."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nbddp.capabilities.doctor import seams
from nbddp.capabilities.doctor.probe_runner import NAMES
from nbddp.capabilities.stale_modules.on_rank import Modules
from nbddp.compat import ipykernel, ipyparallel, torch
from tests import places
from tests.unit.test_seams import PRIVATE, defined, private_names

ROOT = places.ROOT / "nbddp"
SEAMS = tuple(f"compat/{name}.py" for name in ("torch", "extra/torch", "ipykernel", "extra/ipykernel", "ipyparallel"))
# simulated GPUs stand on torch's insides; a child process tries these before a pool may have such GPUs (`probe.py`)
INSIDE = "capabilities/simulated_gpus/on_rank/"
FILES = [f for f in sorted(ROOT.rglob("*.py")) if not str(f).endswith(SEAMS) and INSIDE not in str(f)]

ACCELERATE = ("_shared_state", "_reset_state")  # transformers uses them too
OURS = {"_found": "figures/result.py", "_pool": "public.py"}  # what classes of ours share, and users are not offered


ALLOWED = {
    "worker/kernel.py": ipykernel.OVERRIDES, "libraries/on_rank.py": ACCELERATE,
    "extra/system.py": ("_Fork",),  # POSIX.1-2024 has it
    "compat/thread.py": ("_started",),
}  # fmt: skip


def test_no_other_module_uses_a_private_name_of_a_library() -> None:
    found = []
    for path in FILES:
        known = {*OURS, *ALLOWED.get(f"{path.parent.name}/{path.name}", ())}
        used = private_names(ast.parse(path.read_text()))
        found += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in used if name not in known]
    assert found == []


@pytest.mark.parametrize("name", OURS)
def test_private_names_that_modules_share_are_of_ours(name: str) -> None:
    tree = ast.parse((ROOT / OURS[name]).read_text())
    fields = {node.target.id for node in ast.walk(tree)
              if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}  # fmt: skip
    assert name in defined(tree) | fields


# private name without an entry in NAMES → the row of `nbddp.capabilities.doctor.seams` whose trial tries it
TRIED = {
    "_dynamo": "import of the compiler", "_functional_collectives": "methods of collectives",
    "_allgather_base": "methods of collectives", "_reduce_scatter_base": "methods of collectives",
    "_start_coalescing": "methods of collectives", "_end_coalescing": "methods of collectives",
    "_comm_hooks": "DDP's list of hooks",
    **dict.fromkeys(
        ("_C", "_join_config", "_scale", "_get_fsdp_state", "_fsdp_param_group", "_saved_", "_backward_hooks",
         "_non_persistent_buffers_set", "_optimizer_step_pre_hooks"),
        "state of a step",
    ),
    **dict.fromkeys(("_module_parameters", "_python_dispatch"), "copies of DDP models"),
    **dict.fromkeys(
        ("_fsdp_param_groups", "_mp_policy", "_init_mp_dtypes", "_unsharded_param", "_forward_hooks",
         "_forward_pre_hooks"),
        "copies of FSDP2 models",
    ),
   "_orig_mod": "compiled modules", "_local_tensor": "shards of DTensors",
    "_supports_kernel_subshells": "status messages", "_flush_pending": "flush before a display",
    **dict.fromkeys(("_get_shell_context_var", "_shell_parent_ident", "_parent_ident"), "questions of a cell"),
    "_format_exception_for_storage": "history of errors", "_last_traceback": "traceback of a reply",
    **dict.fromkeys(("_enable_profiler_legacy", "_disable_profiler_legacy"), "profilers of a program"),
    "_reloader": "files of autoreload", "_run_cell": "history of errors",
    **dict.fromkeys(("_ready", "_scheduled", "_selector", "_callback", "_args"), "event loop"),
    "_mux_stream": "client's connection",
    "_control_stream": "client's connection", "_query_stream": "client's connection",
    "_distributed_c10d": "flight recorder", "_dump_nccl_trace_json": "NCCL's flight recorder",
    **dict.fromkeys(itertools.chain(*torch.TRANSFERS), "abort of transfers"),
    "_ProcessGroupWrapper": "checks of DETAIL",
    **dict.fromkeys(
        ("_MultiProcessingDataLoaderIter", "_workers", "_shutdown", "_worker_pids_set", "_utils"), "end of data loaders"
    ),
    "_ZN3c1011initLoggingEv": "C++'s log level", "_stream": "client's connection",
    **dict.fromkeys(ipyparallel.STREAMS, "client's connection"),
}  # fmt: skip


@pytest.mark.parametrize("path", SEAMS)
def test_every_private_name_is_tried_and_its_loss_is_told(path: str) -> None:
    rows = {seam.key for seam in seams.SEAMS}
    named = {name.rpartition(":")[2].rpartition(".")[2]: key for key, names in NAMES.items() for name in names}
    tried = {**TRIED, **named}
    used = {
        name.rpartition(".")[2].rpartition("/")[2] for _, name in private_names(ast.parse((ROOT / path).read_text()))
    }
    used = {name.removesuffix(".py") for name in used}
    assert {name for name in used if tried.get(name) not in rows} == set()


def test_what_a_subclass_of_theirs_overrides_is_listed() -> None:
    from ipyparallel.cluster import launcher as theirs
    from ipyparallel.engine.app import IPEngine
    from ipyparallel.engine.kernel import IPythonParallelKernel

    for file, bases in (
        ("worker/kernel.py", [IPythonParallelKernel]),
        ("worker/engine.py", [IPEngine]),
        ("pool/launcher.py", [theirs.BaseLauncher, theirs.ControllerLauncher, theirs.EngineLauncher]),
    ):
        ours = {n for n in defined(ast.parse((ROOT / file).read_text())) if PRIVATE.fullmatch(n)}
        shadowed = {n for n in ours for base in bases if hasattr(base, n)}
        assert shadowed <= set(ipykernel.OVERRIDES), file


def test_no_module_is_looked_at_that_workers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a kernel is made nor after a cell: each look copies a page in every worker."""
    looked: list[str] = []

    class Shared(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            looked.append(name)
            return super().__getattribute__(name)

    monkeypatch.setitem(sys.modules, "shared_by_workers", Shared("shared_by_workers"))
    monkeypatch.setitem(sys.modules, "newest_by_now", types.ModuleType("newest_by_now"))
    modules = Modules(lambda file: True)
    modules.note([])
    monkeypatch.setitem(sys.modules, "imported_by_a_cell", types.ModuleType("imported_by_a_cell"))
    modules.note([])
    with ipykernel.unlisted_modules():
        from ipykernel import ipkernel

        assert [m.__file__ for m in ipkernel.sys.modules.copy().values() if hasattr(m, "__file__")] == []
        assert ipkernel.sys.stdout is sys.stdout
    assert ipkernel.sys is sys
    assert looked == []


def test_without_docstrings_a_client_can_still_be_made_in_ipython() -> None:
    """`python -OO`: the module of ipyparallel's magics formats its own docstring."""
    load = "from nbddp.compat import ipyparallel; ipyparallel.load_magics()"
    code = f"{load}; import ipyparallel.client.magics as m; m.__doc__.strip()"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True, cwd=ROOT.parent)


def test_a_notebook_without_docstrings_has_ranks(tmp_path: Path) -> None:
    code = "import nbddp, sys\nwith nbddp.Pool(nproc=1) as pool: print(sys.flags.optimize, *pool.run(abs, -3))"
    command = [sys.executable, "-OO", "-m", "IPython", "--colors=NoColor", "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout == "2 3\n", ran.stdout + ran.stderr
