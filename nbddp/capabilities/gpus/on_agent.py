"""The accelerators of this machine and the links between them, as NVML tells them, without touching CUDA.

NVML counts GPUs in PCI order; CUDA counts them fastest first unless
CUDA_DEVICE_ORDER=PCI_BUS_ID. Where the two orders may differ (GPUs of several models)
the facts of a GPU are left out rather than guessed. No GPU, no driver: an empty list.
A query that NVML refuses leaves out that fact alone, and a sentence says which and why.

Of a GPU that is divided (MIG) CUDA shows a process one instance: the first, or the first that CUDA_VISIBLE_DEVICES
names.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pynvml

from nbddp.errors import several
from nbddp.launch.machine import SELF, UNKNOWN

# One GPU: fields of `machine.Device`, and OURS: "position" in NVML's order; "links": position → code; "untold":
# fact → why not; "instances": those of a GPU that is divided.
Facts = dict[str, Any]
OURS = ("position", "links", "untold", "instances", "first_instance")
DRIVER = Path("/dev/nvidiactl")  # there if NVIDIA's driver is
MIG = "MIG-"
SWITCH, ELSEWHERE = -1, -2  # far ends of an NVLink, where that to a GPU is the GPU's position
AFFINITY_WORDS = 16  # of 64 NUMA nodes each
ANCESTORS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two GPUs on one board, behind its PCIe switch
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
ONE_INSTANCE = "CUDA shows a process only one MIG instance: --visible own gives each worker its own"
FIRST_INSTANCE = (
    "MIG is on and CUDA uses only the first instance: list the instances to use in "
    "CUDA_VISIBLE_DEVICES=MIG-…,MIG-… (nvidia-smi -L)"
)
UNORDERED = (
    "GPU details are not shown: the GPUs may be of several models, and CUDA numbers the fastest first; set "
    "CUDA_DEVICE_ORDER=PCI_BUS_ID to see them"
)


def told(env: Mapping[str, str]) -> Facts:
    """An agent's description of the GPUs of its machine, which only a torch with CUDA can use."""
    return gpus(env) if _torch_has_cuda() else node_facts([])


def _torch_has_cuda() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return importlib.util.find_spec("torch") is not None
    return bool(torch.backends.cuda.is_built())


def gpus(env: Mapping[str, str]) -> Facts:
    """The GPUs that CUDA sees, in its order: `devices` (fields of `machine.Device`), `links` (a row of
    codes per GPU, or no rows) and `untold` (sentences)."""
    try:
        return node_facts(visible(all_gpus(), env))
    except pynvml.NVMLError as e:
        absent = isinstance(e, pynvml.NVMLError_LibraryNotFound)
        hint = "; a container needs the driver capability utility for this" * absent
        return {"devices": [], "links": [], "untold": [f"NVML does not list the GPUs: {e}{hint}"]}


def node_facts(found: list[Facts]) -> Facts:
    """What `visible` found, as fields of `machine.Node`."""
    rows = [[SELF if a is b else _link(a, b) for b in found] for a in found]
    known = any(code not in (SELF, UNKNOWN) for row in rows for code in row)
    missing: dict[tuple[str, str], list[int]] = {}
    for facts in found:
        for fact, why in facts.get("untold", {}).items():
            missing.setdefault((fact, why), []).append(facts["index"])
    sentences = [f"NVML does not report the {f} of {several('GPU', gpus)}: {why}" for (f, why), gpus in missing.items()]
    unordered = [UNORDERED] if any(set(facts) == {"index", "mask"} for facts in found if not _is_mig(facts)) else []
    unordered += [ONE_INSTANCE] * (sum(map(_is_mig, found)) > 1)
    unordered += [FIRST_INSTANCE] * any(facts.get("first_instance", False) for facts in found)
    devices = [{k: v for k, v in facts.items() if k not in OURS} for facts in found]
    return {"devices": devices, "links": rows if known else [], "untold": unordered + sentences}


def _link(a: Facts, b: Facts) -> str:
    return str(a.get("links", {}).get(b.get("position"), UNKNOWN))


def visible(found: list[Facts], env: Mapping[str, str]) -> list[Facts]:
    """Apply CUDA_VISIBLE_DEVICES (indices, UUIDs or MIG instances; CUDA stops at the first invalid entry)."""
    instances = [i for facts in found for i in facts.get("instances", ())]
    if instances and "CUDA_VISIBLE_DEVICES" not in env:
        return [{**instances[0], "index": 0, "mask": instances[0].get("uuid", "0"), "first_instance": True}]
    same_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or _alike(found)
    listed = env.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(len(found))] if listed is None else _entries(listed, found)
    devices = []
    for position, entry in enumerate(entries):
        if entry.isdigit():
            facts = found[int(entry)] if same_order else {}
        elif entry.startswith(MIG):
            facts = next((i for i in instances if i.get("uuid") == entry), {})
        else:
            facts = next(g for g in found if g.get("uuid", "").startswith(entry))
        devices.append({**facts, "index": position, "mask": entry})
    return devices


def _is_mig(facts: Facts) -> bool:
    return str(facts["mask"]).startswith(MIG)


