"""Tries every seam of `nbddp.compat.probes` in a process that is thrown away, and says what came out.

`python -m nbddp.capabilities.doctor.probe_runner` writes one line of JSON per seam as soon as it is tried, so that a
trial that ends the process takes no other along. A pool has a copy of its warm process do it (`in_copy`), into a file.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Mapping
from typing import IO, Any

from nbddp.agent import hardware
from nbddp.capabilities.doctor import (
    probes_ddp,
    probes_ipykernel,
    probes_torch,
)
from nbddp.compat import ipykernel, ipyparallel
from nbddp.compat import torch as torch_compat
from nbddp.compat.probes import SEAMS, Failed, ProbeResult, Untried, absent
from nbddp.protocol.capability import load, rows
from nbddp.worker import flight

NAMES: dict[str, tuple[str, ...]] = {**torch_compat.NAMES, **ipykernel.NAMES, **ipyparallel.NAMES}
TRIALS: dict[str, Callable[[], None]] = {
    **{key: load(target) for row in rows() for key, target in row.probes.items()},
    **probes_torch.TRIALS, **probes_ddp.TRIALS, **probes_ipykernel.TRIALS,
}  # fmt: skip

PATIENCE = 100.0  # seconds for all trials; a first import of torch from a slow disk takes most of it


def tried(key: str) -> ProbeResult:
    """What comes of trying a seam. Whatever its trial raises is the answer."""
    if key not in TRIALS:
        return ProbeResult(True, None, "nothing here uses it")
    lacking = absent(NAMES.get(key, ()))
    if lacking:
        return ProbeResult(False, False, lacking)
    try:
        TRIALS[key]()
    except Untried as e:
        return ProbeResult(True, None, str(e))
    except Failed as e:
        return ProbeResult(key in NAMES, False, str(e))
    except Exception as e:
        return ProbeResult(key in NAMES, False, f"{type(e).__name__}: {e}")
    return ProbeResult(True, True)


def machine() -> dict[str, Any]:
    """What of this machine matters: cores that this process may use, bytes of memory, the GPUs that torch sees."""
    import psutil
    import torch

    return {
        "cores": len(hardware.allowed_cores()),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def report(out: IO[str]) -> None:
    """Try all seams; a line for each, and one for the machine. A trial that never ends, ends the process."""
    with open(os.devnull, "w") as nowhere:  # a thread in C does it, which needs no interpreter
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=nowhere)
        _report(out)
        faulthandler.cancel_dump_traceback_later()


def _report(out: IO[str]) -> None:
    flight.switch_on()

    def say(**message: Any) -> None:
        print(f"\n{json.dumps(message)}", file=out, flush=True)  # a library may have begun a line

    for seam in SEAMS:
        verdict = tried(seam.key)
        say(seam=seam.key, present=verdict.present, works=verdict.works, why=verdict.why)
    say(machine=machine())


def in_copy(request: Mapping[str, Any]) -> int:
    """Report into the file `into`, which is there as soon as it is whole; as a child of the agent."""
    if hasattr(os, "nice"):
        os.nice(19)  # the ranks that start meanwhile come first
    with open(request["part"], "w", encoding="utf-8") as out:
        report(out)
    os.replace(request["part"], request["into"])
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


def main() -> None:
    with os.fdopen(os.dup(1), "w") as out:  # some trials write to descriptors 1 and 2
        report(out)
    os._exit(0)  # torch's own clean-up at exit takes longer than everything else


if __name__ == "__main__":
    main()
