"""The GPUs of this process: which cards it sees, and which is the current one of each thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus import cards as known
from nbddp.capabilities.simulated_gpus.cards import Card
from nbddp.capabilities.simulated_gpus.on_rank import versions

VISIBLE = "CUDA_VISIBLE_DEVICES"
_all: tuple[Card, ...] = ()
_seen: known.SimulatedGpus | None = None  # once CUDA is in use, the variable is not read again
_current: dict[int, int] = {}  # thread → device
broken = False  # an assertion in a kernel has failed: nothing works on a GPU in this process any more
forked = False  # this process was forked from one that used CUDA: a real driver would not work here


def have(cards: Sequence[Card]) -> None:
    """These are the GPUs of the machine."""
    global _all, _seen
    _all, _seen = tuple(cards), None


def of_machine() -> tuple[Card, ...]:
    return _all


def freeze() -> None:
    """CUDA is in use: which GPUs are visible no longer changes."""
    global _seen
    _seen = _visible()


def _visible() -> known.SimulatedGpus:
    return _seen or known.visible(_all, os.environ.get(VISIBLE))


def count() -> int:
    return len(_visible().visible)


def card(index: int) -> Card:
    found = _visible()
    return found.cards[found.visible[index]]


def physical(index: int) -> int:
    """The number of a visible GPU on its machine."""
    return _visible().visible[index]


def current() -> int:
    return _current.get(threading.get_ident(), 0)


def set_current(index: int) -> None:
    _current[threading.get_ident()] = index


def known_to_driver(index: int) -> int:
    """The same index. Raises the driver's error for a GPU that is not there."""
    if not 0 <= index < count():
        raise versions.driver_error(versions.ORDINAL)
    return index


def set_checked(index: int) -> None:
    """As `torch.cuda.set_device`."""
    set_current(known_to_driver(index))


def exchange(index: int) -> int:
    """Sets the current device, unless index is negative, and returns the one before."""
    before = current()
    if index >= 0:
        set_current(index)
    return before


def exchange_checked(index: int) -> int:
    before = current()
    if index >= 0:
        set_checked(index)
    return before


def check() -> None:
    """Raises the driver's error if an assertion has failed before."""
    if broken:
        raise versions.driver_error(versions.ASSERTED)


def index_for(device: Any) -> int:
    """The index that a program means by a device, or by None. Raises the driver's error."""
    if forked:
        torch.cuda._lazy_init()  # raises torch's own words on forked processes
    if not count():
        raise RuntimeError("No CUDA GPUs are available")
    return known_to_driver(current() if device is None or device.index is None else device.index)
