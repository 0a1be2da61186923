"""Whether a CUDA error has broken this process's context: then every later call of CUDA fails, for good.

A device-side assert or an illegal address does that (CUDA's "sticky" errors; its Programming Guide, "Error Checking"),
an allocation that fails does not. Which it was is asked of CUDA itself: a context that is broken says so at once.
"""

from __future__ import annotations

import re
import sys
import threading

from nbddp.worker import failure

OF_CUDA = re.compile(r"cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|triton|accelerator", re.IGNORECASE)
ASKED = 2.0  # seconds; a context that is well, and still at work, may take longer to answer


def broken(error: BaseException) -> str:
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

    asking = threading.Thread(target=ask, name="nbddp-context", daemon=True)
    asking.start()
    asking.join(ASKED)
    return said[0] if said else ""


def _is_of_cuda(error: BaseException) -> bool:
    """Whether CUDA or a library on it is named in an exception of the chain that is no lack of memory."""
    out_of_memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is e for e in chain):
        chain.append(current)
        current, _ = failure.before(current)
    return any(
        OF_CUDA.search(f"{failure.type_name(e)} {failure.message(e)}")
        for e in chain
        if not issubclass(type(e), out_of_memory)
    )
