"""Hosts as they are named: on a line (`nodea,user@nodeb:2222`), or in a file with a host on each line."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbddp.errors import BadInput

HOST = re.compile(
    r"(?:(?P<user>[^@\s/,]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^@:\s/,\[\]]+))(?::(?P<port>\d+))?"
)
EXAMPLE = "nodea,user@nodeb:2222"
LINE = "nodea slots=4"
OWN = ("slots", "python", "setup")  # what a line of a hosts file may say of its host
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A host as ssh is given it. `port`, `user`: None and empty leave them to ssh's configuration. From its line in a
    hosts file: `slots`, how many workers it gets; `python`, `setup`: as `--python` and `--setup`, and before them."""

    name: str
    user: str = ""
    port: int | None = None
    slots: int | None = None
    python: str = ""
    setup: str = ""

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name and self.port else self.name
        return f"{self.user}@{name}" * bool(self.user) + name * (not self.user) + f":{self.port}" * bool(self.port)


def hosts_of(text: str) -> tuple[Host, ...]:
    """Hosts from a list with commas, or from a file of that name. Raises BadInput."""
    path = Path(text).expanduser()
    if "," not in text and ("/" in text or path.is_file()):
        return read_hosts(path)
    return _each_once([host_of(part.strip()) for part in text.split(",") if part.strip()], f"--hosts {text}")


def host_of(text: str, slots: int | None = None) -> Host:
    """`user@host:port`, `[::1]:2222` → Host. Raises BadInput."""
    found = HOST.fullmatch(text)
    name = found and (found["six"] or found["name"])
    if not found or not name or name.startswith("-") or (found["user"] or "").startswith("-"):
        raise BadInput(
            f"{text!r} is not a host; write hosts as {EXAMPLE} ([::1]:2222 for an IPv6 address), or name a file with a "
            f"line such as {LINE} for each"
        )
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 0 < port < 65536:
        raise BadInput(f"{text!r} has port {port}; ports are 1 to 65535")
    return Host(name, found["user"] or "", port, slots)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """A hosts file, as Open MPI has it: a host on each line, with `slots=N` or without; `#` begins a comment. A line
    may also have `python=PATH` and `setup='module load cuda'`. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # editors on Windows begin with a mark
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"--hosts {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as e:
            raise BadInput(f"{path}, line {number}: {e} in {line.strip()!r}; close the quote") from None
        if not words:
            continue
        settings = {name: value for name, _, value in (word.partition("=") for word in words[1:])}
        slots = settings.get("slots")
        if set(settings) - set(OWN) or (
            slots is not None and not (slots.isascii() and slots.isdigit() and int(slots) > 0)
        ):
            raise BadInput(
                f"{path}, line {number}: {line.strip()!r} is not a host's line; write {LINE}, and add python=PATH or "
                "setup='LINE' if this host needs its own"
            )
        host = host_of(words[0], None if slots is None else int(slots))
        hosts.append(replace(host, python=settings.get("python", ""), setup=settings.get("setup", "")))
    return _each_once(hosts, str(path))


def _each_once(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    if not hosts:
        raise BadInput(f"{where} names no host; write hosts as {EXAMPLE}")
    twice = _repeated(h.name for h in hosts)
    if twice:
        raise BadInput(f"{where} names {twice} twice; name each host once, and set its number of workers with --nproc")
    return tuple(hosts)


def _repeated(names: Iterable[str]) -> str:
    return next((name for name, count in Counter(names).items() if count > 1), "")
