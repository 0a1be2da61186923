"""A script on the way to the pool, for the notebook and the terminal: its file, its option for the local rank.
Reads files, and imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nbddp.capabilities.scripts.program import ScriptProgram, check_file, own_option
from nbddp.compat.system import existing_working_dir
from nbddp.launch.options import LaunchSpec


def made_ready(spec: LaunchSpec, elsewhere: bool) -> tuple[LaunchSpec, list[str]]:
    """The spec as it can be run, and what to say of it. elsewhere: the pool's workers are on other hosts, with files of
    their own. Raises BadInput if there is no such script."""
    program = spec.program
    assert isinstance(program, ScriptProgram)
    if not elsewhere:
        check_file(program, existing_working_dir(), spec.argv)
    if not program.local_rank or program.module or not Path(program.target).is_file():
        return spec, []
    option = own_option(Path(program.target).read_text(encoding="utf-8", errors="replace"))
    if option == program.local_rank:
        return spec, []
    said = f"{program.target} accepts {option}, as before torch 2.0, so nbddp passes {option}"
    return replace(spec, program=replace(program, local_rank=option)), [said]
