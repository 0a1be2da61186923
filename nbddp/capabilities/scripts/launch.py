"""A script on the way to the pool, for the notebook and the terminal: its file, its option for the local rank, its
name on Tab. Reads files, and imports nothing heavy.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from nbddp.compat.working_dir import here
from nbddp.launch import options
from nbddp.launch.options import LaunchSpec, Parser
from nbddp.protocol import program as protocol_program

BATCH = (".sbatch", ".slurm", ".sh")


def made_ready(spec: LaunchSpec, elsewhere: bool) -> tuple[LaunchSpec, list[str]]:
    """The spec as it can be run, and what to say of it. elsewhere: the pool's workers are on other hosts, with files of
    their own. Raises BadInput if there is no such script."""
    program = spec.program
    assert program is not None
    if not elsewhere:
        protocol_program.check_file(program, here(), spec.argv)
    if not program.local_rank or program.module or not Path(program.target).is_file():
        return spec, []
    option = protocol_program.own_option(Path(program.target).read_text(encoding="utf-8", errors="replace"))
    if option == program.local_rank:
        return spec, []
    said = f"{program.target} accepts {option}, as before torch 2.0, so nbddp passes {option}"
    return replace(spec, program=replace(program, local_rank=option)), [said]


def complete(parser: Parser, line: str) -> list[str]:
    """What may come next behind `%ddp run`: options, the script. Nothing once that is typed: its words are its own."""
    words = line.split()
    current = "" if line.endswith(" ") or not words else words.pop()
    while words and words[0].startswith("-"):
        number = options.taken(parser, words)
        due = len(words) == number == 1 and options.waiting_for(parser, words[0])
        if due:
            return value(due, current) or options.complete(parser, line)
        del words[:number]
    if words:
        return []
    known = options.complete(parser, line)
    if current.startswith("-"):
        return known
    return [*(() if {"-m", "--module"} & set(line.split()) else files(current)), *known]


VALUES = {"notebook": (".ipynb",), "output": (*BATCH, ".py", ".yaml"), "log_dir": ()}  # options whose value is a file


def value(action: argparse.Action, current: str) -> list[str]:
    """Files that may be the value of an option."""
    return files(current, VALUES[action.dest]) if action.dest in VALUES else []


def files(current: str, ends: tuple[str, ...] = (".py",)) -> list[str]:
    """Files that end so, and folders, whose path begins so."""
    folder, _, begun = current.rpartition("/")
    place = Path(folder or ("/" if current.startswith("/") else "."))
    if not place.is_dir():
        return []
    head = f"{folder}/" if "/" in current else ""
    found = [p for p in sorted(place.iterdir()) if p.name.startswith(begun) and (begun or not p.name.startswith("."))]
    named = [f"{head}{p.name}/" if p.is_dir() else f"{head}{p.name}" for p in found if p.is_dir() or p.suffix in ends]
    return [name.replace(" ", "\\ ") for name in named]
