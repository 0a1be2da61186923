"""`%ddp export`: the cells that this notebook has run, or a notebook's file, → a script or a job.

The texts are `nbddp.export`'s; here is what reads and writes files.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import pickletools
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from nbddp.capabilities.env.options import merged, wanted
from nbddp.capabilities.export import options, target_support, targets
from nbddp.capabilities.export.cells import cells_of
from nbddp.capabilities.export.options import ExportArguments, Shape
from nbddp.capabilities.export.program import ExportedCell, program
from nbddp.capabilities.export.sbatch import Job
from nbddp.errors import BadInput
from nbddp.launch import options as launch_options
from nbddp.launch.options import LaunchSpec, parse_cell
from nbddp.notebook.commands import Asked, CommandLine
from nbddp.notebook.history import CellHistory, Ran

WIDTH = 120
LONGEST = 2000  # characters of a literal
FILE = "-values.pkl"  # how the name of a script's file of values ends
LOAD = """\
import os
import pickle
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), {file!r}), "rb") as file:
    {names} = pickle.load(file)[{label!r}]
"""


def cells_of_history(ran: Sequence[Ran], file: str) -> tuple[list[ExportedCell], dict[str, tuple[bytes, ...]]]:
    """Pieces of a program, and what is to be saved in `file` beside it."""
    found, saved = [], {}
    for one in ran:
        label = f"In[{one.number}]"
        if one.pushed is None:
            found.append(ExportedCell(label, one.line, one.body))
            continue
        code, kept = code_of(one.pushed, label, file)
        saved.update(kept)
        found.append(ExportedCell(label, None, code, one.ranks))
    return found, saved


def cells_of_file(path: Path, numbers: Collection[int] | None, tag: str) -> list[ExportedCell]:
    """Those of a notebook's file. Raises BadInput if it cannot be read."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise BadInput(f"{str(path)!r} cannot be read ({e.strerror}); name the notebook's file") from None
    except ValueError:
        raise BadInput(f"{str(path)!r} is not a notebook; name a file such as training.ipynb") from None
    if not isinstance(notebook, dict) or "cells" not in notebook:
        raise BadInput(f"{str(path)!r} is not in notebook format 4; open it in Jupyter and save it")
    return cells_of(notebook, path.name, numbers, tag)


def write(
    target: Path,
    cells: Sequence[ExportedCell],
    saved: Mapping[str, tuple[bytes, ...]],
    started_by: str,
    force: bool,
    said: Sequence[str] = (),
) -> list[str]:
    """Write the script, and the file of its values; what to say. Raises BadInput if it is there, unless `force`. said:
    what its docstring says besides."""
    refuse_existing(target, force)
    labels = ", ".join(cell.label for cell in cells if cell.line is not None)
    whole = f"{target.name}: cells {labels} of a notebook.\n\n"
    more = "".join(f"\n{sentence}\n" for sentence in said)
    text, notes = program(cells, f"{whole}Start it with\n\n    {started_by}\n{more}")
    pretty = formatted(text)
    target.write_text(pretty or text, encoding="utf-8")
    if pretty is None:
        notes = [*notes, f"{target.name} is not formatted: neither ruff nor black is installed, or they failed"]
    if saved:
        beside = values_file(target)
        beside.write_bytes(pickle.dumps({label: tuple(map(pickle.loads, kept)) for label, kept in saved.items()}))
        notes = [*notes, f"values that are not literals are in {beside.name}, which {target.name} reads"]
    return [f"{target} written; start it with {started_by}", *notes]


