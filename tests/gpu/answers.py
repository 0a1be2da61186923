"""The child's half of `record.py`: runs cases and writes one line of JSON after each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.gpu import asked, models

Said = dict[str, Any]


def child(job: Any, a: Any) -> None:
    """One child's life. It never returns to the parent's code."""
    code = 1
    try:
        os.setsid()
        out = os.open(job.words, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port), RANK=str(job.rank), WORLD_SIZE=str(job.world)
        )
        os.environ.update(LOCAL_RANK=str(job.rank), LOCAL_WORLD_SIZE=str(job.world))
        if a.simulate:
            simulate(a.simulate)
        with open(job.parts, "w") as parts:
            Cases(job, a, parts).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def simulate(cards: str) -> None:
    """Begins the simulation in this child."""
    from nbddp.capabilities.simulated_gpus import cards as known
    from nbddp.capabilities.simulated_gpus.on_rank import install

    install(known.cards_of(cards))


class Cases:
    """The cases of one child."""

    def __init__(self, job: Any, a: Any, parts: io.TextIOBase):
        self.job, self.a, self.parts = job, a, parts
        self.spaces: Said = {}

    def run(self) -> None:
        """Each case, until one leaves the GPU unusable."""
        if self.job.group in ("ranks", "two_ranks"):
            dist.init_process_group("nccl")
        kinds = {"questions": self.question, "programs": self.program, "sequences": sequence, "operators": operator}
        ask = kinds.get(self.job.group, self.wrong)
        if self.job.group in ("memory", "limited"):
            ask = self.memory
        if self.job.group == "trainings":
            ask = lambda text: train(text, self.a.steps, bool(self.a.simulate))  # noqa: E731
        for name, text in self.job.cases.items():
            self.line({"begin": name})
            began, at = time.monotonic(), os.fstat(1).st_size
            said = {"name": name, "program": text, **self.caught(ask, text)}
            sys.stdout.flush()
            said["seconds"] = round(time.monotonic() - began, 3)
            said["printed"] = printed(self.job.words, at)
            usable = afterwards()
            if usable:
                said["afterwards"] = usable
            self.line(said)
            if usable:
                break

    def line(self, row: Said) -> None:
        """One line for the parent."""
        self.parts.write(json.dumps(row, default=repr) + "\n")
        self.parts.flush()

    def caught(self, ask: Any, text: str) -> Said:
        """What the case answered or raised."""
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                said = ask(text)
            except BaseException as e:
                said = refused(e)
        if heard:
            said["warnings"] = [f"{w.category.__name__}: {w.message}"[:1500] for w in heard][:5]
        return said

    def question(self, text: str) -> Said:
        """An expression's value, in words."""
        value = eval(text, {"torch": torch})
        return {"answer": str(value) if isinstance(value, str) else repr(value)[:12000], "type": type(value).__name__}

    def program(self, text: str) -> Said:
        """A whole program, after variables of its environment; its printed lines are the answer."""
        import runpy

        *variables, path = text.split("|")
        os.environ.update(one.split("=", 1) for one in variables)
        runpy.run_path(path, run_name="__main__")
        return {}

    def memory(self, text: str) -> Said:
        """A wrong program on a GPU that holds nothing of the case before."""
        torch.cuda.init()
        if self.job.group == "limited":
            torch.cuda.set_per_process_memory_fraction(1.0)
        empty()
        return self.wrong(text)

    def wrong(self, text: str) -> Said:
        """A wrong program's answer, if it has one."""
        space: Said = {"FOLDER": str(self.job.parts.parent), "__name__": "case"}
        before = asked.BEFORE if "VISIBLE_DEVICES" in text else asked.BEFORE + asked.TENSORS
        exec(compile(before, "before", "exec"), space)
        exec(compile(text, "case", "exec"), space)
        return {"answer": repr(space["answer"])[:6000]} if "answer" in space else {"answer": "no error"}


def refused(e: BaseException) -> Said:
    """An exception in words: its type, its message, the last frames of its traceback."""
    frames = [f"{os.path.basename(f.filename)} {f.name}: {f.line}" for f in traceback.extract_tb(e.__traceback__)]
    said: Said = {
        "type": type(e).__name__,
        "module": type(e).__module__,
        "message": str(e)[:6000],
        "frames": frames[-4:],
    }
    if e.__cause__ is not None:
        said["cause"] = f"{type(e.__cause__).__name__}: {e.__cause__}"[:2000]
    return said


def printed(path: Any, at: int) -> str:
    """What was printed since, the beginning of it."""
    with open(path, errors="replace") as f:
        f.seek(at)
        return f.read(6000)


def afterwards() -> str:
    """Puts the settings back; says what is wrong where the GPU cannot be used any more."""
    torch.use_deterministic_algorithms(False)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    warnings.resetwarnings()
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.set_sync_debug_mode(0)
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
        return ""
    except BaseException as e:
        return f"{type(e).__name__}: {e}"[:2000]


def counted() -> list[int]:
    """Allocated, reserved, their peaks, requested, blocks, segments, and what the driver says is free."""
    s = torch.cuda.memory_stats()
    keys = (
        "allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak",
        "reserved_bytes.all.peak", "requested_bytes.all.current", "allocation.all.current", "segment.all.current",
        "inactive_split_bytes.all.current",
    )  # fmt: skip
    return [s.get(k, -1) for k in keys] + [torch.cuda.mem_get_info()[0]]


