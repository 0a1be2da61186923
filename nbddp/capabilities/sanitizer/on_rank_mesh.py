"""A rank's record of DTensors: inputs that are declared to be the same on all ranks of a mesh, and shards.

Tensor parallelism takes each rank's input for the same one. `Replicate` is a promise of the program, which torch does
not check by default.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_models import ranks_of
from nbddp.capabilities.sanitizer.recording import CalledFunction
from nbddp.compat.extra import torch as torch_extra
from nbddp.worker.gpus import capturing

KEPT = 32  # calls
TENSORS = "torch.distributed.tensor"


class MeshInputs:
    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.calls = 0

    def install(self) -> None:
        kind = getattr(sys.modules.get(TENSORS), "DTensor", None)
        if kind is not None:
            self.recorder.wrap(kind, "from_local", self._from_local, graphs=True)

    def _from_local(self, original: Any) -> Any:
        compiling = torch.compiler.is_compiling

        def from_local(local: Any, mesh: Any = None, placements: Any = None, *args: Any, **kwargs: Any) -> Any:
            checks = kwargs.get("run_check", args[0] if args else False)
            if not compiling() and self.recorder.on and self.calls < KEPT and mesh is not None and not checks:
                self._note(local, mesh, placements or ())
            return original(local, mesh, placements, *args, **kwargs)

        return from_local

    @digest.safely
    def _note(self, local: Any, mesh: Any, placements: Any) -> None:
        training = torch.is_grad_enabled() and not torch_extra.in_backward()
        if not training or capturing() or type(local) not in (torch.Tensor, torch.nn.Parameter) or not local.numel():
            return
        same = [i for i, each in enumerate(placements) if each.is_replicate() and mesh.size(i) > 1]
        if not same:
            return
        self.calls += 1
        place, sample = self.recorder.place(2), digest.sample([local.detach()])
        for dim in same:
            group = ranks_of(mesh.get_group(dim))
            fact = CalledFunction("replicated", self.recorder.tick(), place, [list(group), str(list(local.shape))])
            if self.recorder.keep(self.recorder.record.calls, fact):
                self.recorder.later(fact.detail, "append", sample)

    def close(self) -> None:
        pass
