"""Recorded machines: NVML's answers on machines with GPUs, given again by a stand-in for pynvml."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

SWITCH_BUSES = ("00000000:07:00.0", "00000000:08:00.0", "00000000:09:00.0", "00000000:0A:00.0")


@dataclass(frozen=True)
class Link:
    """One NVLink: whether it is up, what is at its far end (NVML's device type), and that one's bus id."""

    active: bool = True
    kind: int = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    bus: str = SWITCH_BUSES[0]


@dataclass(eq=False)  # NVML's errors cannot be compared with other things
class Gpu:
    """What NVML answers about one GPU; an exception stands for a query that it refuses."""

    name: Any
    memory: Any
    uuid: Any
    bus: Any
    numa: Any = (1,)  # words of the set of NUMA nodes
    links: list[Any] = field(default_factory=list)
    instances: list[Any] | None = None  # of MIG; None: a model that cannot be divided
    busy: Any = 0  # percent
    used: Any = 0  # bytes


class Recorded:
    """pynvml for one recorded machine: constants and errors are the real ones, no function is.

    ancestors: {(a, b): level} for a < b, or one level for all pairs.
    past_last: what NVML raises for a link that the model does not have.
    """

    def __init__(self, gpus: list[Gpu], ancestors: Any, past_last: int = pynvml.NVML_ERROR_INVALID_ARGUMENT):
        self.gpus, self.ancestors, self.past_last = gpus, ancestors, past_last
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)
        assert not name.startswith("nvml"), f"{name} was not recorded"
        return value

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if gpu.instances is None:
            raise refused()
        return [int(bool(gpu.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        if index >= len(gpu.instances or ()):
            raise refused(pynvml.NVML_ERROR_NOT_FOUND)
        return (gpu.instances or [])[index]

    def nvmlDeviceGetName(self, gpu: Gpu) -> Any:
        return given(gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(total=given(gpu.memory), used=given(gpu.used))

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=given(gpu.busy), memory=0)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> Any:
        return given(gpu.uuid)

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=given(gpu.bus))

    def nvmlDeviceGetMemoryAffinity(self, gpu: Gpu, size: int, scope: int) -> Any:
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        words = given(gpu.numa)
        return [*words, *[0] * (size - len(words))]

    def _link(self, gpu: Gpu, link: int) -> Link:
        if link >= len(gpu.links):
            raise pynvml.NVMLError(self.past_last)
        found: Link = given(gpu.links[link])
        return found

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        return int(self._link(gpu, link).active)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: Gpu, link: int) -> int:
        return int(given(self._link(gpu, link).kind))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: Gpu, link: int) -> Any:
        return SimpleNamespace(busId=self._link(gpu, link).bus)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Gpu, b: Gpu) -> int:
        pair = tuple(sorted((self.gpus.index(a), self.gpus.index(b))))
        level = self.ancestors[pair] if isinstance(self.ancestors, dict) else self.ancestors
        return int(given(level))


def given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def refused(code: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> Exception:
    error: Exception = pynvml.NVMLError(code)
    return error


def nvswitch_machine() -> Recorded:
    """Eight H100 on four NVSwitches, 18 links each; GPUs 0–3 on NUMA node 0, 4–7 on 1."""
    buses = ("19", "3B", "4C", "5D", "9B", "BB", "CB", "DB")
    gpus = [
        Gpu(
            name="NVIDIA H100 80GB HBM3",
            memory=85_520_809_984,
            uuid=f"GPU-{i}{i}{i}{i}",
            bus=f"00000000:{bus}:00.0".encode(),  # older bindings answer in bytes
            numa=(1 << i // 4,),
            links=[Link(bus=SWITCH_BUSES[k % 4]) for k in range(18)],
        )
        for i, bus in enumerate(buses)
    ]
    return Recorded(gpus, pynvml.NVML_TOPOLOGY_SYSTEM)


def pcie_machine(level: int, count: int = 2) -> Recorded:
    """GPUs without NVLink, each on a NUMA node of its own where `level` is SYS."""
    apart = level == pynvml.NVML_TOPOLOGY_SYSTEM
    gpus = [
        Gpu("NVIDIA L4", 24 * 2**30, f"GPU-{i}", f"00000000:{0x41 + i:02X}:00.0", numa=(1 << (i if apart else 0),))
        for i in range(count)
    ]
    return Recorded(gpus, level, past_last=pynvml.NVML_ERROR_NOT_SUPPORTED)


def mesh_machine() -> Recorded:
    """Three GPUs wired to each other: two links between 0 and 1, one between 1 and 2, one of 2's down; an NPU at 0."""
    buses = [f"00000000:0{i + 1}:00.0" for i in range(3)]

    def to(gpu: int, active: bool = True) -> Link:
        return Link(active, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, f"0000:0{gpu + 1}:00.0")  # four digits of domain

    npu = Link(kind=pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU, bus="00000004:04:00.0")
    links = [[to(1), npu, to(1)], [to(0), to(0), to(2)], [to(0, active=False), to(1)]]
    gpus = [Gpu("Tesla V100", 16 * 2**30, f"GPU-{i}", buses[i], links=links[i]) for i in range(3)]
    return Recorded(gpus, {(0, 2): pynvml.NVML_TOPOLOGY_MULTIPLE})
