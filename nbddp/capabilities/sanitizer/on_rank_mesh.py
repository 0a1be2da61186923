"""A rank's record of DTensors: inputs that are declared to be the same on all ranks of a mesh, and shards.

Tensor parallelism takes each rank's input for the same one. `Replicate` is a promise of the program, which torch does
not check by default.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from nbddp.capabilities.sanitizer import on_rank_digest as digest
from nbddp.capabilities.sanitizer.on_rank_models import is_whole, ranks_of
from nbddp.capabilities.sanitizer.recording import CalledFunction
from nbddp.compat.extra import torch as torch_extra
from nbddp.worker.gpus import capturing

KEPT = 32  # calls
TENSORS = "torch.distributed.tensor"
ARGUMENTS = ("local_tensor", "device_mesh", "placements")  # of DTensor.from_local, in their order


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

        def from_local(*args: Any, **kwargs: Any) -> Any:
            if not compiling() and self.recorder.on and self.calls < KEPT and not kwargs.get("run_check"):
                self._note(*(args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(ARGUMENTS)))
            return original(*args, **kwargs)

        return from_local

    @digest.safely
    def _note(self, local: Any, mesh: Any, placements: Any) -> None:
        training = torch.is_grad_enabled() and not torch_extra.in_backward()
        if not training or capturing() or type(local) is not torch.Tensor or not is_whole(local) or not local.numel():
            return
        if mesh is None or local.is_complex() or local.layout is not torch.strided:
            return
        same = [i for i, each in enumerate(placements or ()) if each.is_replicate() and mesh.size(i) > 1]
        if not same:
            return
        self.calls += 1
        place, sample = self.recorder.place(2), digest.sample([local.detach()])
        steps = sum(self.recorder.record.step_counts.values())
        for dim in same:
            group = ranks_of(mesh.get_group(dim))
            detail: list[Any] = [list(group), str(list(local.shape)), steps]
            fact = CalledFunction("replicated", self.recorder.tick(), place, detail)
            if self.recorder.keep(self.recorder.record.calls, fact):
                self.recorder.later(fact.detail, "append", sample)

    def close(self) -> None:
        pass
