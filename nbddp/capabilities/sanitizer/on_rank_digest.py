"""Digests of tensors on a rank: cheap, the same bits for the same values, and on the tensors' own device.

Nothing here waits for a device: numbers stay tensors until the program has ended. No generator of the program is used.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from nbddp.capabilities.sanitizer.recording import NO_TENSOR

Method = TypeVar("Method", bound=Callable[..., Any])
ELEMENTS = 512  # of a tensor that are sampled
LINES = 32
COLUMNS = 2048  # of a row that are looked at
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_weights: dict[tuple[str, Any, int], Any] = {}
_lengths: dict[tuple[Any, tuple[int, ...]], Any] = {}  # to copy them to a GPU anew would wait for it
LENGTHS = 256
VISITS = 4096  # objects of a value in which tensors are looked for


def safely(method: Method) -> Method:
    """A watcher's method whose errors are no errors of the program: recording ends, and the notebook reports why.
    torch.compile leaves it out, and all that it calls."""

    @functools.wraps(method)
    def safe(watcher: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(watcher, *args, **kwargs)
        except Exception as e:
            watcher.recorder.give_up(e)
            return None

    return torch.compiler.disable(safe)  # type: ignore[no-any-return]


def weights(kind: str, device: Any, length: int) -> Any:
    """Fixed random weights, of at least this length: `float` about 1 with either sign, `int` any of 64 bits."""
    size = 1 << max(10, (length - 1).bit_length())
    key = (kind, device, size)
    if key not in _weights:
        own = torch.Generator().manual_seed(20_261)
        if kind == "float":
            made = torch.rand(size, generator=own, dtype=torch.float64) + 0.5
            made *= torch.randint(0, 2, (size,), generator=own) * 2 - 1
        else:
            made = torch.randint(-(1 << 62), 1 << 62, (size,), generator=own) | 1
        _weights[key] = made.to(device)
    return _weights[key][:length]


def elements(tensor: Any) -> Any:
    """At most ELEMENTS of a tensor's elements as one row, in LINES pieces, evenly spread."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    row = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    if row.numel() > ELEMENTS:
        width = row.numel() // LINES
        row = row[: LINES * width].view(LINES, width)[:, : ELEMENTS // LINES].reshape(-1)
    return row


def sample(tensors: Sequence[Any]) -> Any:
    """For each tensor its dot product with fixed weights and its norm, interleaved; float64, on the first's device.

    In a step the caches hold the model's data, and each call of torch costs by its code. So there are few for a tensor.
    """
    with torch.no_grad():
        device = next((each.device for each in tensors if each is not None), torch.device("cpu"))
        large: list[int] = []
        small: list[int] = []
        for i, each in enumerate(tensors):
            (large if each is not None and each.numel() > ELEMENTS and _is_plain(each, device) else small).append(i)
        parts = [_pieces(tensors[i]) for i in large]
        rows = [_row(tensors[i], device) for i in small]
        joined = [torch.cat(parts).reshape(-1).double()] if parts else []
        whole = torch.cat([*joined, *rows]) if rows or not joined else joined[0]
        whole = torch.nan_to_num(whole, nan=54321.0, posinf=1e150, neginf=-1e150).clamp_(-1e150, 1e150)
        both = torch.stack([whole * weights("float", device, whole.numel()), whole * whole], dim=1)
        lengths = (*[ELEMENTS] * len(large), *(row.numel() for row in rows))
        sums = torch.segment_reduce(both, "sum", lengths=_on(device, lengths), unsafe=True)
        sums[:, 1].sqrt_()
        order = [*large, *small]
        if order != sorted(order):
            sums = sums[_on(device, tuple(sorted(range(len(order)), key=order.__getitem__)))]
        return sums.reshape(-1)


def size(tensors: Sequence[Any]) -> Any:
    """The sum of the absolute values of some elements."""
    with torch.no_grad():
        return torch.cat([elements(each.detach()).double() for each in tensors]).abs().sum()


def _is_plain(tensor: Any, device: Any) -> bool:
    return (
        tensor.layout is torch.strided and tensor.is_contiguous() and tensor.device == device
        and tensor.dtype == torch.float32
    )  # fmt: skip


def _pieces(tensor: Any) -> Any:
    """ELEMENTS of a contiguous tensor, in LINES pieces, evenly spread. A piece is a line of the cache; single elements
    would each cost one."""
    return tensor.as_strided((LINES, ELEMENTS // LINES), (tensor.numel() // LINES, 1))


def _row(tensor: Any, device: Any) -> Any:
    """At most ELEMENTS of any other tensor."""
    if tensor is None:
        return torch.full((1,), NO_TENSOR, dtype=torch.float64, device=device)
    return elements(tensor.detach()).to(device, torch.float64)


def _on(device: Any, lengths: tuple[int, ...]) -> Any:
    if len(_lengths) > LENGTHS:
        _lengths.clear()
    if (device, lengths) not in _lengths:
        _lengths[device, lengths] = torch.tensor(lengths, device=device)
    return _lengths[device, lengths]


def rows_of(found: Sequence[Any]) -> Any:
    """A digest for each row of tensors with the same first dimension, which are a batch; None if rows cannot tell."""
    first = next((each for each in found if each.dim()), None)
    if first is None or not first.shape[0] or first.layout is not torch.strided:
        return None
    total: Any = None
    with torch.no_grad():
        for number, each in enumerate(found):
            if each.dim() and each.shape[0] == first.shape[0] and each.device == first.device:
                own = _row_digests(each.detach()) * (2 * number + 1)
                total = own if total is None else total + own
    return total


def _row_digests(tensor: Any) -> Any:
    flat = tensor.reshape(tensor.shape[0], -1)
    columns = flat.shape[1]
    if columns > COLUMNS:
        flat = flat[:, :: columns // COLUMNS][:, :COLUMNS]
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    elif flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten(1)
    flat = flat.contiguous().view(INTEGERS[flat.element_size()]).to(torch.int64)
    return ((flat + 0x9E3779B9) * weights("int", flat.device, flat.shape[1])).sum(1)


def tells_rows_apart(found: Sequence[Any]) -> bool:
    """Whether equal rows are the same sample: small whole numbers may repeat in a data set."""
    width = 0
    for each in found:
        if each.dim() and each.shape[0]:
            width += (each.numel() // each.shape[0]) * (4 if each.dtype.is_floating_point else 1)
    return width >= 8


def of_batch(rows: Any) -> Any:
    """A digest of a batch, of its rows' digests and their order."""
    return (rows * weights("int", rows.device, rows.numel())).sum()


def tensors_in(found: Any, most: int = 16, depth: int = 4) -> Iterator[Any]:
    """The plain tensors in a value, within dicts, lists, tuples and UserDicts, as a BatchEncoding. most: of one such;
    of a whole value four times as many, or VISITS, are looked at."""
    waiting = [(found, depth)]
    for _ in range(max(VISITS, 4 * most)):
        if not waiting:
            return
        each, deeper = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
            continue
        if isinstance(each, UserDict):
            each = each.data
        parts = each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
        if deeper and len(parts) <= most:
            waiting += [(part, deeper - 1) for part in reversed(list(parts))]


def of_names(names: Iterable[str]) -> int:
    return zlib.crc32("\n".join(names).encode())


def generators(device: Any = None) -> dict[str, int]:
    """Digests of the states of the generators that a program may draw from."""
    found = {"torch": zlib.crc32(torch.get_rng_state().numpy())}
    if device is not None and device.type == "cuda":
        found["cuda"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy())
    if "random" in sys.modules:
        found["random"] = hash(sys.modules["random"].getstate()[1]) & 0xFFFFFFFF
    if "numpy" in sys.modules and hasattr(sys.modules["numpy"], "random"):
        state = sys.modules["numpy"].random.get_state(legacy=False)
        if "key" in state["state"]:
            found["numpy"] = zlib.crc32(state["state"]["key"].tobytes(), state["state"]["pos"])
    return found


def numbers(values: Sequence[Any]) -> list[Any]:
    """Tensors as Python's numbers, read from each device at once; what is none stays."""
    found = list(values)
    by: dict[tuple[Any, Any, Any], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by.setdefault((value.device, value.dtype, tuple(value.shape)), []).append(i)
    for some in by.values():
        for i, number in zip(some, torch.stack([values[i] for i in some]).tolist(), strict=True):
            found[i] = number
    return found
