"""`--via`: a command that starts a node's agent, with {host} and {command} in it, and the values of such options."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TypedDict

from nbddp.capabilities.hosts.names import Host
from nbddp.errors import BadInput

SSH = "ssh"
EXAMPLE = "'kubectl exec -i {host} -- {command}'"
# -bind-to none: Open MPI would give a single process one core
NAMED = {"mpiexec": "mpiexec -n 1 -host {host} -bind-to none {command}"}
FIELDS = ("{host}", "{command}")


class HostOptions(TypedDict, total=False):
    hosts: str
    via: str
    keep_alive: float
    slurm: int


def via(typed: HostOptions) -> str:
    if not typed.get("hosts"):
        raise BadInput(f"--via {typed['via']} needs --hosts; name the hosts, as in --hosts nodea,nodeb")
    return via_of(typed["via"])


def keep_alive(typed: HostOptions) -> float:
    """In seconds."""
    if "slurm" not in typed and not typed.get("hosts"):
        raise BadInput("--keep-alive needs --hosts or --slurm; add one of them, or use --keep-warm")
    return typed["keep_alive"]


def via_of(text: str) -> str:
    """The command of `--via`, with names of templates replaced. Raises BadInput."""
    whole = NAMED.get(text.strip(), text.strip())
    if whole == SSH:
        return whole
    try:
        words = shlex.split(whole)
    except ValueError as e:
        raise BadInput(f"--via {text}: {e}; close the quote or escape it with a backslash") from None
    if not words:
        raise BadInput(f"--via is empty; use {SSH}, {', '.join(NAMED)}, or a command such as {EXAMPLE}")
    missing = [field for field in FIELDS if field not in whole]
    if missing:
        raise BadInput(f"--via {text} lacks {' and '.join(missing)}; write a command such as {EXAMPLE}")
    return whole


def refuse_more_than_names(via: str, hosts: Sequence[Host]) -> None:
    """Raises BadInput for a host with a user or a port, which a command has no place for."""
    for host in hosts:
        if host.user or host.port:
            raise BadInput(
                f"--via {via} passes on host names only, but {host} has a {'user' if host.user else 'port'}; name it "
                f"as {host.name}, and put the rest into --via"
            )


def filled(template: str, host: Host, command: Sequence[str]) -> list[str]:
    """The command for a host. {command} is a word for each of its words where it stands alone, and quoted for a shell
    where it is part of a word."""
    found: list[str] = []
    for word in shlex.split(template):
        if word == "{command}":
            found += command
        else:
            found.append(word.replace("{host}", host.name).replace("{command}", shlex.join(command)))
    return found
