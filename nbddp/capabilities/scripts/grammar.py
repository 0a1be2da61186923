"""`%ddp run`: a line of text → the request. Pure; torchrun's own line is `capabilities.scripts.torchrun`'s."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from nbddp.capabilities.scripts.program import SCRIPT, ScriptProgram, shutdown_of
from nbddp.errors import BadInput
from nbddp.launch.options import Parser, add_options, launch_spec
from nbddp.notebook.commands import CommandLine
from nbddp.protocol.capability import Command
from nbddp.protocol.request import SHUTDOWN

NOTEBOOK = "%ddp run"
HELP = {  # what options say that have other words for a cell
    "fresh": "start new worker processes first (the default without --keep)",
    "timeout": "stop the script after S seconds",
    "shutdown_timeout": f"seconds between SIGTERM and SIGKILL when ranks are stopped (default {SHUTDOWN:g})",
}


def arguments(parser: Parser) -> None:
    shown = parser.prog.replace("%", "%%")
    parser.usage = f"{shown} [options] SCRIPT [arguments]\n       {shown} [options] -m MODULE [arguments]"
    parser.description = (
        "Run a script on every rank, as torchrun does. Options go before the script; later arguments go to it."
    )
    parser.offers = {"script": (".py",)}
    parser.add_argument("script", metavar="SCRIPT", help="path of the script, or with -m the name of the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's sys.argv[1:]")
    add_options(parser, _line(parser), SCRIPT, HELP)


def _line(parser: Parser) -> str:
    return "script" if parser.prog == NOTEBOOK else "terminal"


def parse(command: Command, parser: Parser, words: Sequence[str]) -> CommandLine:
    """The words behind `run`. Raises BadInput, or HelpAsked."""
    space = parser.parse_strictly(words)
    typed = vars(space)
    keep = typed.get("keep", False)
    if keep and typed.get("max_restarts"):
        raise BadInput(
            f"{parser.prog} --max-restarts starts new processes, so --keep cannot work; remove one of the two"
        )
    shutdown = typed.get("shutdown_timeout") or shutdown_of(os.environ)
    program = ScriptProgram(space.script, typed.get("module", False), keep)
    spec = launch_spec(
        space, _line(parser), fresh=not keep or "fresh" in typed, shutdown_timeout=shutdown,
        argv=tuple(space.arguments), program=program,
    )  # fmt: skip
    return CommandLine(command, {}, spec)
