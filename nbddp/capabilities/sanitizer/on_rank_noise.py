"""A rank's record of random tensors that the program draws by torch's own generator: noise, time steps, masks.

Draws of a loader's fetch do not count. Nor does a draw by a generator that the program names, which the ranks may
share on purpose.
"""

from __future__ import annotations

from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.recording import DrawnTensor
from nbddp.worker.gpus import capturing

DRAWS = ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "bernoulli")
KEPT = 48  # tensors that are looked at


class NoiseWatcher:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def install(self) -> None:
        for name in DRAWS:
            self.recorder.wrap(torch, name, self._draw, graphs=True)

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
        own = type(found) is torch.Tensor and found.dim() and found.shape[0] > 1 and found.layout is torch.strided
        if generator is not None or not own or recorder.data.current is not None or capturing():
            return
        if not recorder.models.known or found.numel() < 2 or self._is_parameters(found.shape):
            return
        rows = digest.rows_of([found])
        if rows is not None:
            fact = DrawnTensor(recorder.tick(), recorder.place(2), tuple(found.shape))
            recorder.record.drawn.append(fact)
            recorder.later(fact, "value", digest.of_batch(rows))

    def _is_parameters(self, shape: Any) -> bool:
        """Whether a model has a parameter of this shape, for which the noise may be."""
        return any(each.shape == shape for known in self.recorder.models.known.values() for each in known.tensors())

    def close(self) -> None:
        pass
