"""A file of bounded size, with the beginning and the end of the written text.

The second half of the file is written round and round. When the file is closed, it is put in order, with a line in
between that says what is missing. A disk that is full, or any other error, ends the file and not its writer's run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.errors import BadInput, Raised
from nbddp.launch.units import amount
from nbddp.protocol.messages import MimeBundle
from nbddp.protocol.outcome import Outcome

LIMIT, LEAST = 16 << 20, 4096  # bytes of one rank's output in one run
SETTING = "NBDDP_OUTPUT_LIMIT"


def limit(env: Mapping[str, str]) -> int:
    """Bytes of a rank's output that are kept. Raises BadInput for a setting that is no size."""
    text = env.get(SETTING, "")
    try:
        found = amount(text) if text else LIMIT
    except ValueError as e:
        raise BadInput(f"{SETTING}: {e}") from None
    if found < LEAST:
        raise BadInput(f"{SETTING}={text} is too small; set {LEAST} bytes or more, such as {SETTING}=16MiB")
    return found


class LogFile:
    """`path` once something is written; `why` says why no more is. held: whether it stays open between two writes; a
    process may have 1,024 files open, which many ranks would use up."""

    def __init__(self, path: Path, most: int = LIMIT, held: bool = True):
        self.path, self.most, self.written, self.why, self.held = path, most, 0, "", held
        self._file: int | None = None
        self._begun = False
        self._head = most // 2

    def write(self, data: bytes) -> None:
        if self.why:
            return
        try:
            self._write(self._open(), memoryview(data))
        except OSError as e:
            self.why = e.strerror or str(e)
        finally:
            if not self.held:
                self._let_go()

    def _open(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            anew = 0 if self._begun else os.O_TRUNC
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | anew | os.O_CLOEXEC, 0o600)
            self._begun = True
        return self._file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _write(self, file: int, data: memoryview) -> None:
        while data:
            at, end = self.written, self._head
            if at >= self._head:
                ring = self.most - self._head
                at = self._head + (self.written - self._head) % ring
                end = self.most
            done = os.pwrite(file, data[: end - at], at)
            self.written += done
            data = data[done:]

    def close(self) -> None:
        """Put what is kept in order."""
        try:
            if self._begun and self.written > self.most:
                self._put_in_order(self._open())
        except OSError as e:
            self.why = self.why or e.strerror or str(e)
        finally:
            self._let_go()
            self._begun = False

    def _put_in_order(self, file: int) -> None:
        ring = self.most - self._head
        start = (self.written - self._head) % ring
        tail = os.pread(file, ring - start, self._head + start) + os.pread(file, start, self._head)
        tail = tail[tail.find(b"\n") + 1 :]  # from a whole line on
        missing = self.written - self._head - len(tail)
        between = f"\n… {missing} bytes omitted ({SETTING} sets how many are kept) …\n".encode()
        os.ftruncate(file, self._head)
        os.pwrite(file, between + tail, self._head)


# -- texts that are too long for a notebook ---------------------------------------------------------

# Texts that are too long for a notebook: their two ends are shown, and the whole is in a file.
# A line of a report, a message, a result or a figure may have any size; a notebook that holds them all cannot be
# opened. The file is bounded too (`output.log_file`).

MESSAGE, SHOWN = (16_384, 100), (65_536, 2000)  # characters and lines of an exception's message, and of other text
RICH = 24 << 20  # characters of anything else that is displayed; matplotlib's own limit for animations is 20 MB
MOST_FILES = 50  # of a rank in a run


class Wholes:
    """Of one rank in one run; its files are in `folder`, and begin with `stem`. most: bytes of each."""

    def __init__(self, folder: Path, stem: str, most: int):
        self._folder, self._stem, self._most = folder, stem, most
        self._named: dict[str, Path] = {}

    def short(self, text: str, most: tuple[int, int] = SHOWN, name: str = "") -> str:
        """The text, or its two ends with what is left out between. name: what is kept under it takes the place of what
        was kept before."""
        characters, lines = most
        if len(text) <= characters and text.count("\n") < lines:
            return text
        head, tail = _ends(text, characters, lines)
        omitted = f"{len(text) - len(head) - len(tail):,} characters omitted"
        return f"{head}\n… {omitted}; {self._where(text, name)} …\n{tail}"

    def bundle(self, data: MimeBundle, name: str = "") -> MimeBundle:
        """A mimebundle, of which each part has a bound; `data` itself where nothing is left out."""
        plain = data.get("text/plain")
        said = self.short(plain, name=f"{name} text/plain" * bool(name)) if isinstance(plain, str) else plain
        large = {kind: text for kind, text in data.items() if kind != "text/plain" and size_of(text) > RICH}
        if said is plain and not large:
            return data
        found = {kind: text for kind, text in data.items() if kind not in large}
        notes = [
            f"… {kind} of {size_of(text):,} characters omitted; {self._where(str(text), f'{name} {kind}' * bool(name))}"
            for kind, text in large.items()
        ]
        return {**found, "text/plain": "\n".join([str(said)] * (said is not None) + notes)}

    def outcome(self, said: Outcome) -> tuple[Outcome, str]:
        """An outcome with texts of bounded size; and a digest of its exceptions, where they are not told in full."""
        chain, pages = self._chain(said.chain), tuple(map(self._page, said.pages))
        cut = chain != said.chain
        whole = hashlib.sha256(repr(said.chain).encode("utf-8", "replace")).hexdigest() if cut else ""
        return replace(said, chain=chain, pages=pages), whole

    def _page(self, page: MimeBundle | str) -> MimeBundle | str:
        return self.short(page) if isinstance(page, str) else self.bundle(page)

    def _chain(self, links: Iterable[Raised]) -> tuple[Raised, ...]:
        return tuple([
            replace(
                link,
                message=self.short(link.message, MESSAGE),
                notes=tuple([self.short(note, MESSAGE) for note in link.notes]),
                group=tuple(map(self._chain, link.group)),
            )
            for link in links
        ])  # fmt: skip

    def _where(self, text: str, name: str) -> str:
        path = self._named.get(name) if name else None
        if path is None:
            if len(self._named) >= MOST_FILES:
                return f"not kept, since there are {MOST_FILES} such texts already"
            path = self._folder / f"{self._stem}.whole{len(self._named) + 1}.txt"
            self._named[name or str(path)] = path
        file = LogFile(path, self._most)
        file.write(text.encode("utf-8", "replace"))
        file.close()
        return f"not kept: {file.why}" if file.why else f"the whole: {path}"


def _ends(text: str, characters: int, lines: int) -> tuple[str, str]:
    """Three quarters of what is shown from the beginning, the rest from the end."""
    head, tail = text[: characters * 3 // 4], text[len(text) - characters // 4 :]
    return "\n".join(head.split("\n")[: lines * 3 // 4]), "\n".join(tail.split("\n")[-(lines // 4) :])


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(str(value))


def sizes(data: MimeBundle) -> int:
    """Characters of a mimebundle."""
    return sum(map(size_of, data.values()))
