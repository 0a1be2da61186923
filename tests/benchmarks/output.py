"""What collecting and showing output costs: twice the output costs about twice, and much of it stays quick.

    python tests/benchmarks/output.py

Prints seconds for n and 2n of each kind, and their ratio; nothing here needs a pool.
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nbddp.output.buffer import RankOutput
from nbddp.output.layout import block

MESSAGE = 1 << 14  # characters of a message of text
LOOK_EVERY = 20  # messages between two updates of a live view, if not more


def lines(n: int) -> list[str]:
    text = "".join(f"step {i}: loss 0.123\n" for i in range(n))
    return [text[i : i + MESSAGE] for i in range(0, len(text), MESSAGE)]


# name: (n, what a rank prints for n, ranks)
KINDS: dict[str, tuple[int, Callable[[int], list[str]], int]] = {
    "lines, 64 ranks": (50_000, lines, 64),
    "a return in a long line": (340_000, lambda n: ["x" * n, "\ry", "\n"], 1),
    "many returns over a long line": (10_000, lambda n: ["x" * 340_000, *["\rab"] * n, "\n"], 1),
    "many returns in one message": (100_000, lambda n: ["x" * 340_000 + "\rab" * n + "\n"], 1),
    "backspaces": (100_000, lambda n: ["x" * 340_000, "a\b\b" * n], 1),
    "erasures": (100_000, lambda n: ["x" * 340_000, "\x1b[2K\r50%" * n], 1),
    "a line in small pieces": (100_000, lambda n: ["abc"] * n, 1),
    "lines of 1 MB": (200, lambda n: ["x" * (1 << 20) + "\n"] * n, 1),
    "streams in turn": (100_000, lambda n: ["out\n", "err\n"] * (n // 2), 1),
    "displays": (10_000, lambda n: [""] * n, 1),
}


def cost(texts: list[str], ranks: int, folder: Path) -> float:
    gc.collect()
    began = time.perf_counter()
    outs = [RankOutput(rank, folder) for rank in range(ranks)]
    for i, text in enumerate(texts):
        for out in outs:
            if text:
                out.take("stream", {"name": "stderr" if text == "err\n" else "stdout", "text": text})
            else:
                named = {"data": {"text/html": "x" * 1000}, "metadata": {}, "transient": {"display_id": str(i)}}
                out.take("display_data", named)
                out.take("update_display_data", named)
            if not i % LOOK_EVERY:
                list(out.open_lines())
    block(outs)
    for out in outs:
        out.close()
    return time.perf_counter() - began


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, (n, make, ranks) in KINDS.items():
            one, two = (min(cost(make(k * n), ranks, Path(folder)) for _ in range(2)) for k in (1, 2))
            print(f"{name:32} {n:>8,}: {one:6.2f} s   twice: {two:6.2f} s   ratio {two / one:4.1f}", flush=True)
        print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
