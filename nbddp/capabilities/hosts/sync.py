"""This side of `--sync`: which files of the notebook's folder are copied, and their way to the agents of other hosts.

They travel over the connection that each agent has already, so this holds however a host is reached. All hosts are
served at once: a piece of a file is read once, and sent to those that need it.
"""

from __future__ import annotations

import base64
import os
import socket
import stat
import subprocess
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nbddp.agent import stop
from nbddp.agent.gather import ask_all, ask_each
from nbddp.analysis.quantities import size
from nbddp.capabilities.hosts import sync_rules
from nbddp.capabilities.hosts.remote_client import RemoteAgentClient
from nbddp.capabilities.hosts.sync_rules import CACHE_MARKS, MOST_BYTES, MOST_FILES, FileEntry
from nbddp.compat.system import existing_working_dir
from nbddp.errors import BadInput, PoolError
from nbddp.protocol.codec import Message

PIECE = 128 << 10  # bytes of a file that travel at once; pings wait for no longer
BATCH = 500  # files that are compared at once
AHEAD = 8  # pieces on their way to a host that are not acknowledged yet
PATIENCE = 60.0
NO_CHECKOUT = "not a git repository"


@dataclass
class Listing:
    """The files of a folder that are copied, by their path in it, and a line for each that is not."""

    root: Path
    entries: dict[str, FileEntry] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    is_git: bool = True

    def take(self, path: str) -> None:
        """Note a file, as it is now."""
        try:
            facts = (self.root / path).lstat()
        except FileNotFoundError:  # git knows it, and it is gone
            return
        except OSError as e:
            self.told.append(f"{path} is not copied: {e.strerror}")
            return
        if stat.S_ISLNK(facts.st_mode):
            self._take_link(path)
        elif stat.S_ISREG(facts.st_mode):
            self.entries[path] = FileEntry(facts.st_size, facts.st_mtime_ns, bool(facts.st_mode & stat.S_IXUSR))
        elif not stat.S_ISDIR(facts.st_mode):
            self.told.append(f"{path} is not copied: it is neither a file, a folder nor a link")

    def _take_link(self, path: str) -> None:
        link = os.readlink(self.root / path)
        if sync_rules.leads_inside(path, link):
            self.entries[path] = FileEntry(0, 0, link=link)
        else:
            self.told.append(f"{path} is not copied: it is a link that leads out of the folder, to {link}")

    def unread(self, error: OSError) -> None:
        self.told.append(f"{error.filename} is not copied: {error.strerror}")

    def check(self) -> None:
        """Raises BadInput where it is too much for a copy."""
        totals = {n: size(n) for n in (sum(e.size for e in self.entries.values()), MOST_BYTES)}
        why = sync_rules.too_much(self.entries, str(self.root), self.is_git, totals)
        if why:
            raise BadInput(why)


def listing(root: Path) -> Listing:
    """What of a folder is copied: what git does not ignore; where it is no checkout, all but hidden files and caches.
    Raises BadInput where that is too much, or git does not say."""
    found = Listing(root)
    known = _of_git(root)
    found.is_git = known is not None
    for path in _walked(root, found.unread) if known is None else known:
        found.take(path)
        if len(found.entries) > 2 * MOST_FILES:
            break
    found.check()
    return found


