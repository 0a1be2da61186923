"""Hosts as they are named: on a line (`nodea,user@nodeb:2222`), or in a file with a host on each line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbddp.errors import BadInput

HOST = re.compile(
    r"(?:(?P<user>[^@\s/,]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^@:\s/,\[\]]+))(?::(?P<port>\d+))?"
)
EXAMPLE = "nodea,user@nodeb:2222"
LINE = "nodea slots=4"
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A host as ssh is given it. `port`, `user`: None and empty leave them to ssh's configuration; `slots`: how many
    workers its line in a hosts file allows."""

    name: str
    user: str = ""
    port: int | None = None
    slots: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name and self.port else self.name
        return f"{self.user}@{name}" * bool(self.user) + name * (not self.user) + f":{self.port}" * bool(self.port)


def hosts_of(text: str) -> tuple[Host, ...]:
    """Hosts from a list with commas, or from a file of that name. Raises BadInput."""
    if "," not in text and ("/" in text or Path(text).is_file()):
        return read_hosts(Path(text))
    return _each_once([host_of(part.strip()) for part in text.split(",") if part.strip()], f"--hosts {text}")


def host_of(text: str, slots: int | None = None) -> Host:
    """`user@host:port`, `[::1]:2222` → Host. Raises BadInput."""
    found = HOST.fullmatch(text)
    name = found and (found["six"] or found["name"])
    if not found or not name or name.startswith("-") or (found["user"] or "").startswith("-"):
        raise BadInput(
            f"{text!r} is no host; write hosts as {EXAMPLE}, or name a file with a line such as {LINE} for each"
        )
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 0 < port < 65536:
        raise BadInput(f"{text!r} names port {port}; ports are 1 to 65535")
    return Host(name, found["user"] or "", port, slots)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """A hosts file, as Open MPI has it: a host on each line, with `slots=N` or without; `#` begins a comment. Raises
    BadInput."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"--hosts {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        settings = {name: value for name, _, value in (word.partition("=") for word in words[1:])}
        slots = settings.pop("slots", None)
        if settings or (slots is not None and not (slots.isascii() and slots.isdigit() and int(slots) > 0)):
            raise BadInput(f"{path}, line {number}: {line.strip()!r} is not read; write {LINE}")
        hosts.append(host_of(words[0], None if slots is None else int(slots)))
    return _each_once(hosts, str(path))


def _each_once(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    if not hosts:
        raise BadInput(f"{where} names no host; write hosts as {EXAMPLE}")
    twice = _repeated(h.name for h in hosts)
    if twice:
        raise BadInput(f"{where} names {twice} twice; name each host once, and say by --nproc how many workers it gets")
    return tuple(hosts)


def _repeated(names: Iterable[str]) -> str:
    return next((name for name, count in Counter(names).items() if count > 1), "")
