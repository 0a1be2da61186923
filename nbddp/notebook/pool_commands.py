"""The notebook's handlers of the commands that every pool has (`commands.OWN`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbddp.errors import BadInput
from nbddp.launch import options
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import rank_words
from nbddp.notebook.commands import CommandLine, overview
from nbddp.protocol.capability import load, rows
from nbddp.protocol.pool_parts import call_all, lines

if TYPE_CHECKING:
    from nbddp.notebook.magics import DDPMagics

RESTARTED = "all workers restarted; their variables are lost"


def show_help(magics: DDPMagics, line: CommandLine) -> None:
    print(overview())
    if line.args["options"]:
        print()
        options.parse_cell("--help")


def start(magics: DDPMagics, line: CommandLine) -> None:
    start_pool(magics, line.launch)


def start_pool(magics: DDPMagics, spec: LaunchSpec) -> None:
    magics.start_workers(lambda progress: magics.pool.ensure(spec, progress))
    if not magics.pool.spec.elsewhere:
        for line in [line for row in rows() if row.offers for line in load(row.offers)()]:
            print(line)
    magics.tell_shortcomings()


def stop(magics: DDPMagics, line: CommandLine) -> None:
    pool = magics.pool
    held = [f"{words}: released" for words in lines(pool.parts.given_back)]
    if not pool.running:
        call_all(pool.parts.released)
        print(*(held or ["there is no pool to stop"]), sep="\n")
        return
    stopped = f"pool of {pool.world_size} stopped; {pool.group.source.names_after()}"
    pool.stop()
    print(stopped, *held, sep="\n")


def restart(magics: DDPMagics, line: CommandLine) -> None:
    if line.launch.asks_for_pool():
        magics.ensure(replace(line.launch, fresh=True))
        print(RESTARTED)
        return
    for note in magics.pool.restart(line.args["ranks"]):
        print(note)


def log(magics: DDPMagics, line: CommandLine) -> None:
    run = magics.pool.last_run
    if run is None:
        raise BadInput("no cell has run yet; run a %%ddp cell first")
    rank = line.args["rank"]
    if rank is None:
        for r, out in run.outputs.items():
            others = sorted(out.log.parent.glob(f"{out.log.stem}.*.log"))
            found = [str(path) for path in (out.log, *others) if path.exists()]
            print(f"rank {r}: {', '.join(found) or 'no output'}; process: {magics.pool.log_of(r)}")
        return
    if rank not in run.outputs:
        raise BadInput(f"rank {rank} did not take part in the last run, which ran on {rank_words(run.outputs)}")
    path = run.outputs[rank].log
    text = path.read_text(errors="replace") if path.exists() else ""
    for whole in magics.pool.parts.log_text:
        text = whole(run, rank, text)
    print(text or f"rank {rank} printed nothing", end="")
