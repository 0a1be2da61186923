"""The file of `--trace`. Pure."""

from __future__ import annotations

import argparse

FILE = "ddp-trace.json.gz"


def file(name: str) -> str:
    """Empty: the default."""
    if name and not name.endswith((".json", ".json.gz")):
        raise argparse.ArgumentTypeError(
            f"{name}: Perfetto reads only .json and .json.gz; use such a name, as in {FILE}"
        )
    return name or FILE
