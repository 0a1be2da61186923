"""torchrun's command line as it is understood behind `%ddp`: flags, spellings, `PET_*`, and what is answered."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from torch.distributed.argparse_util import check_env, env

from nbddp.capabilities.scripts import torchrun
from nbddp.launch.options import options_of
from nbddp.notebook.commands import command_parser, parse_command


def flags(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Destination → its spellings."""
    return {a.dest: a.option_strings for a in parser._actions if a.dest != "help"}


def real(form: str) -> argparse.ArgumentParser:
    """The parser of the torch that is installed."""
    from torch.distributed import launch, run

    found: list[Any] = []
    if form == torchrun.TORCHRUN:
        return run.get_args_parser()
    original = argparse.ArgumentParser.parse_args
    try:
        argparse.ArgumentParser.parse_args = lambda self, *args: found.append(self)  # type: ignore[method-assign,assignment]
        launch.parse_args([])
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    return found[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [torchrun.TORCHRUN, torchrun.LAUNCH])
def test_every_flag_of_torchrun_is_honoured_or_answered(form: str) -> None:
    ours, theirs = flags(command_parser(form)), flags(real(form))
    known = {*torchrun.HONOURED, *torchrun.NOTED, *torchrun.REFUSED}
    assert set(theirs) <= known, "a new flag needs a row in capabilities/scripts/torchrun.py"
    for dest, spellings in theirs.items():
        assert set(spellings) <= set(ours[dest]), dest


@pytest.mark.parametrize("form", [torchrun.TORCHRUN, torchrun.LAUNCH])
def test_variables_are_read_for_the_flags_for_which_torch_reads_one(form: str) -> None:
    theirs = [a for a in real(form)._actions if a.option_strings and a.dest != "help"]
    unread = {a.dest for a in theirs if not isinstance(a, env | check_env)}
    assert unread == {dest for dest in torchrun.NOT_FROM_ENV if dest in flags(real(form))}
    assert {a.dest for a in theirs if isinstance(a, check_env)} == set(torchrun.UNREAD) & set(flags(real(form)))


@pytest.mark.skipif("print_completion" not in flags(real(torchrun.TORCHRUN)), reason="torch before 2.15")
@pytest.mark.parametrize("form", [torchrun.TORCHRUN, torchrun.LAUNCH])
def test_the_table_of_flags_is_that_of_torch_2_15(form: str) -> None:
    """No flag that torch does not have but nbddp's own options, and each takes as many values as torch's."""
    own = {"help", *(option.name for option in options_of(torchrun.TORCHRUN))}
    ours = {a.dest: a.nargs for a in command_parser(form)._actions if a.dest not in own}
    theirs = {a.dest: a.nargs for a in real(form)._actions if a.dest != "help"}
    assert ours == theirs
    assert {*torchrun.HONOURED, *torchrun.NOTED, *torchrun.REFUSED} == {*theirs, "use_env"}


@pytest.mark.parametrize(
    ("typed", "debug", "trace", "slurm"),
    [
        ("--debug", "info", False, False),
        ("--debug detail", "detail", False, False),
        ("--trace", None, "ddp-trace.json.gz", False),
        ("--trace x.json", None, "x.json", False),
        ("--slurm", None, False, None),
        ("--slurm 12", None, False, 12),
        ("-n 2 --slurm --debug --trace", "info", "ddp-trace.json.gz", None),
    ],
)
def test_a_script_is_not_taken_for_the_value_of_the_option_before_it(
    typed: str, debug: str | None, trace: str | bool, slurm: Any
) -> None:
    spec = parse_command(f"run {typed} train.py --debug x --trace y").launch
    assert spec.program is not None
    assert (spec.program.target, spec.argv) == ("train.py", ("--debug", "x", "--trace", "y"))
    assert (spec.debug, spec.trace) == (debug, trace)
    assert (spec.slurm.job if spec.slurm else False) == slurm
