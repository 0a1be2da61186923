"""A rank's needs with GPUs: another backend where ranks share one, their current work, and a test of CUDA after an
error.

NCCL takes one rank per GPU, from version 2.30 on more if `--oversubscribe` allows it. So a default group is
gloo's there, which works on CUDA tensors, or NCCL's where that allows it; and who asks for an older NCCL by name gets a
sentence at once, where NCCL would say "Duplicate GPU detected" in the first collective.

After a device-side assert or an illegal address every later call of CUDA fails, for good (CUDA's "sticky" errors; its
Programming Guide, "Error Checking"); after an allocation that fails none does. Which it was is asked of CUDA itself: a
context that is broken reports it at once.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import traceback
from typing import Any

from nbddp.compat.thread import OwnThread
from nbddp.worker import failure

ALLOWS, ALLOW = (2, 30), "NCCL_MULTI_RANK_GPU_ENABLE"
GLOO = "cpu:gloo,cuda:gloo"
Keywords = dict[str, Any]
OF_CUDA = re.compile(r"cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|triton|accelerator", re.IGNORECASE)
ASKED = 2.0  # seconds; a context that is well, and still at work, may take longer to answer


# -- ranks that share one -------------------------------------------------------------------------


def with_backend(args: tuple[Any, ...], kwargs: Keywords) -> tuple[tuple[Any, ...], Keywords]:
    """Arguments of an init, with the backend that ranks which share GPUs can have."""
    asked = args[0] if args else kwargs.get("backend")
    found = backend(None if asked is None else str(asked), nccl_version())
    return ((found, *args[1:]), kwargs) if args else ((), {**kwargs, "backend": found})


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that is loaded, which may be newer than the one torch was built with; empty where there is none."""
    import torch

    found: Any
    try:
        return version_of_code(loaded_nccl())
    except (OSError, AttributeError):  # a torch that has NCCL inside itself, or that has none
        pass
    try:
        found = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return ()
    return tuple(found) if isinstance(found, tuple) else ()


def loaded_nccl() -> int:
    """The version code that this process's NCCL library tells. Raises OSError if none is loaded."""
    library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)):
        raise OSError("ncclGetVersion failed")
    return code.value


def version_of_code(code: int) -> tuple[int, int, int]:
    """23007 is 2.30.7; up to 2.8 it was 2708 for 2.7.8 (`NCCL_VERSION` in nccl.h)."""
    major = 10000 if code >= 10000 else 1000
    return code // major, code % major // 100, code % 100


def backend(asked: str | None, version: tuple[int, ...]) -> str | None:
    """The backend of a group whose ranks share GPUs. Raises RuntimeError for one that would refuse them."""
    if version >= ALLOWS and os.environ.get(ALLOW, "1") != "0":
        os.environ[ALLOW] = "1"
        return asked
    if not asked:
        return GLOO
    if "nccl" not in asked.lower():
        return asked
    which = "NCCL " + ".".join(map(str, version)) if version else "NCCL"
    raise RuntimeError(
        f"ranks share a GPU here (--oversubscribe), but {which} does not allow that. Call init_process_group() "
        "without a backend: it selects gloo, which accepts CUDA tensors. Or start as many ranks as there are GPUs"
    )


# -- what they are at -----------------------------------------------------------------------------


def at_work() -> bool:
    """Whether this process's current streams have work before them. One that is broken has none."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        return not all(torch.cuda.current_stream(device).query() for device in range(torch.cuda.device_count()))
    except RuntimeError:
        return False


def capturing() -> bool:
    """Whether a CUDA graph is captured, in which nothing else may be called."""
    import torch

    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


# -- after an error -------------------------------------------------------------------------------


def broken_context(error: BaseException) -> str:
    """What CUDA says after `error` if this process's context is broken; empty if it is not, or CUDA is not used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not _is_of_cuda(error):
        return ""
    said: list[str] = []

    def ask() -> None:
        try:
            torch.cuda.synchronize()
        except Exception as e:
            said.append(failure.message(e).partition("\n")[0])

    asking = OwnThread("nbddp-context", ask)
    if asking.begin():
        asking.join(ASKED)
    return said[0] if said else ""


def _is_of_cuda(error: BaseException) -> bool:
    """Whether CUDA or a library on it is named in an exception of the chain that is no lack of memory."""
    current: BaseException | None = error
    chain: list[BaseException] = []
    while current is not None and not any(current is e for e in chain):
        chain.append(current)
        current, _ = failure.before(current)
    named = (f"{failure.type_name(e)} {failure.message(e)}" for e in chain if not _lacks_memory(e))
    return any(map(OF_CUDA.search, named))


def _lacks_memory(error: BaseException) -> bool:
    return issubclass(type(error), getattr(sys.modules.get("torch"), "OutOfMemoryError", ()))


def let_go_of_memory(error: BaseException) -> None:
    """After an out-of-memory error: free what the failed calls held, and the allocator's cache.

    The traceback keeps every tensor of the functions it went through alive; the cell's own names stay.
    """
    if _lacks_memory(error):
        traceback.clear_frames(failure.traceback_of(error))
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            cuda.empty_cache()
