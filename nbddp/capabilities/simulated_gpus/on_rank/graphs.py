"""`torch.cuda.graphs`: a capture notes the operators that it meets, and a replay runs them on the same tensors.

A GPU does not run what is captured. Here each operator does run, for its results' shapes; when the capture ends, the
tensors that were there before have their content of before again.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nbddp.capabilities.simulated_gpus.on_rank import devices, kernels, machine, memory, streams, torch_cuda, versions
from nbddp.capabilities.simulated_gpus.on_rank.arguments import Keywords, flat

WAITS = {  # operators for which the host waits, and which a capture therefore refuses
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::equal",
}  # fmt: skip
ON_DEFAULT_STREAM = (
    "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
    "default stream.)"
)
EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream."
)
_pools = itertools.count(1)


class Noted(NamedTuple):
    """One operator of a graph, with the tensors that it has returned."""

    run: Callable[..., Any]
    op: Any
    args: Sequence[Any]
    kwargs: Keywords
    results: Sequence[Any]


class CUDAGraph:
    """As `torch.cuda.CUDAGraph`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self._notes: list[Noted] = []
        self._before: dict[int, tuple[Any, Any]] = {}  # address of a storage → it, and its content of before
        self._new: set[int] = set()
        self._done = False
        self._pool = (0, 0)
        self._random: list[Any] = []  # states of the generators before the capture

    def capture_begin(self, pool: Any = None, *modes: Any, **more: Any) -> None:
        if kernels.recording:
            raise versions.driver_error(versions.CAPTURING)
        if not streams.current(devices.current()):
            raise RuntimeError(ON_DEFAULT_STREAM)
        self._random = [generator.get_state() for generator in torch.cuda.default_generators]
        self._pool = pool or graph_pool_handle()
        self._new.clear()
        kernels.recording.append(self._note)

    def capture_end(self) -> None:
        if not kernels.recording or kernels.recording[-1] != self._note:
            raise RuntimeError("capture_end() was called without capture_begin() before it")
        kernels.recording.pop()
        for storage, content in self._before.values():
            _restore(storage, content)
        for generator, state in zip(torch.cuda.default_generators, self._random, strict=True):
            generator.set_state(state)  # a capture draws no numbers
        self._before.clear()
        self._done = True
        if not self._notes:
            warnings.warn(EMPTY, UserWarning, stacklevel=3)

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        if not self._done:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for note in self._notes:
            again = note.run(note.op, *note.args, **note.kwargs)
            for old, new in zip(note.results, flat([again]), strict=True):
                if old is not new and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    machine.twin(old).copy_(machine.twin(new))

    def reset(self) -> None:
        self._notes.clear()
        self._done = False

    def pool(self) -> tuple[int, int]:
        return self._pool

    def register_generator_state(self, generator: Any) -> None: ...

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, debug_path: str) -> None:
        raise NotImplementedError("a graph of simulated GPUs has no nodes of CUDA to write")

    def _note(self, run: Callable[..., Any], op: Any, args: Sequence[Any], kwargs: Keywords) -> Any:
        if op._schema.name in WAITS or self._waits_to_copy(op, args):
            raise versions.driver_error(versions.CAPTURING)
        if kernels.writes(op):
            for tensor in flat([*args, *kwargs.values()]):
                self._keep(tensor)
        out = run(op, *args, **kwargs)
        results = list(flat([out]))
        self._new |= {tensor.untyped_storage()._cdata for tensor in results if tensor.layout is torch.strided}
        self._notes.append(Noted(run, op, args, kwargs, results))
        return out

    @staticmethod
    def _waits_to_copy(op: Any, args: Sequence[Any]) -> bool:
        """A copy to or from memory of the host that is not pinned."""
        if op._schema.name != "aten::copy_":
            return False
        return any(not tensor.is_cuda and not tensor.is_pinned() for tensor in flat(args))

    def _keep(self, tensor: Any) -> None:
        """The content of a storage before the first write in the capture."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._before and key not in self._new and memory.index_of(storage) >= 0:
            content = torch.UntypedStorage(storage.nbytes())
            content.copy_(storage)
            self._before[key] = storage, content


def _restore(storage: Any, content: Any) -> None:
    """What was there before; a storage that an operator has resized keeps its new size, as on a GPU."""
    if storage.nbytes() == content.nbytes():
        storage.copy_(content)
        return
    kept = min(storage.nbytes(), content.nbytes())
    ctypes.memmove(storage.data_ptr(), content.data_ptr(), kept)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def is_capturing() -> bool:
    return bool(kernels.recording)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {  # of torch._C
    "_CUDAGraph": CUDAGraph,
    "_graph_pool_handle": graph_pool_handle,
    "_cuda_isCurrentStreamCapturing": is_capturing,
}


def install() -> None:
    torch_cuda.put(FUNCTIONS)
    for module in (torch.cuda, torch.cuda.graphs):
        module.CUDAGraph = CUDAGraph
        module.is_current_stream_capturing = is_capturing
        module.graph_pool_handle = graph_pool_handle