def refuse_existing(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise BadInput(f"{str(target)!r} exists; add --force to replace it")
    if not target.parent.is_dir():
        raise BadInput(f"there is no folder {str(target.parent)!r}")


def values_file(target: Path) -> Path:
    return target.with_name(f"{target.stem}{FILE}")


def formatted(text: str) -> str | None:
    """As ruff or black formats it; None where neither does."""
    here = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    for words in (["ruff", "format", "--line-length", str(WIDTH), "-"], ["black", "-q", "-l", str(WIDTH), "-"]):
        found = shutil.which(words[0], path=os.pathsep.join(here))
        if found is None:
            continue
        done = subprocess.run([found, *words[1:]], input=text, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0 and done.stdout:
            return done.stdout
    return None


# -- the command -----------------------------------------------------------------------------------


def in_notebook(asked: Asked, line: CommandLine) -> None:
    pool = asked.pool
    shape = None
    if pool.topology is not None:
        first = pool.topology.workers[0]
        shape = options.Shape(
            pool.spec.elastic or pool.topology.nnodes, first.local_world_size, len(first.devices),
            env=pool.group.variables, visible=pool.spec.visible, said=_said([pool.spec]),
        )  # fmt: skip
    args = cast(ExportArguments, line.args)
    print(*carry_out(args, shape, asked.history, args["argv"]), sep="\n")


def in_terminal(line: CommandLine) -> None:
    args = cast(ExportArguments, line.args)
    print(*carry_out(args, None, None, args["argv"]), sep="\n")


def carry_out(
    args: ExportArguments, pool: Shape | None, history: CellHistory | None, argv: Sequence[str] = ()
) -> list[str]:
    """Do what a line of `%ddp export` asks; what to print. pool: what a running pool says. history: None in
    a terminal, where `notebook` names a file."""
    notebook, script = _files(args, history)
    options.check_words(args, history is not None)
    target = Path(script)
    if args["to"]:
        shape = _shape_of(_cells_of_job(notebook, history), pool)
        return _job({**args, "script": script}, args["to"], shape, target, argv)
    numbers = args["cells"]
    saved: dict[str, tuple[bytes, ...]] = {}
    if history is not None and not notebook:
        cells, saved = cells_of_history(history.chosen(numbers), values_file(target).name)
    else:
        cells = cells_of_file(Path(notebook or ""), numbers, args["tag"])
    specs = [cell.spec for cell in cells if cell.line is not None]
    named: ExportArguments = {**args, "script": target.name}
    shape = _shape_of(specs, pool)
    launch = options.launch_of(named, shape, tuple(argv) or _argv(specs))
    notes = target_support.notes(target_support.SCRIPT, options.said_of(args, launch), launch)
    line = targets.torchrun(launch, Job()).strip().replace("\n", "\n    ")
    return [*write(target, cells, saved, line, args["force"], shape.said), *shape.said, *notes]


def _cells_of_job(notebook: str | None, history: CellHistory | None) -> list[LaunchSpec]:
    """The lines of the cells that a job's script was made of: those that ran here, or a notebook's that is named."""
    if notebook:
        return [cell.spec for cell in cells_of_file(Path(notebook), None, "") if cell.line is not None]
    ran = history.chosen(None) if history is not None else []
    return [parse_cell(one.line) for one in ran if one.line is not None]


def _argv(specs: Sequence[LaunchSpec]) -> tuple[str, ...]:
    """What all cells have behind `--`; where they differ, the script sets it."""
    found = {spec.argv for spec in specs}
    return found.pop() if len(found) == 1 else ()


def _files(args: ExportArguments, history: CellHistory | None) -> tuple[str | None, str]:
    """The notebook and the script. In a terminal the first file with `--to` alone is the script."""
    if history is None and args["to"] and args["script"] == options.SCRIPT:
        return None, str(args["notebook"])
    return args["notebook"], args["script"]


def _shape_of(specs: Sequence[LaunchSpec], pool: Shape | None) -> Shape:
    """What the lines of cells say of a launch, the last one that says something, and what a running pool says."""
    found, debug = Shape(said=_said(specs)), None
    env: tuple[tuple[str, str], ...] = ()
    for spec in specs:
        found = Shape(
            spec.elastic or spec.nnodes or found.nnodes,
            spec.nproc if isinstance(spec.nproc, int) else found.nproc,
            found.gpus_per_proc if spec.gpus_per_proc is None else spec.gpus_per_proc,
            spec.max_restarts or found.max_restarts,
            visible=spec.visible or found.visible,
            logs=spec.logs or found.logs,
            said=found.said,
        )
        debug, env = spec.debug or debug, merged(env, spec.env)
    if pool is None:
        return replace(found, env=wanted(debug, env))
    return replace(
        pool, max_restarts=found.max_restarts, visible=pool.visible or found.visible, logs=found.logs,
        said=tuple(dict.fromkeys((*pool.said, *found.said))),
    )  # fmt: skip


def _said(specs: Sequence[LaunchSpec]) -> tuple[str, ...]:
    """What is said of options that hold: `--simulate-gpus 0` has been said, and does not."""
    held = (launch_options.merged(spec, None) for spec in specs)
    return tuple(dict.fromkeys(option.exported for spec in held for option in spec.said if option.exported))


def _job(args: ExportArguments, to: str, shape: Shape, script: Path, argv: Sequence[str]) -> list[str]:
    launch, job = options.launch_of(args, shape, argv), options.job_of(args)
    files, missing = files_of(script)
    notes = [*shape.said, *target_support.notes(to, options.said_of(args, launch), launch), *missing]
    text = targets.TARGETS[to](launch, job, files)
    if to == "pytorchjob":
        names = " and ".join(filter(None, [script.name, files.values_name]))
        notes.append(f"a PyTorchJob carries no files: its image needs {names} in the working directory")
    if not args["output"]:
        return [text.rstrip("\n"), *notes]
    output = Path(args["output"])
    refuse_existing(output, args["force"])
    output.write_text(text, encoding="utf-8")
    return [f"{output} written", *notes]


def files_of(script: Path) -> tuple[targets.Files, list[str]]:
    """The script's text and the values that it reads, as far as they are there; and what is not there, in words."""
    again = f"%ddp export {shlex.quote(str(script))}"
    if not script.is_file():
        return targets.NONE, [f"{script} does not exist yet; {again} writes it"]
    source = script.read_text(encoding="utf-8")
    name = next(iter(files_read(source)), "")
    beside = script.with_name(name) if name else None
    if beside is None:
        return targets.Files(source), []
    if not beside.is_file():
        return targets.Files(source, name), [f"{script} reads {beside}, which is missing; {again} --force writes it"]
    return targets.Files(source, name, beside.read_bytes()), []


# -- values that were pushed -----------------------------------------------------------------------
# A literal becomes itself, a function or class its source, anything else is pickled.


def code_of(values: Mapping[str, object], label: str, file: str) -> tuple[str, dict[str, tuple[bytes, ...]]]:
    """Code that sets these names, and label → pickles that `file` is to have, one per value. Raises BadInput for a
    value that a script cannot have."""
    lines, saved = [], {}
    for name, value in values.items():
        text = _source(name, value)
        if text is None:
            saved[name] = _pickled(name, value)
        else:
            lines.append(text)
    if saved:
        lines.append(LOAD.format(file=file, label=label, names="".join(f"{name}, " for name in saved).rstrip(" ")))
    return "\n".join(lines) + "\n", {label: tuple(saved.values())} if saved else {}


def files_read(source: str) -> list[str]:
    """The files of values that a script names; the script may have been renamed since it was written."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # as whoever runs it will say
        return []
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return list(dict.fromkeys(text for text in texts if text.endswith(FILE)))


def _source(name: str, value: Any) -> str | None:
    if inspect.isfunction(value) or inspect.isclass(value):
        try:
            text = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError):
            return None
        return text if value.__name__ == name and text.lstrip().startswith(("def ", "class ", "async ", "@")) else None
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    text = repr(value)
    try:
        same = len(text) <= LONGEST and type(ast.literal_eval(text)) is type(value) and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return f"{name} = {text}" if same else None


def _pickled(name: str, value: Any) -> bytes:
    advice = f"create {name!r} in a %%ddp cell instead of pushing it"
    try:
        data = pickle.dumps(value)
    except Exception as e:
        raise BadInput(f"{name!r} cannot be saved for the script ({type(e).__name__}: {e}); {advice}") from None
    if any(argument in ("__main__", "__main__ ") for _, argument, _ in pickletools.genops(data)):
        raise BadInput(f"{name!r} uses a class or function of the notebook, which the script does not have; {advice}")
    return data