def _of_git(root: Path, below: str = "") -> list[str] | None:
    """What git does not ignore, also of submodules; None where it is no checkout or there is no git."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=root, stdin=subprocess.DEVNULL,
            capture_output=True, env={**os.environ, "LC_ALL": "C"}, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        if NO_CHECKOUT in said:
            return None
        raise BadInput(f"--sync needs git to list the files of {root}: {said}")
    found: list[str] = []
    for name in dict.fromkeys(os.fsdecode(n) for n in done.stdout.split(b"\0") if n):
        folder = root / name
        if (folder / ".git").exists() and not folder.is_symlink():  # a submodule, or a checkout in this one
            found += _of_git(folder, f"{below}{name.rstrip('/')}/") or []
        else:
            found.append(f"{below}{name}")
    return found


def _walked(root: Path, unread: Callable[[OSError], None]) -> Iterator[str]:
    for folder, inner, names in os.walk(root, onerror=unread):
        below = os.path.relpath(folder, root)
        if below != "." and CACHE_MARKS & set(names):
            inner[:] = []
            continue
        links = [name for name in inner if os.path.islink(os.path.join(folder, name))]
        inner[:] = sorted(name for name in inner if not sync_rules.is_left_out(name) and name not in links)
        for name in sorted([*names, *links]):
            if not sync_rules.is_left_out(name):
                yield name if below == "." else f"{below}/{name}"


@dataclass
class Receiver:
    """A host that gets a copy. `asked`: pieces that it has not acknowledged."""

    agent: RemoteAgentClient
    needed: set[str] = field(default_factory=set)
    asked: deque[int] = field(default_factory=deque)
    troubles: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0

    def send(self, **piece: Any) -> None:
        self.wait(AHEAD - 1)
        self.asked.append(self.agent.post("folder_piece", **piece))

    def wait(self, most: int = 0) -> None:
        """Until no more than so many are unacknowledged."""
        while len(self.asked) > most:
            trouble = self.agent.take(self.asked.popleft(), PATIENCE)["trouble"]
            if trouble:
                self.troubles.append(trouble)


def copy(agents: Sequence[RemoteAgentClient], progress: Callable[[str], None], living: bool = False) -> list[str]:
    """Have the notebook's folder on each host, and workers that are started from now on begin there; what was copied,
    in words. living: whether there are workers that began before.

    Raises BadInput, with nothing copied, for a folder that is too much.
    """
    began = time.monotonic()
    root = Path(existing_working_dir())
    progress(f"listing the files of {root}")
    found = listing(root)
    receivers = [Receiver(agent) for agent in agents]
    ask_each(
        agents,
        "folder",
        [{"path": str(root), "of": socket.gethostname(), "host": str(a.host)} for a in agents],
        PATIENCE,
    )
    for some in sync_rules.batches([*found.entries], BATCH):
        rows = {path: found.entries[path].row() for path in some}
        for receiver, answer in zip(receivers, ask_all(agents, "folder_files", PATIENCE, files=rows), strict=True):
            receiver.needed |= set(answer["needed"])
    for receiver, answer in zip(receivers, ask_all(agents, "folder_same", PATIENCE), strict=True):
        receiver.needed = set() if answer["same"] else receiver.needed
    _send(found, receivers, progress)
    ended = ask_all(agents, "folder_done", PATIENCE)
    seconds = time.monotonic() - began
    lines = [_said(one, answer, seconds) for one, answer in zip(receivers, ended, strict=True)]
    troubles = [f"{one.agent.host}: {words}" for one in receivers for words in one.troubles]
    moved = [str(a.host) for a, answer in zip(agents, ended, strict=True) if living and answer["moved"]]
    if moved:
        lines.append(
            f"running workers on {', '.join(moved)} keep their folder; %ddp restart starts new ones in the copy"
        )
    return [*lines, *sync_rules.some(found.told, "files"), *sync_rules.some(troubles, "files")]


def _said(one: Receiver, answer: Message, seconds: float) -> str:
    if answer["same"]:
        return f"{one.agent.host}: nothing to copy, {answer['folder']} has the same files there"
    return sync_rules.copied_words(
        str(one.agent.host), answer["folder"], one.files, size(one.bytes), seconds, answer["removed"]
    )


def _send(found: Listing, receivers: Sequence[Receiver], progress: Callable[[str], None]) -> None:
    wanted = [path for path in found.entries if any(path in one.needed for one in receivers)]
    for i, path in enumerate(wanted):
        stop.check()
        if i % 100 == 0:
            progress(f"copying files: {i} of {len(wanted)}")
        to = [one for one in receivers if path in one.needed]
        try:
            pieces = _pieces(found.root / path, found.entries[path])
            data, last = next(pieces)
        except OSError as e:
            found.told.append(f"{path} is not copied: {e.strerror}")
            continue
        _send_one(path, found.entries[path], to, data, last, pieces)
    for one in receivers:
        one.wait()


def _send_one(
    path: str, entry: FileEntry, to: Sequence[Receiver], data: bytes, last: bool, rest: Iterator[tuple[bytes, bool]]
) -> None:
    first = True
    while True:
        packed = base64.b64encode(zlib.compress(data, 1)).decode()
        for one in to:
            one.send(path=path, row=entry.row(), data=packed, first=first, last=last)
            one.bytes += len(data)
        if last:
            break
        try:
            (data, last), first = next(rest), False
        except OSError as e:
            raise PoolError(f"{path} could not be read completely: {e.strerror}; %ddp sync copies it again") from None
    for one in to:
        one.files += 1


def _pieces(file: Path, entry: FileEntry) -> Iterator[tuple[bytes, bool]]:
    """A file's pieces, and whether each is the last. Raises OSError for one that cannot be read."""
    if entry.link:
        yield b"", True
        return
    with open(file, "rb") as opened:
        yield from _read(opened)


def _read(opened: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    data = opened.read(PIECE)
    while True:
        after = opened.read(PIECE)
        yield data, not after
        if not after:
            return
        data = after
