"""A rank's record of random numbers that a program draws by torch's or numpy's own generator: noise, time steps, masks.

Draws of a loader's fetch do not count. Nor does a draw by a generator that the program names, which the ranks may
share on purpose.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.recording import DrawnTensor
from nbddp.worker.gpus import capturing

DRAWS = ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "bernoulli", "randperm")
OF_NUMPY = (
    "rand",
    "randn",
    "normal",
    "standard_normal",
    "uniform",
    "random",
    "randint",
    "choice",
    "beta",
    "permutation",
)
KEPT = 48  # tensors that are looked at


class NoiseWatcher:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def install(self) -> None:
        for name in DRAWS:
            self.recorder.wrap(torch, name, self._draw, graphs=True)
        if "numpy" in sys.modules and hasattr(sys.modules["numpy"], "random"):
            for name in OF_NUMPY:
                self.recorder.wrap(sys.modules["numpy"].random, name, self._draw, graphs=True)

    def _draw(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def draw(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not compiling() and self.recorder.on and len(self.recorder.record.drawn) < KEPT:
                self._note(found, kwargs.get("generator"))
            return found

        return draw

    @digest.safely
    def _note(self, found: Any, generator: Any) -> None:
        recorder = self.recorder
        by, found = type(found).__module__, _of_numpy(found)
        own = type(found) is torch.Tensor and found.dim() and found.shape[0] > 1 and found.layout is torch.strided
        if generator is not None or not own or recorder.data.current is not None or capturing():
            return
        if not recorder.models.known or found.numel() < 2 or self._is_parameters(found.shape):
            return
        rows = digest.rows_of([found])
        if rows is not None:
            fact = DrawnTensor(recorder.tick(), recorder.place(2), tuple(found.shape), by)
            recorder.record.drawn.append(fact)
            recorder.later(fact, "value", digest.of_batch(rows))

    def _is_parameters(self, shape: Any) -> bool:
        """Whether a model has a parameter of this shape, for which the noise may be."""
        return any(each.shape == shape for known in self.recorder.models.known.values() for each in known.tensors())

    def close(self) -> None:
        pass


def _of_numpy(found: Any) -> Any:
    """An array as a tensor that shares its bytes; anything else itself."""
    if type(found).__module__ != "numpy" or getattr(found, "ndim", 0) == 0 or found.dtype.kind not in "fiu":
        return found
    return torch.from_numpy(found) if found.dtype.kind != "u" else found
