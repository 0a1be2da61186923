"""The part of a rank that has simulated GPUs: installs them before any program, and explains mistakes with devices.

A mistake gets a sentence under torch's message: what is where, and which line made it. Only what is seen is said: names
in the failing line, what they hold, and the one line that assigns each.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from nbddp.capabilities.simulated_gpus.cards import cards_of
from nbddp.capabilities.simulated_gpus.on_rank import SHARED, install
from nbddp.deadlock.on_rank import call_log
from nbddp.launch.machine import listed

if TYPE_CHECKING:
    from nbddp.errors import Raised
    from nbddp.worker.parts import RankWorker

CPU = "cpu"
MIXED = (  # torch's messages of operands on several devices
    r"Expected all tensors to be on the same device",
    r"Input type \(torch\.(cuda\.)?\w+\) and weight type \(torch\.(cuda\.)?\w+\) should be the same",
    r"Expected (weight|index|input|target|mask|condition|self) to be on the same device",
)
NO_SUCH = r"invalid device ordinal"
NOT_ON_GPU = r"No backend type associated with device type cpu"
TWICE = r"Duplicate GPU detected|Multiple Ranks are using the same GPU"  # the second since NCCL 2.30
NOT_THERE = {  # message → what simulated GPUs lack
    r"No module named 'triton|working triton installation|active drivers \(": (
        "Triton's kernels run on a GPU only: simulated GPUs refuse them, with Triton installed too"
    ),
    r"CUDA driver version is insufficient|no CUDA-capable device|CUDA driver library cannot be found|NVRTC library"
    r"|get_current_cuda_stream": ("a library asked for NVIDIA's driver itself, and simulated GPUs have none"),
}
WORD = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")
BOUND = re.compile(r"^(\s*[\w*][\w\s,*]*=)+(?!=)")  # names that a line assigns: what they held is no operand


def part(worker: RankWorker) -> SimulatedDevices:
    """Raises RuntimeError, and has changed nothing, if this torch is not laid out as known."""
    _share_memory(worker.log_path)
    install(cards_of(str(worker.pool_options["simulate_gpus"])))
    call_log.STANDS_FOR["nccl"] = "gloo"
    return SimulatedDevices()


def _share_memory(log: str) -> None:
    """The ranks of a node have their GPUs' memory together: they write what they take in one file of the pool's."""
    name = f"simulated-gpus-{os.environ.get('GROUP_RANK', '0')}"
    os.environ[SHARED] = os.path.join(os.path.dirname(log), name)


class SimulatedDevices:
    """Says more of exceptions about devices. `_frames`: of the exception that is read, what its user's frames held."""

    def __init__(self) -> None:
        self._frames: list[list[Placed]] = []

    def copied(self) -> None:
        """The copy has no thread of autograd's, so backward runs on the one that calls it; and it writes no other
        process's row of what the GPUs hold."""
        import torch

        from nbddp.capabilities.simulated_gpus.on_rank import devices, memory

        devices.forked = False
        memory.ledger.leave()
        torch.autograd.set_multithreading_enabled(False)

    def values(self, frame: FrameType, line: str) -> list[tuple[str, str]]:
        """Adds nothing to the values of a frame; notes where they are."""
        import torch

        self._frames.append(placed(frame, line, torch))
        return []

    def note(self, raised: Raised) -> str:
        import torch

        frames, self._frames = self._frames, []
        gpus = torch.cuda.device_count()
        return explain(raised, frames, gpus, torch.cuda.current_device() if gpus else 0)


# -- what is said of a mistake -----------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """What a name in the failing line holds: a tensor, or a module by its parameters. line: the one that assigns it; 0:
    not known."""

    name: str
    device: str
    line: int = 0
    is_module: bool = False

    def describe(self) -> str:
        """`x (made in line 9) is on cpu`, `the parameters of net (made in line 8) are on cuda:1`."""
        made = f" (made in line {self.line})" if self.line else ""
        said = f"the parameters of {self.name}{made} are" if self.is_module else f"{self.name}{made} is"
        return f"{said} on {self.device}"


def explain(raised: Raised, frames: Sequence[Sequence[Placed]], gpus: int, current: int) -> str:
    """The sentence, or empty. frames: what the user's lines named, outermost first; gpus: how many this process sees;
    current: the number of its current one."""
    said = raised.message
    if any(re.search(message, said) for message in MIXED):
        mixed = (found for found in frames if len({one.device for one in found}) > 1)
        return _words(next(mixed, ()))
    if re.search(NO_SUCH, said):
        return f"this process sees {_gpus(gpus)}"
    lacks = next((words for message, words in NOT_THERE.items() if re.search(message, said)), "")
    if lacks:
        return lacks
    if re.search(NOT_ON_GPU, said):
        here = [one for one in (frames[-1] if frames else ()) if one.device == CPU]
        return f"{_words(here)}, and nccl takes tensors on GPUs only" if here else ""
    own = os.environ.get("LOCAL_RANK", "")
    if re.search(TWICE, said) and own.isdigit() and int(own) != current and int(own) < gpus:
        return (
            f"the current GPU of this rank is cuda:{current}, and its LOCAL_RANK is {own}: "
            f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) gives each rank its own'
        )
    return ""


def placed(frame: FrameType, line: str, torch: Any) -> list[Placed]:
    """What the names of a line hold in this frame, where that is on one device."""
    found = []
    for name in dict.fromkeys(WORD.findall(BOUND.sub("", line))):
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        devices = _devices(value, torch)
        if len(devices) == 1:
            is_module = issubclass(type(value), torch.nn.Module)
            found.append(Placed(name, devices.pop(), _made(frame, name), is_module))
    return found


def _devices(value: object, torch: Any) -> set[str]:
    if issubclass(type(value), torch.Tensor):
        return {str(value.device)}  # type: ignore[attr-defined]
    if issubclass(type(value), torch.nn.Module):
        return {str(p.device) for p in value.parameters()}  # type: ignore[attr-defined]
    return set()


def _made(frame: FrameType, name: str) -> int:
    """The line of this frame's function, or of its cell or file, that alone assigns the name before it failed."""
    body: ast.AST = _parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    if frame.f_code.co_name != "<module>":
        first = frame.f_code.co_firstlineno
        functions = [n for n in ast.walk(body) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        body = next((f for f in functions if _first_line(f) == first), ast.Module([], []))
    made = list(_assigned(body, name))
    return made[0] if len(made) == 1 and made[0] < frame.f_lineno else 0


@functools.lru_cache(1)  # each name of a line asks
def _parsed(source: str) -> ast.Module:
    """Without statements for a line magic, or a file that has changed."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def _assigned(node: ast.AST, name: str) -> Iterable[int]:
    """Lines that bind a name, functions within left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(child, ast.Name) and child.id == name and isinstance(child.ctx, ast.Store):
            yield child.lineno
        yield from _assigned(child, name)


def _words(found: Sequence[Placed]) -> str:
    return listed([one.describe() for one in found])


def _gpus(number: int) -> str:
    if number == 0:
        return "no GPU"
    return "one GPU, cuda:0" if number == 1 else f"{number} GPUs, cuda:0 to cuda:{number - 1}"
