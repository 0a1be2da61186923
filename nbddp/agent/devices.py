"""The accelerators of this machine, as NVML tells them, without touching CUDA.

NVML counts GPUs in PCI order; CUDA counts them fastest first unless
CUDA_DEVICE_ORDER=PCI_BUS_ID. Where the two orders may differ (GPUs of several models)
the facts of a GPU are left out rather than guessed. No GPU, no driver: an empty list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pynvml


def gpus(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """One dict per visible GPU, in CUDA's order: the fields of `topology.Device`."""
    return visible(_all_gpus(), env)


def visible(found: list[dict[str, Any]], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Apply CUDA_VISIBLE_DEVICES (indices or UUIDs; CUDA stops at the first invalid entry)."""
    same_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g["name"] for g in found}) <= 1
    listed = env.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(len(found))] if listed is None else _entries(listed, found)
    devices = []
    for position, entry in enumerate(entries):
        if entry.isdigit():
            facts = found[int(entry)] if same_order else {}
        else:
            facts = next(g for g in found if g["uuid"].startswith(entry))
        devices.append({**facts, "index": position, "mask": entry})
    return devices


def _entries(listed: str, found: list[dict[str, Any]]) -> list[str]:
    taken: list[str] = []
    for entry in (e.strip() for e in listed.split(",")):
        by_index = entry.isascii() and entry.isdigit() and int(entry) < len(found)
        by_uuid = bool(entry) and sum(g["uuid"].startswith(entry) for g in found) == 1
        if not (by_index or by_uuid) or (taken and by_index != taken[0].isdigit()):
            break
        if entry in taken:  # a repeated entry leaves no device at all: torch.cuda._parse_visible_devices
            return []
        taken.append(entry)
    return taken


def _all_gpus() -> list[dict[str, Any]]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # no driver or no GPU: an ordinary CPU machine
    try:
        return [_facts(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _facts(handle: Any) -> dict[str, Any]:
    return {
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "memory": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "bus_id": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