def empty() -> None:
    """A beginning that is the same for each: nothing cached, no workspaces, no peaks."""
    import gc

    gc.collect()
    with contextlib.suppress(Exception):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def sequence(text: str) -> Said:
    """Counters after each step of a script of allocations."""

    def setup() -> None:
        dist.init_process_group("nccl")

    def block(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=torch.uint8, device="cuda")

    torch.cuda.init()
    empty()
    space: Said = {"torch": torch, "B": block, "setup": setup}
    rows: list[Any] = [["", *counted()]]
    for step in text.split("; "):
        try:
            exec(step, space)
        except Exception as e:
            rows.append([step, f"{type(e).__name__}: {e}"[:500]])
            continue
        rows.append([step, *counted()])
    return {"rows": rows, "stats": {k: v for k, v in torch.cuda.memory_stats().items() if v and ".all." in k}}


def operator(text: str) -> Said:
    """What one operator keeps and its peak, forward and backward, the first and the second time."""
    begin, program = split_at_result(text)
    empty()
    turns = []
    for _ in range(2):
        space: Said = {"torch": torch, "F": F, "R": 1 << 22, "W": weight, "P": parameters, "S": stepped, "H": half}
        x = space["x"] = eval(begin, space)
        turns.append(measured(program, space))
        del x, space
    torch.cuda.synchronize()
    return {"turns": turns}


def split_at_result(text: str) -> tuple[str, str]:
    """The program that makes x and the one that uses it: the last ` = ` at the depth of no bracket."""
    depth, at = 0, -1
    for i, letter in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if depth == 0 and text.startswith(" = ", i):
            at = i
            break
    return text[:at], text[at + 3 :]


def measured(program: str, space: Said) -> list[list[int]]:
    """Bytes kept and at the peak: forward, then backward."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = eval(program, space)
    rows = [[torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]]
    if isinstance(y, torch.Tensor) and y.requires_grad:
        torch.cuda.reset_peak_memory_stats()
        y.sum().backward()
        rows.append([torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before])
    return rows


def weight(*shape: int) -> torch.Tensor:
    """A parameter of this shape."""
    return torch.rand(*shape, device="cuda", requires_grad=True)


def parameters(count: int, size: int) -> list[torch.Tensor]:
    """Parameters with gradients."""
    found = [weight(size) for _ in range(count)]
    for p in found:
        p.grad = torch.ones_like(p)
    return found


def stepped(found: list[torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW after its first step."""
    optimizer = torch.optim.AdamW(found)
    optimizer.step()
    return optimizer


def half(f: Any) -> Any:
    """Calls under autocast to float16."""
    with torch.autocast("cuda", dtype=torch.float16):
        return f()


def train(name: str, steps: int, simulated: bool) -> Said:
    """Losses, counters between the parts, the first step's allocations, the driver's numbers."""
    row = models.TRAININGS[name]
    torch.manual_seed(0)
    torch.cuda.init()
    empty()
    notes: list[Any] = [["start", *counted()]]
    model = row.model().cuda()
    notes.append(["model", *counted()])
    batch = tuple(t.cuda() for t in row.data())
    notes.append(["batch", *counted()])
    if row.ddp:
        dist.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
        notes.append(["DDP", *counted()])
    optimizer = row.optimizer(model)
    scaler = torch.amp.GradScaler("cuda", enabled=row.half is torch.float16)
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=200000)
    losses, seconds, trace = [], [], []
    for step in range(steps):
        began = time.monotonic()
        losses.append(one_step(row, model, batch, optimizer, scaler, notes, step))
        seconds.append(round(time.monotonic() - began, 4))
        if step == 0:
            trace = allocations()
            torch.cuda.memory._record_memory_history(enabled=None)
    s = torch.cuda.memory_stats()
    return {
        "losses": losses,
        "notes": notes,
        "seconds of steps": seconds,
        "peak allocated": torch.cuda.max_memory_allocated(),
        "peak reserved": torch.cuda.max_memory_reserved(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "stats": {k: v for k, v in s.items() if v and (".all." in k or "num" in k)},
        "nvidia-smi": "" if simulated else driver_says(),
        "allocations": trace,
    }


def one_step(row: Any, model: Any, batch: Any, optimizer: Any, scaler: Any, notes: list[Any], step: int) -> float:
    """One step of training, its counters written between the parts."""
    loss = row.loss(model, batch)
    notes.append([f"forward {step}", *counted()])
    scaler.scale(loss).backward()
    notes.append([f"backward {step}", *counted()])
    scaler.step(optimizer)
    scaler.update()
    notes.append([f"step {step}", *counted()])
    optimizer.zero_grad()
    value = float(loss)
    del loss
    notes.append([f"end {step}", *counted()])
    return value


def allocations() -> list[Any]:
    """The allocator's events: what, bytes, and the torch function that asked."""
    events = torch.cuda.memory._snapshot().get("device_traces") or [[]]
    kinds = {"alloc": "+", "free_completed": "-", "segment_alloc": "++", "segment_free": "--"}
    rows: list[Any] = []
    for e in events[0]:
        if e["action"] in kinds:
            where = next((f for f in e.get("frames", ()) if f["filename"].endswith(".py")), None)
            asks = (
                f"{re.sub('.*/', '', where['filename'])}:{where['line']} {where['name']}"
                if where and e["action"] == "alloc"
                else ""
            )
            rows.append([kinds[e["action"]], e["size"], asks] if asks else [kinds[e["action"]], e["size"]])
    return rows


def driver_says() -> str:
    """nvidia-smi's numbers of now."""
    ask = ["nvidia-smi", "--query-gpu=memory.used,memory.total,memory.free,memory.reserved", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{type(e).__name__}: {e}"
