"""The values of `--slurm` and its options. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from nbddp.capabilities.slurm.commands import OPTIONS, Slurm
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec, is_number, positive

NEW = 0  # for the number of a job: one that is not there yet
PARTS = (*OPTIONS, "cpus_per_node")


def job(text: str) -> int:
    """The number of a job; empty: NEW."""
    if text == "":
        return NEW
    if not is_number(text) or not 0 < int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a job number; squeue --me lists yours")
    return int(text)


def nodes(text: str) -> int | str:
    """`2`, or salloc's `1-4`."""
    least, dash, most = text.partition("-")
    return f"{positive(least)}-{positive(most)}" if dash else positive(text)


def asked(typed: Mapping[str, Any]) -> Slurm | None:
    """What was typed, by names. Raises BadInput where it does not fit together."""
    said = {name: typed[name] for name in PARTS if name in typed}
    if typed.get("slurm_options"):
        said["more"] = typed["slurm_options"]
    if "slurm" not in typed:
        if not said:
            return None
        raise BadInput(f"{_flag(said)} needs --slurm; add --slurm, or remove {_flag(said)}")
    hosts, number, nnodes = typed.get("hosts"), typed["slurm"], typed.get("nnodes")
    if hosts:
        raise BadInput(
            f"--slurm chooses the hosts, so it cannot be combined with --hosts {hosts}; remove one of the two"
        )
    if number and said:
        raise BadInput(f"--slurm {number} already has its nodes; remove {_flag(said)}")
    if nnodes and not number:
        least, most = nnodes if isinstance(nnodes, tuple) else (nnodes, nnodes)
        said.setdefault("nodes", least if least == most else f"{least}-{most}")
    return Slurm(job=number or None, **said)


def _flag(said: Iterable[str]) -> str:
    return f"--{next(iter(said)).replace('more', 'slurm_options').replace('_', '-')}"


def given(slurm: Slurm | bool | None) -> Slurm | None:
    """The argument of a call in Python."""
    return Slurm() if slurm is True else slurm or None


def merged(spec: LaunchSpec, running: LaunchSpec) -> Slurm | None:
    """`--slurm` alone means the nodes that the pool has."""
    return running.slurm if spec.slurm in (None, Slurm()) and running.slurm else spec.slurm
