"""What a program can observe of its model, its gradients and its process group is what it is without recording."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP

import nbddp
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool

CELL = """
import copy, hashlib, inspect, io, pickle, pickletools, sys, threading, warnings
import torch, torch._dynamo, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as entries
dist.init_process_group("gloo")
torch._dynamo.reset()
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x):
        return self.body(x)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(4, 64)
seen = {}
def see(name, look):
    try:
        seen[name] = look()
    except Exception as e:
        seen[name] = f"{type(e).__name__}: {e}"
def digest(data):
    return hashlib.sha256(data).hexdigest()
def parameters(model):
    return digest(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
def told(do):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        do()
    return [str(w.message) for w in said]
def train(call, model=model, optimizer=optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
    return parameters(model)

out = model(x)
see("hooks of an output", lambda: repr(out._backward_hooks))
see("hooks of parameters", lambda: [repr(p._backward_hooks) for p in model.parameters()])
see("warnings of saving an output", lambda: told(lambda: torch.save(out, io.BytesIO())))
out.sum().backward()
model(x).sum().backward()
group = model.process_group
see("backend", lambda: (dist.get_backend(), dist.get_backend(group), group.name(), dist.get_backend_config(group)))
see("group", lambda: (group is dist.group.WORLD, type(group).__name__, group.group_name, group.group_desc,
                      group.rank(), group.size(), len(dist.distributed_c10d._world.pg_map)))
see("logging data", lambda: {k: v for k, v in model._get_ddp_logging_data().items()
                             if "_time" not in k and k != "master_port"})
see("attributes", lambda: {k: type(v).__name__ for k, v in vars(model).items()})
see("repr", lambda: (repr(model), type(model.reducer).__name__))
see("pickle", lambda: sorted({arg for _, arg, _ in pickletools.genops(pickle.dumps(model)) if isinstance(arg, str)}))
see("what comes from a pickle", lambda: sorted(vars(pickle.loads(pickle.dumps(model)))))
see("copy", lambda: {k: type(v).__name__ for k, v in vars(copy.deepcopy(model)).items()})
def copied():
    other = copy.deepcopy(model)
    return train(other, other, torch.optim.SGD(other.parameters(), lr=0.1))
see("training of a copy", copied)
see("training", lambda: train(model))
see("training of a compiled model", lambda: train(torch.compile(model, backend="eager")))
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
see("graphs of a compiled step", lambda: [str(b.reason) for b in torch._dynamo.explain(step)(x).break_reasons])
def compiled_step():
    call = torch.compile(step, backend="eager")
    return [float(call(x).detach()) for _ in range(3)], parameters(model)
see("training in a compiled step", compiled_step)
see("functions of ours that were compiled", lambda: [
    f.__qualname__ for m in list(sys.modules.values()) if m.__name__.startswith("nbddp.worker.")
    for owner in (m, *filter(inspect.isclass, vars(m).values())) for f in vars(owner).values()
    if inspect.isfunction(f) and entries(inspect.unwrap(f).__code__)
])
see("compiled optimizer", lambda: torch.compile(optimizer.step, fullgraph=True, backend="eager")())
see("threads", lambda: sorted(t.name for t in threading.enumerate()))
see("source", lambda: [inspect.getsource(f) for f in (DDP.forward, DDP.register_comm_hook)])
see("signature", lambda: [str(inspect.signature(f)) for f in (DDP.forward, DDP.register_comm_hook)])
del model, out, group, optimizer
dist.destroy_process_group()
seen
"""
OBSERVED = (
    "hooks of an output", "hooks of parameters", "warnings of saving an output", "backend", "group", "logging data",
    "attributes", "repr", "pickle", "what comes from a pickle", "copy", "training of a copy", "training",
    "training of a compiled model", "graphs of a compiled step", "training in a compiled step", "compiled optimizer",
    "functions of ours that were compiled", "threads", "source", "signature",
)  # fmt: skip
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(pool: WorkerPool) -> tuple[Seen, Seen]:
    """What each rank saw without and with recording."""
    plain = list(pool.run_cell(CELL, want_value=True, timings=False, screen=NullScreen()))
    with pytest.raises(nbddp.BadInput, match="no DDP step has been recorded"):
        pool.timings()
    recorded = list(pool.run_cell(CELL, want_value=True, screen=NullScreen()))
    assert len(pool.timings().numbers()) > 3, "the second run was recorded"
    return plain, recorded


@pytest.mark.parametrize("what", OBSERVED)
def test_recording_is_not_to_be_seen(seen: tuple[Seen, Seen], what: str) -> None:
    plain, recorded = seen
    assert [rank[what] for rank in recorded] == [rank[what] for rank in plain]


def test_everything_that_was_looked_at_is_compared(seen: tuple[Seen, Seen]) -> None:
    plain, recorded = seen
    assert set(plain[0]) == set(recorded[0]) == set(OBSERVED)


def test_what_is_compared_is_what_was_meant(seen: tuple[Seen, Seen]) -> None:
    """Not two equal errors, and torch's own sources under the wraps."""
    for rank in seen[1]:
        assert rank["backend"] == ("gloo", "gloo", "gloo", "cpu:gloo,cuda:gloo")
        assert rank["logging data"]["backend_name"] == "gloo"
        assert rank["logging data"]["gloo_num_threads"] == 2
        assert rank["group"][0] is True
        assert rank["warnings of saving an output"] == rank["functions of ours that were compiled"] == []
        own: list[Callable[..., Any]] = [DDP.forward, DDP.register_comm_hook]
        assert rank["source"] == [inspect.getsource(f) for f in own]
        assert rank["signature"] == [str(inspect.signature(f)) for f in own]
        errors = {what for what in OBSERVED if isinstance(rank[what], str) and "Error: " in rank[what]}
        assert not errors


def test_recording_under_debug_level_detail_does_not_crash(pool: WorkerPool) -> None:
    """As DDP itself does there (torch 2.13): its logger takes the wrapped backend for gloo."""
    detail = """
import torch, torch.distributed as dist
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
del model
dist.destroy_process_group()
dist.set_debug_level(dist.DebugLevel.OFF)
"""
    pool.run_cell(detail, screen=NullScreen())
    assert pool.timings().numbers() == [0]
