"""A script on the way to the pool, for the notebook and the terminal: its file, its option for the local rank, its
name on Tab. Reads files, and imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nbddp.capabilities.scripts.program import ScriptProgram, check_file, own_option
from nbddp.compat.working_dir import here
from nbddp.launch import options
from nbddp.launch.options import LaunchSpec, Parser
from nbddp.launch.path_completion import files


def made_ready(spec: LaunchSpec, elsewhere: bool) -> tuple[LaunchSpec, list[str]]:
    """The spec as it can be run, and what to say of it. elsewhere: the pool's workers are on other hosts, with files of
    their own. Raises BadInput if there is no such script."""
    program = spec.program
    assert isinstance(program, ScriptProgram)
    if not elsewhere:
        check_file(program, here(), spec.argv)
    if not program.local_rank or program.module or not Path(program.target).is_file():
        return spec, []
    option = own_option(Path(program.target).read_text(encoding="utf-8", errors="replace"))
    if option == program.local_rank:
        return spec, []
    said = f"{program.target} accepts {option}, as before torch 2.0, so nbddp passes {option}"
    return replace(spec, program=replace(program, local_rank=option)), [said]


def complete(parser: Parser, line: str) -> list[str] | None:
    """What may come next behind `%ddp run`: options, the script. None once that is typed: its words are its own."""
    current, words = options.at_cursor(line)
    before = list(words)
    while words and words[0].startswith("-"):
        number = options.taken(parser, words)
        due = len(words) == number == 1 and options.waiting_for(parser, words[0])
        if due:
            folders = files(current, ()) if due.dest == "log_dir" else []
            return folders or options.complete(parser, line) or None
        del words[:number]
    if words:
        return None
    names = [] if current.startswith("-") or {"-m", "--module"} & {*before, current} else files(current)
    return [*names, *options.complete(parser, line)] or None
