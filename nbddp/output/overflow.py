"""Texts that are too long for a notebook: their two ends are shown, and the whole is in a file.

A line of a report, a message, a result or a figure may have any size; a notebook that holds them all cannot be opened.
The file is bounded too (`output.log_file`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.errors import Raised
from nbddp.output.log_file import LogFile
from nbddp.protocol.messages import MimeBundle
from nbddp.protocol.outcome import Outcome

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
