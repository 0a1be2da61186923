"""A rank's record of random numbers that a program draws by torch's or numpy's own generator: noise, time steps, masks.

Draws of a loader's fetch do not count. Nor does a draw by a generator that the program names, which the ranks may
share on purpose.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.recording import DrawnTensor
from nbddp.worker.gpus import capturing

DRAWS = ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "bernoulli")
OF_NUMPY = ("rand", "randn", "normal", "standard_normal", "uniform", "random", "choice", "beta")
KEPT = 48  # tensors that are looked at
ROWS = 1 << 16  # of such a one


class NumpyDraw:
    """A function of numpy's, which is pickled as itself."""

    def __init__(self, original: Any, draw: Any) -> None:
        self.original, self.draw = original, draw

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.draw(*args, **kwargs)

    def __reduce__(self) -> Any:
        return self.original.__reduce__()


class NoiseWatcher:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.process = os.getpid()

    def install(self) -> None:
        for name in DRAWS:
            self.recorder.wrap(torch, name, self._draw, graphs=True)
        if "numpy" in sys.modules and hasattr(sys.modules["numpy"], "random"):
            for name in OF_NUMPY:
                self.recorder.wrap(sys.modules["numpy"].random, name, self._draw_of_numpy, graphs=True)

    def _draw(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def draw(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not compiling() and self.recorder.on and len(self.recorder.record.drawn) < KEPT:
                self._note(found, kwargs.get("generator"))
            return found

        return draw

    def _draw_of_numpy(self, original: Any) -> Any:
        return NumpyDraw(original, self._draw(original))

    @digest.safely
    def _note(self, found: Any, generator: Any) -> None:
        recorder = self.recorder
        if os.getpid() != self.process:
            return  # a process that the program has forked, where a call of torch may hang
        by, found = type(found).__module__, _of_numpy(found)
        own = (
            type(found) is torch.Tensor and found.dim() and 1 < found.shape[0] <= ROWS and found.layout is torch.strided
        )
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
    """An array of floats as a tensor that shares its bytes; anything else itself. Whole numbers may choose from what is
    a rank's own."""
    if type(found).__module__ != "numpy" or not found.ndim or found.dtype not in ("float32", "float64"):
        return found
    return torch.from_numpy(found)
