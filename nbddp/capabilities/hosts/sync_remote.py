"""The far side of `--sync`: a copy of the notebook's folder, in a folder of nbddp's own.

Each turn of the agent's loop compares a batch of files, or writes a piece of one. So the agent's pings go on. Nothing
is written but in the copy's own folder, and nothing there through a link. What programs have written beside the copied
files stays; a copied file that has changed on either side is copied again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import stat
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from nbddp.agent import runtime_dir
from nbddp.capabilities.hosts.sync_rules import FileEntry, inside, leads_inside
from nbddp.protocol.codec import Message

WORK = "work"  # in the cache folder
LONGEST_NAME = 40
Mark = tuple[int, int]  # size, and when it was written (ns)


class FolderCopy:
    """The copy of `there`, a folder of the notebook's machine `of`, on the host that is known as `host`. used: the
    folder in which workers begin now."""

    def __init__(self, there: str, of: str, host: str, used: str = ""):
        words = json.dumps([there, of, host, socket.gethostname()]).encode()
        name = re.sub(r"[^\w.-]", "_", os.path.basename(there)).strip(".")[:LONGEST_NAME] or "folder"
        work = runtime_dir.cache() / WORK
        work.mkdir(mode=0o700, exist_ok=True)
        self.same, self.root = Path(there), work / f"{name}-{hashlib.sha256(words).hexdigest()[:12]}"
        self._record = self.root.with_name(f"{self.root.name}.json")
        self._new = self.root.with_name(f"{self.root.name}.{os.getpid()}.part")
        self._copied: dict[str, tuple[list[Any], Mark]] = self._read()
        self._listed: set[str] = set()
        self._removed: int | None = None  # how many files have gone, once that is done
        self._part: BinaryIO | None = None
        self._failed = False
        self.is_used = used == str(self.root)
        self.is_same = not self.is_used and self.same.is_dir()

    def _read(self) -> dict[str, tuple[list[Any], Mark]]:
        try:
            found = json.loads(self._record.read_text(encoding="utf-8"))
            return {path: (row, (mark[0], mark[1])) for path, (row, mark) in found.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def compare(self, rows: Mapping[str, Sequence[Any]]) -> list[str]:
        """Take some of the files that there are; those of them that have to be sent. Raises ValueError for a path that
        leads out of the folder."""
        needed = []
        for path, row in rows.items():
            self._check(path, str(row[3]))
            self._listed.add(path)
            self.is_same = self.is_same and self._is_the_same(path, FileEntry(*row))
            known = self._copied.get(path)
            if known is None or [*known[0]] != [*row] or known[1] != _mark(self.root / path):
                needed.append(path)
        return needed

    def _check(self, path: str, link: str) -> None:
        if not inside(path) or (link and not leads_inside(path, link)):
            raise ValueError(f"{path} leads out of the folder")

    def _is_the_same(self, path: str, entry: FileEntry) -> bool:
        """Whether the folder of the notebook's own path has this too. A network file system tells the truth of a file
        that is opened."""
        file = self.same / path
        if entry.link:
            return file.is_symlink() and os.readlink(file) == entry.link
        if _mark(file) == (entry.size, entry.written):
            return True
        try:
            with open(file, "rb") as opened:
                facts = os.fstat(opened.fileno())
        except OSError:
            return False
        return (facts.st_size, facts.st_mtime_ns) == (entry.size, entry.written)

    def write(self, path: str, row: Sequence[Any], data: str, first: bool, last: bool) -> str:
        """Write a piece of a file; with the last one it takes its place. Why that cannot be, or empty: it is said
        once."""
        entry = FileEntry(*row)
        self._check(path, entry.link)
        try:
            if first:
                self._remove_gone()
                self._failed = False
                self._new.unlink(missing_ok=True)
                self._part = self._begin(entry)
            if self._failed:
                return ""
            if self._part is not None:
                self._part.write(zlib.decompress(base64.b64decode(data)))
            if last:
                self._finish(path, entry)
        except OSError as e:
            self._drop()
            self._failed = True
            return f"{path} was not copied: {e.strerror}"
        return ""

    def _begin(self, entry: FileEntry) -> BinaryIO | None:
        if entry.link:
            os.symlink(entry.link, self._new)
            return None
        mode = 0o700 if entry.runs else 0o600
        return os.fdopen(os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")

    def _finish(self, path: str, entry: FileEntry) -> None:
        self._drop()
        if not entry.link:
            os.utime(self._new, ns=(entry.written, entry.written))
        self._make_folders(path)
        os.replace(self._new, self.root / path)
        mark = _mark(self.root / path)
        if mark is not None:
            self._copied[path] = (entry.row(), mark)

    def _drop(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _make_folders(self, path: str) -> None:
        """The folders in which it lies. Raises OSError where a link or a file is in their place."""
        for parent in reversed([self.root / p for p in Path(path).parents]):
            with suppress(FileExistsError):
                parent.mkdir(mode=0o700)
            if not stat.S_ISDIR(parent.lstat().st_mode):
                raise NotADirectoryError(20, f"{parent} is not a folder there")

    def finish(self) -> Message:
        """All is here: what is gone at the notebook goes here too, unless it has changed since it was copied. Where the
        workers are to begin, and how many files went."""
        if self.is_same:
            return {"folder": str(self.same), "same": True, "removed": 0}
        self.root.mkdir(mode=0o700, exist_ok=True)
        removed = self._remove_gone()
        new = self._record.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(self._copied, file)
        new.replace(self._record)
        return {"folder": str(self.root), "same": False, "removed": removed}

    def _remove_gone(self) -> int:
        """All files have been listed. Remove those that are gone at the notebook, and folders that are empty then,
        before others are written: these may have the same names. How many they were."""
        if self._removed is None:
            self._removed = 0
            for path in [p for p in self._copied if p not in self._listed]:
                if inside(path) and _mark(self.root / path) == self._copied[path][1]:
                    with suppress(OSError):  # its folder is a link by now, or is not to be written to
                        self._make_folders(path)
                        (self.root / path).unlink()
                        self._removed += 1
                        for parent in [self.root / p for p in Path(path).parents][:-1]:
                            parent.rmdir()  # up to one with something in it
                del self._copied[path]
        return self._removed

    def close(self) -> None:
        """Leave nothing of a file that has not come to its end."""
        self._drop()
        self._new.unlink(missing_ok=True)


def _mark(file: Path) -> Mark | None:
    try:
        facts = file.lstat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns
