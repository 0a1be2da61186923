"""`--simulate-gpus`: typed text → the value of a pool. Pure."""

from __future__ import annotations

import argparse

from nbddp.capabilities.simulated_gpus.cards import cards_of, typed
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec

NONE = "0"  # a pool that has simulated GPUs is to have none


def asked(text: str) -> str:
    """What is typed, in one form: `4` → `4xT4`; for argparse."""
    try:
        return _one_form(text)
    except BadInput as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def given(value: int | str | None) -> str | None:
    """The argument of a call in Python. Raises BadInput."""
    try:
        return None if value is None else _one_form(str(value))
    except BadInput as e:
        raise BadInput(f"simulate_gpus: {e}") from None


def merged(spec: LaunchSpec, running: LaunchSpec) -> str | None:
    """What the pool is to have by a line, and by what it has. The line's 0 takes them away."""
    found = spec.simulate_gpus or running.simulate_gpus
    return None if found == NONE else found


def _one_form(text: str) -> str:
    return NONE if text.strip() == NONE else typed(cards_of(text))
