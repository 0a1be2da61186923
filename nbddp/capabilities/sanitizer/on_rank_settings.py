"""A rank's look at numbers that a program sets and all ranks share.

Those of torch's modules, as a dropout's share. Those of a data set: the numbers of its classes, and the statistics by
which it is scaled."""

from __future__ import annotations

import re
import zlib
from itertools import islice
from typing import Any

import numpy as np
import torch

NUMBERS = ("p", "dropout", "drop_prob", "eps", "momentum", "negative_slope")  # of modules
OF_TORCH = ("torch.nn.modules.", "torch.ao.nn.")
MODULES, ENTRIES, OBJECTS, CLASSES = 200, 64, 16, 4096  # at most
LISTED = 200_000  # entries of a list that is compared
STATISTICS = re.compile(r"(^|_)(mean|std|var|variance)s?($|_)", re.I)
MOVES = re.compile(r"running|moving|ema", re.I)  # statistics that go on as samples are read
OF_RANKS = re.compile(r"rank|peer|worker|node|host|process", re.I)
INNER = ("dataset", "transform", "transforms", "transform_fn")  # attributes that hold a further part of a data set
DEEPEST = 4


def module_numbers(module: Any) -> dict[str, float]:
    """Name of a module's number → the number, of modules of torch and of dropouts."""
    found = (
        (f"{path}.{name}" if path else name, float(value))
        for path, each in module.named_modules()
        if type(each).__module__.startswith(OF_TORCH) or type(each).__name__.startswith("Drop")
        for name in NUMBERS
        if type(value := vars(each).get(name)) in (int, float)
    )
    return dict(islice(found, MODULES))


def class_numbers(dataset: Any) -> dict[str, tuple[int, int]]:
    """Name of a mapping from classes to 0, 1, 2 and so on → a digest of its classes, and one of their numbers."""
    found = {}
    for path, name, value in _attributes(dataset):
        if type(value) is dict and 1 < len(value) <= CLASSES and _counts(value):
            keys = sorted(value)
            numbers = (zlib.crc32(repr(each).encode()) for each in (keys, [value[key] for key in keys]))
            found[f"{path}{name}"] = (next(numbers), next(numbers))
    return found


def _counts(mapping: Any) -> bool:
    if not all(type(key) is str and type(value) is int for key, value in mapping.items()):
        return False
    return sorted(mapping.values()) == list(range(len(mapping))) and not any(map(OF_RANKS.search, mapping))


def statistics(dataset: Any) -> dict[str, list[float]]:
    """Name of what is called a mean, a deviation or a variance → its numbers."""
    found = {}
    for path, name, value in _attributes(dataset):
        if STATISTICS.search(name) and not MOVES.search(name) and (numbers := _plain(value)):
            found[f"{path}{name}"] = numbers
    return found


def lists(dataset: Any) -> dict[str, tuple[int, int]]:
    """Name of what has an entry for each sample → a digest of its texts in any order, and one of their order. The first
    is 0 if they are no texts. The indices that a Subset chooses count as texts."""
    found: dict[str, tuple[int, int]] = {}
    length = _length(dataset)
    for path, name, value in _attributes(dataset) if length > 1 else ():
        number = _length(value) if isinstance(value, (list, tuple, range, np.ndarray, torch.Tensor)) else 0
        if not 1 < number <= LISTED or not (number == length or (path == "dataset." and number >= length)):
            continue
        chosen = name == "indices" and isinstance(dataset, torch.utils.data.Subset) and not path
        entries = _numbers(value) if chosen else _texts(value)
        if entries:
            found[f"{path}{name}"] = (sum(map(zlib.crc32, entries)), zlib.crc32(b"|".join(entries)))
        elif not chosen:
            found[f"{path}{name}"] = (0, _order(value))
    return found


def _length(value: Any) -> int:
    """0 of what has none, as a stream or a tensor of one number."""
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return 0


def _order(values: Any) -> int:
    """A digest of numbers in their order; 0, which all ranks share, of other objects."""
    if isinstance(values, (list, tuple, range)) and all(type(each) in (int, float, bool) for each in values):
        return zlib.crc32(repr(values).encode())
    if type(values) is torch.Tensor and values.device.type == "cpu" and values.layout is torch.strided:
        values = values.detach().float().numpy() if values.numel() <= LISTED and not values.is_complex() else None
    if isinstance(values, np.ndarray) and values.size <= LISTED and values.dtype.kind in "fiub":
        return zlib.crc32(np.ascontiguousarray(values).tobytes())
    return 0


def _numbers(values: Any) -> list[bytes]:
    if not all(isinstance(each, (int, np.integer)) for each in values):
        return []
    return [str(int(each)).encode() for each in values]


def _texts(values: Any) -> list[bytes]:
    """The last parts of texts: ranks may keep copies of the same files in folders of their own."""
    if not isinstance(values, (list, tuple)) or not all(type(each) is str for each in values):
        return []
    return [each.rsplit("/", 1)[-1].encode(errors="replace") for each in values]


def _plain(value: Any) -> list[float]:
    if type(value) is float:
        return [value]
    if isinstance(value, (list, tuple)) and all(type(each) is float for each in value):
        return list(value[:ENTRIES])
    if type(value) is torch.Tensor:
        if value.device.type != "cpu" or not value.dtype.is_floating_point or value.requires_grad:
            return []
        value = value.numpy() if value.dtype is not torch.bfloat16 else value.float().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return [float(each) for each in value.reshape(-1)[:ENTRIES]]
    return []


def _attributes(dataset: Any) -> list[tuple[str, str, Any]]:
    """Path, name and value of the attributes of a data set, of those within it, and of its transforms."""
    found: list[tuple[str, str, Any]] = []
    waiting: list[tuple[str, Any, int]] = [("", dataset, 0)]
    for _ in range(OBJECTS):
        if not waiting:
            break
        path, each, depth = waiting.pop(0)
        held = getattr(each, "__dict__", None)
        if not isinstance(held, dict):
            continue
        found += [(path, name, value) for name, value in held.items()]
        if depth < DEEPEST:
            for name in INNER:
                inner = held.get(name)
                parts = inner if isinstance(inner, (list, tuple)) else [inner]
                waiting += [(f"{path}{name}.", part, depth + 1) for part in parts if part is not None]
    return found
