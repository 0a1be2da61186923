"""The facts of a host that `%ddp doctor` asks for, in a process of its own. A name server or a driver may take seconds
to answer, and the agent's pings must not wait for that."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from itertools import combinations
from pathlib import Path

import pynvml

from nbddp.compat.extra.versions import versions
from nbddp.protocol.codec import Json

SHM, INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")
LIMITS = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "memlock": "RLIMIT_MEMLOCK"}
P2P = {
    pynvml.NVML_P2P_STATUS_OK: "",
    pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "the chipset does not support it",
    pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "the GPU does not support it",
    pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "their PCIe topology does not support it",
    pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "the driver's settings disable it",
    pynvml.NVML_P2P_STATUS_NOT_SUPPORTED: "not supported",
}


def main(request: Json) -> int:
    """Write the facts on stdout, as a line of JSON."""
    print(json.dumps(facts()), flush=True)
    return 0


def facts() -> Json:
    """This host, as `capabilities.hosts.report` reads it."""
    return {
        "versions": versions(),
        "shm": list(shutil.disk_usage(SHM))[::2] if SHM.is_dir() else None,  # total and free bytes
        "limits": {name: _limit(constant) for name, constant in LIMITS.items()},
        "infiniband": INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        "name": socket.gethostname(),
        "name_at": named(socket.gethostname()),
        "root": os.geteuid() == 0,
        **peer_access(),
    }


def _limit(constant: str) -> list[int]:
    """Now, and at most; -1: no bound."""
    found = resource.getrlimit(getattr(resource, constant))
    return [-1 if value == resource.RLIM_INFINITY else value for value in found]


def named(name: str) -> list[str]:
    """The addresses that a name leads to here; none if it leads nowhere."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def peer_access() -> Json:
    """`p2p`: pairs of GPUs, by NVML's order, that do not read each other's memory, and why; `p2p_untold`: why that is
    not known."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no GPU, which the agent has told, or why not
        return {"p2p": [], "p2p_untold": ""}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        read = pynvml.NVML_P2P_CAPS_INDEX_READ
        found = [
            [i, j, P2P.get(pynvml.nvmlDeviceGetP2PStatus(handles[i], handles[j], read), "not known")]
            for i, j in combinations(range(len(handles)), 2)
        ]
        return {"p2p": [row for row in found if row[2]], "p2p_untold": ""}
    except pynvml.NVMLError as e:
        return {"p2p": [], "p2p_untold": str(e)}
    finally:
        pynvml.nvmlShutdown()