def _alike(found: list[Facts]) -> bool:
    """True if all GPUs are known to be of one model, or there is only one."""
    names = {g.get("name") for g in found}
    return len(found) <= 1 or (len(names) == 1 and None not in names)


def _entries(listed: str, found: list[Facts]) -> list[str]:
    taken: list[str] = []
    for entry in (e.strip() for e in listed.split(",")):
        by_index = entry.isascii() and entry.isdigit() and int(entry) < len(found)
        by_uuid = entry.startswith(MIG) or (
            bool(entry) and sum(g.get("uuid", "").startswith(entry) for g in found) == 1
        )
        if not (by_index or by_uuid) or (taken and by_index != taken[0].isdigit()):
            break
        if entry in taken:  # a repeated entry leaves no device at all: torch.cuda._parse_visible_devices
            return []
        taken.append(entry)
    return taken


def all_gpus() -> list[Facts]:
    """Raises NVMLError if a GPU cannot even be counted."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        if DRIVER.exists():
            raise
        return []  # no driver and no GPU: an ordinary CPU machine
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [{**_facts(h), "position": i, "instances": _instances(h)} for i, h in enumerate(handles)]
        _add_links(handles, found)
        return found
    finally:
        pynvml.nvmlShutdown()


def _instances(handle: Any) -> list[Facts]:
    """The MIG instances of a GPU that is divided: name, memory and UUID of each."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:  # a model that cannot be divided
        return []
    found = []
    for i in range(most):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
        except pynvml.NVMLError:  # no instance has this number
            continue
        facts = {k: v for k, v in _facts(instance).items() if k in ("name", "memory", "uuid")}
        found.append(facts)
    return found


def _facts(handle: Any) -> Facts:
    asked: dict[str, tuple[str, Callable[[], Any]]] = {
        "name": ("name", lambda: _text(pynvml.nvmlDeviceGetName(handle))),
        "memory": ("memory", lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "uuid": ("UUID", lambda: _text(pynvml.nvmlDeviceGetUUID(handle))),
        "bus_id": ("PCI bus id", lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
    }
    facts: Facts = {"links": {}, "untold": {}}
    for field, (words, ask) in asked.items():
        try:
            facts[field] = ask()
        except pynvml.NVMLError as e:
            facts["untold"][words] = str(e)
    _add_numa(handle, facts)
    return facts


def _add_numa(handle: Any, facts: Facts) -> None:
    """The NUMA node whose memory is next to the GPU, if there is one such."""
    try:
        words = pynvml.nvmlDeviceGetMemoryAffinity(handle, AFFINITY_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)
    except pynvml.NVMLError as e:
        facts["untold"]["NUMA node"] = str(e)
        return
    near = [64 * i + bit for i, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1]
    if len(near) == 1:
        facts["numa"] = near[0]
    else:
        facts["untold"]["NUMA node"] = f"it names {len(near)}"


def _add_links(handles: list[Any], found: list[Facts]) -> None:
    """Enter the code of every pair of GPUs into the `links` of both."""
    buses = {_bus(facts["bus_id"]): i for i, facts in enumerate(found) if "bus_id" in facts}
    ends = [_nvlinks(handle, facts["untold"], buses) for handle, facts in zip(handles, found, strict=True)]
    for a, b in combinations(range(len(found)), 2):
        code = _pair(handles, found, ends, a, b)
        found[a]["links"][b] = found[b]["links"][a] = code


def _pair(handles: list[Any], found: list[Facts], ends: list[dict[int, int] | None], a: int, b: int) -> str:
    """`NV18`, `PHB`, …; empty if it is not known. A pair of GPUs on a switch has the links of the one with fewer."""
    of_a, of_b = ends[a], ends[b]
    if of_a is None or of_b is None:
        return UNKNOWN
    links = of_a.get(b, 0) or of_b.get(a, 0) or min(of_a.get(SWITCH, 0), of_b.get(SWITCH, 0))
    if links:
        return f"NV{links}"
    try:
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b])
    except pynvml.NVMLError as e:
        for facts in (found[a], found[b]):
            facts["untold"]["PCIe links"] = str(e)
        return UNKNOWN
    return ANCESTORS.get(level, UNKNOWN)


def _nvlinks(handle: Any, untold: dict[str, str], buses: Mapping[str, int]) -> dict[int, int] | None:
    """Active NVLinks of a GPU: far end → how many. Empty where it has none; None where it is not known."""
    counts: dict[int, int] = {}
    try:
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = _state(handle, link)
            if state is None:
                break
            if state == pynvml.NVML_FEATURE_ENABLED:
                end = _far_end(handle, link, buses)
                counts[end] = counts.get(end, 0) + 1
    except pynvml.NVMLError as e:
        untold["NVLinks"] = str(e)
        return None
    return counts


def _state(handle: Any, link: int) -> int | None:
    """None past a GPU's last link, and for every link of a model without NVLink: NVML refuses to speak of them."""
    try:
        return int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
        return None


def _far_end(handle: Any, link: int, buses: Mapping[str, int]) -> int:
    if pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    return buses.get(_bus(_text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)), ELSEWHERE)


def _bus(bus_id: str) -> str:
    """A bus id for comparison: NVML writes the domain with four digits in one place and eight in another."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0')}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
