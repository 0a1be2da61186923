"""A merged trace, written to a file: its contents, its size, and how to open it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nbddp.analysis.answers import clocks_agree
from nbddp.analysis.quantities import size
from nbddp.capabilities.trace.merge import Merged
from nbddp.figures.document.page import packed
from nbddp.launch.topology import counted, rank_words
from nbddp.protocol.messages import Metadata, MimeBundle

VIEWER = "https://ui.perfetto.dev"


@dataclass(frozen=True)
class Written:
    """The file, and what stands in it in words. `str` and `repr` are the words."""

    path: Path
    words: str

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[MimeBundle, Metadata]:
        link = f'<a href="{quote(self.path.as_posix())}" download>{escape(self.path.as_posix())}</a>'
        viewer = f'<a href="{VIEWER}" target="_blank" rel="noopener">{VIEWER.removeprefix("https://")}</a>'
        text = escape(self.words).replace("\n", "<br>")
        html = text.replace(escape(self.path.as_posix()), link, 1).replace(VIEWER.removeprefix("https://"), viewer)
        return {"text/plain": self.words, "text/html": f'<div class="nbddp-trace">{html}</div>{_script()}'}, {}


@cache
def _script() -> str:
    """Adds the button that opens the file in Perfetto."""
    return f"<script>{packed(Path(__file__).with_name('perfetto.js').read_text(encoding='utf-8'))}</script>"


def written(merged: Merged, path: Path) -> Written:
    """Write the trace as JSON, packed if the name ends with `.gz`. Raises OSError if the file cannot be written."""
    text = json.dumps(merged.data, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)
    return Written(path, describe(merged, path, path.stat().st_size))


def describe(merged: Merged, path: Path, length: int) -> str:
    """What the file holds."""
    joined = counted(merged.joined, "collective")
    lines = [
        f"trace of {counted(len(merged.ranks), 'rank')}: {counted(merged.spans, 'span')}, "
        f"{joined} joined across ranks by arrows",
        f"{path.as_posix()}, {size(length)}; open it at {VIEWER.removeprefix('https://')}",
    ]
    if merged.missing:
        lines.append(f"no trace from {rank_words(merged.missing)}")
    lines += [f"rank {rank}: {why}" for rank, why in sorted(merged.why.items())]
    if merged.residual:
        lines.append(clocks_agree(merged.residual))
    return "\n".join(lines)
