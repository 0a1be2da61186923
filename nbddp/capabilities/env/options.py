"""`--debug` and `--env`: words → environment variables of the ranks, and when a process reads them. Pure.

Most of them are read once: by torch while it is imported, by NCCL or gloo when they are first used. A variable that
comes later changes nothing in such a process, so a new one is needed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec
from nbddp.launch.torchrun_env import INTERFACES, NOT_TORCHCOMMS, SEEN_AT_IMPORT, TORCHCOMMS

Settings = Mapping[str, str]
Typed = tuple[str, str | None]  # None: the variable is taken back

_INFO = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DDP's statistics, and checks of its graph
    "TORCH_CPP_LOG_LEVEL": "INFO",  # what c10d, gloo's and NCCL's process groups log
    "NCCL_DEBUG": "INFO",
    "TORCH_FR_BUFFER_SIZE": "2000",  # on where it was switched off
}
_DETAIL = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # each collective is compared across ranks before it is called
    "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,COLL",
}
LEVELS: dict[str, Settings] = {"off": {}, "info": _INFO, "detail": {**_INFO, **_DETAIL}}

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
# read by a new worker though torch has been imported before it was forked (`worker.engine.prepare_torch`)
READ_AGAIN = (
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_FR_", "TORCH_NCCL_", "TORCH_GLOO_",
    "OMP_NUM_THREADS",
)  # fmt: skip
READ_ONCE = ("NCCL_", "GLOO_", "TP_", "UCX_", "FI_", "IBV_", "CUDA_", "CUBLAS_")
EXCLUDES, EXACT = "^", "="  # of NCCL_SOCKET_IFNAME


def setting(text: str) -> Typed:
    """`KEY=VALUE`, or `KEY` to take the variable back, for argparse."""
    name, equals, value = text.partition("=")
    if not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} does not name a variable; write it as NCCL_DEBUG=INFO")
    if name in OURS or name.startswith("TORCHELASTIC_"):
        raise argparse.ArgumentTypeError(f"the pool sets {name} for each rank; choose another name")
    if name == TORCHCOMMS and value not in NOT_TORCHCOMMS:
        raise argparse.ArgumentTypeError(f"nbddp cannot inspect or unblock ranks in torchcomms; remove {name}")
    if "\0" in value:
        raise argparse.ArgumentTypeError(f"the value of {name} has a NUL byte, which no variable can hold")
    return name, value if equals else None


def given(env: Settings | None) -> tuple[Typed, ...]:
    """`env` of a call. Raises BadInput for a name that is none."""
    try:
        return tuple(setting(f"{name}={value}") for name, value in (env or {}).items())
    except argparse.ArgumentTypeError as e:
        raise BadInput(f"env: {e}") from None


def of_line(spec: LaunchSpec, running: LaunchSpec) -> tuple[tuple[str, str], ...]:
    """What the ranks of a running pool are to have, with what a line says."""
    return merged(running.env, spec.env)


def merged(old: Sequence[Typed], new: Sequence[Typed]) -> tuple[tuple[str, str], ...]:
    """What `--env` has said so far and what it says now."""
    found: dict[str, str | None] = {**dict(old), **dict(new)}
    return tuple(sorted((name, value) for name, value in found.items() if value is not None))


def wanted(level: str | None, env: Sequence[Typed]) -> dict[str, str]:
    """The variables that a level of `--debug` and settings of `--env` ask for; of the same name the setting's."""
    return {**LEVELS[level or "off"], **{name: value for name, value in env if value is not None}}


def at_import(names: Sequence[str]) -> list[str]:
    """Of these the variables that only a new import of torch reads."""
    return [name for name in names if name.startswith(SEEN_AT_IMPORT) and not name.startswith(READ_AGAIN)]


def read_once(names: Sequence[str]) -> list[str]:
    """Of these the variables that only a new process reads."""
    return [name for name in names if name.startswith((*SEEN_AT_IMPORT, *READ_ONCE))]


def describe(names: Sequence[str], new: Settings) -> str:
    """`NCCL_DEBUG=INFO and no TORCH_LOGS`."""
    said = [f"{name}={new[name]}" for name in names if name in new]
    gone = [name for name in names if name not in new]
    said += [f"no {' or '.join(gone)}"] if gone else []
    return f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]


def change_words(names: Sequence[str], new: Settings, imports: bool) -> str:
    """That workers have been replaced for these variables."""
    read = "while torch is imported, so it was imported again" if imports else "once per process"
    return f"{describe(names, new)}: read {read}; all workers were replaced, and their variables are lost"


# -- interfaces ------------------------------------------------------------------------------------


def missing_interface(settings: Settings, interfaces: Sequence[Mapping[str, Any]], host: str = "this machine") -> str:
    """That a variable names an interface which a host does not have; empty if none does. interfaces: those that are up,
    as `agent.hardware.interfaces` has them."""
    for name in INTERFACES:
        lost = _missing(name, settings.get(name, ""), [str(one["name"]) for one in interfaces])
        if lost:
            there = ", ".join(f"{one['name']} ({(one['addresses'] or ['no address'])[0]})" for one in interfaces)
            return f"{name}={settings[name]}: {host} has no interface {lost} that is up; it has {there}"
    return ""


def _missing(variable: str, value: str, there: Sequence[str]) -> str:
    """What a variable names and is not there. gloo's and torch.distributed.rpc's take names; NCCL's takes beginnings of
    names, names behind `=`, and behind `^` those that are not to be used."""
    if variable != "NCCL_SOCKET_IFNAME":
        names = [one.strip() for one in value.split(",")] if value else []
        return next((name for name in names if name not in there), "")
    if not value or value.startswith(EXCLUDES):
        return ""
    exact = value.startswith(EXACT)
    names = value.removeprefix(EXACT).split(",")
    if any(one == name or (not exact and one.startswith(name)) for name in names for one in there):
        return ""
    return " or ".join(names if exact else (f"{name}*" for name in names))
