"""The machine-near part: where torch keeps the device of a tensor, and how its C++ learns that there are GPUs.

Only this file reads and writes torch's own memory. Its four steps:

1. `find_layout` compares tensors whose device is known, and so finds the bytes that say it. Nothing is assumed.
2. `to_cuda`, `to_cpu` and `twin` write these bytes: the dispatch keys (one word) and the device (two bytes).
3. A device guard for CUDA goes into c10's registry. Autograd asks it for the devices and the current one.
4. The object behind `at::detail::getCUDAHooks()` gets a table of functions of ours: "is there CUDA", pinned memory.

Places in C++ tables are counted in the headers that torch's wheel has, and compared by calling some that are known.
What does not fit raises `Unfit` before anything has been changed. A wrong place can still end the process, so
`probe.py` has a child process try all of it first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nbddp.capabilities.simulated_gpus.on_rank import devices

CPU, CUDA = 0, 1  # c10::DeviceType
NO_DEVICE = 0xFF00  # a device word of the CPU: type 0, index -1
DLPACK_CUDA = 2
# One array over the whole address space: a load or a store costs 60 ns.
BYTES = (ctypes.c_uint8 * (1 << 47)).from_address(0)
SHORTS = (ctypes.c_uint16 * (1 << 46)).from_address(0)
WORDS = (ctypes.c_uint64 * (1 << 44)).from_address(0)
IMPL = 184  # bytes of a TensorImpl that are searched; it has 184 to 208
GENERATOR = 96  # bytes of a GeneratorImpl that are searched
MORE_SLOTS = 24  # a subclass may have more functions than the header of its base says
held: list[Any] = []  # what C++ points to and nothing else holds
ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # torch's destructors run after Python's end, which frees the rest


class Unfit(RuntimeError):
    """This build of torch is not laid out as known. Nothing has been changed."""


@dataclass
class Layout:
    """Offsets in bytes, and the bits of the dispatch keys that tell CPU and CUDA apart."""

    keys: int = 0  # key_set_ in TensorImpl
    device: int = 0  # device_opt_ in TensorImpl
    generator: int = 0  # the device in GeneratorImpl
    cpu_bits: int = 0
    cuda_bits: int = 0


at = Layout()


# -- 1. the layout ---------------------------------------------------------------------------------


def find_layout() -> None:
    """Fills `at`, and tries it on a tensor. Raises Unfit."""
    if getattr(sys, "_is_gil_enabled", lambda: True)() is False:
        raise Unfit("this Python runs without a GIL, under which labels are written")
    cpu = torch.arange(6.0).reshape(2, 3)
    three, five = _relabelled(cpu, 3), _relabelled(cpu, 5)
    if str(three.device) != "cuda:3" or not five.is_cuda:
        raise Unfit("a relabelled DLPack capsule gave no CUDA tensor")
    on_cpu, on_cuda = _keys(cpu), _keys(three)
    at.cpu_bits, at.cuda_bits = on_cpu & ~on_cuda, on_cuda & ~on_cpu
    a, b, c = cpu._cdata, three._cdata, five._cdata
    words, shorts = range(16, IMPL, 8), range(0, IMPL, 2)
    at.keys = _only("key_set_", [o for o in words if (_word(a + o), _word(b + o)) == (on_cpu, on_cuda)])
    marks = (NO_DEVICE, 0x301, 0x501)
    at.device = _only("device_opt_", [o for o in shorts if (_short(a + o), _short(b + o), _short(c + o)) == marks])
    if BYTES[a + at.device + 2] != 1 or BYTES[b + at.device + 2] != 1:
        raise Unfit("device_opt_ has no byte that says it is set")
    at.generator = _generator_layout()
    _try_labels(on_cpu, on_cuda)


def _relabelled(tensor: Any, index: int) -> Any:
    """A CUDA tensor over the same memory, made by torch itself from a DLPack capsule whose device is changed."""
    capsule = torch._C._to_dlpack(tensor)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    managed = get(capsule, b"dltensor")  # DLManagedTensor begins with: void* data; int32 type; int32 index
    device = (ctypes.c_int32 * 2).from_address(managed + 8)
    device[0], device[1] = DLPACK_CUDA, index
    lazy, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None  # _from_dlpack would ask the driver
    try:
        return torch._C._from_dlpack(capsule)
    finally:
        torch.cuda._lazy_init = lazy


def _generator_layout() -> int:
    generator = torch.Generator()
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).raw_repr()
    p = generator._cdata
    found = [
        o for o in range(16, GENERATOR, 8) if _short(p + o) == NO_DEVICE and key in (_word(p + o - 8), _word(p + o + 8))
    ]
    return _only("the device of a GeneratorImpl", found)


def _only(what: str, found: list[int]) -> int:
    if len(found) != 1:
        raise Unfit(f"{what} was found at {len(found)} places")
    return found[0]


def _try_labels(on_cpu: int, on_cuda: int) -> None:
    tensor = torch.ones(3)
    to_cuda(tensor, 6)
    if str(tensor.device) != "cuda:6" or _keys(tensor) != on_cuda:
        raise Unfit("a CPU tensor could not be labelled cuda:6")
    to_cpu(tensor)
    if str(tensor.device) != "cpu" or tensor.sum().item() != 3 or _keys(tensor) != on_cpu:
        raise Unfit("the label cuda:6 could not be taken away again")


def _keys(tensor: Any) -> int:
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def _word(address: int) -> int:
    return WORDS[address >> 3]


def _short(address: int) -> int:
    return SHORTS[address >> 1]


# -- 2. labels -------------------------------------------------------------------------------------


def to_cuda(tensor: Any, index: int) -> None:
    """From now on this tensor is one of cuda:index, for C++ too. Its memory stays where it is."""
    p = tensor._cdata
    k = (p + at.keys) >> 3
    WORDS[k] = WORDS[k] & ~at.cpu_bits | at.cuda_bits
    SHORTS[(p + at.device) >> 1] = CUDA | index << 8


def to_cpu(tensor: Any) -> None:
    p = tensor._cdata
    k = (p + at.keys) >> 3
    WORDS[k] = WORDS[k] & ~at.cuda_bits | at.cpu_bits
    SHORTS[(p + at.device) >> 1] = NO_DEVICE


def twin(tensor: Any) -> Any:
    """A CPU tensor over the same storage. `.data` is a shallow copy in C++; nothing is dispatched."""
    tensor = tensor.data
    p = tensor._cdata
    k = (p + at.keys) >> 3
    WORDS[k] = WORDS[k] & ~at.cuda_bits | at.cpu_bits
    SHORTS[(p + at.device) >> 1] = NO_DEVICE
    return tensor


def index_of(tensor: Any) -> int:
    """The index of a CUDA tensor, else -1. Faster than `get_device`."""
    word = SHORTS[(tensor._cdata + at.device) >> 1]
    return word >> 8 if word & 0xFF == CUDA else -1


def set_index(tensor: Any, index: int) -> None:
    """For a tensor that has the keys of CUDA, but the device of its storage."""
    SHORTS[(tensor._cdata + at.device) >> 1] = CUDA | index << 8


class Label(NamedTuple):
    """What says the device of a tensor, as it lies in memory."""

    keys: int
    device: int

    @property
    def is_cuda(self) -> bool:
        return self.device & 0xFF == CUDA


def take_label(tensor: Any) -> Label:
    """Gives a tensor with CUDA's keys those of the CPU for a moment. A fake tensor's device (meta) is left alone."""
    p = tensor._cdata
    label = Label(WORDS[(p + at.keys) >> 3], SHORTS[(p + at.device) >> 1])
    WORDS[(p + at.keys) >> 3] = label.keys & ~at.cuda_bits | at.cpu_bits
    if label.is_cuda:
        SHORTS[(p + at.device) >> 1] = NO_DEVICE
    return label


def restore_label(tensor: Any, label: Label) -> None:
    p = tensor._cdata
    WORDS[(p + at.keys) >> 3], SHORTS[(p + at.device) >> 1] = label


def like_label(tensor: Any, label: Label) -> None:
    """Labels what was made of a tensor whose label had been taken."""
    k = (tensor._cdata + at.keys) >> 3
    if WORDS[k] & at.cpu_bits == at.cpu_bits:
        WORDS[k] = WORDS[k] & ~at.cpu_bits | at.cuda_bits
    if label.is_cuda:
        SHORTS[(tensor._cdata + at.device) >> 1] = label.device


def label_generator(generator: Any, index: int | None) -> None:
    """cuda:index, or None for the CPU."""
    SHORTS[(generator._cdata + at.generator) >> 1] = NO_DEVICE if index is None else CUDA | index << 8


# -- 3. and 4. what C++ asks -----------------------------------------------------------------------


class Calls(NamedTuple):
    """A slot that calls Python. signature: the result and the arguments after `this`, by the names in `TYPES`."""

    signature: str
    function: Callable[..., Any]


class SameAs(NamedTuple):
    """A slot that has the function of another one of the table."""

    slot: str


class MachineCode(NamedTuple):
    """A slot that has machine code."""

    address: int


Slots = dict[str, Calls | SameAs | MachineCode]
TYPES: dict[str, Any] = {
    "void": None, "device": ctypes.c_uint16, "index": ctypes.c_int8, "bool": ctypes.c_bool, "int": ctypes.c_int,
    "pointer": ctypes.c_void_p, "size": ctypes.c_size_t,
}  # fmt: skip


class VirtualTable:
    """The table of virtual functions of a C++ object."""

    def __init__(self, of: int, names: list[str]) -> None:
        self.of, self.names = of, names
        self.start = _word(of)

    def call(self, name: str, result: str) -> Any:
        """The result of a function without arguments."""
        return ctypes.CFUNCTYPE(TYPES[result], ctypes.c_void_p)(self[name])(self.of)

    def __getitem__(self, name: str) -> int:
        if name not in self.names:
            raise Unfit(f"the header has no function {name}")
        return WORDS[(self.start >> 3) + self.names.index(name)]

    def changed(self, slots: Slots, more: int = MORE_SLOTS) -> int:
        """The address of a copy with other functions in these slots. Those that this torch lacks are left out."""
        copy = (ctypes.c_uint64 * (len(self.names) + more + 2))()  # two words before it: offset and type
        for i in range(len(copy)):
            copy[i] = WORDS[(self.start >> 3) + i - 2]
        for name in slots.keys() & set(self.names):
            copy[self.names.index(name) + 2] = self._function(slots[name])
        held.append(copy)
        return ctypes.addressof(copy) + 16

    def _function(self, slot: Calls | SameAs | MachineCode) -> int:
        if isinstance(slot, SameAs):
            return self[slot.slot]
        if isinstance(slot, MachineCode):
            return slot.address
        result, *arguments = slot.signature.split()
        made = ctypes.CFUNCTYPE(TYPES[result], ctypes.c_void_p, *(TYPES[a] for a in arguments))(slot.function)
        held.append(made)
        return ctypes.cast(made, ctypes.c_void_p).value or 0


def install_hooks() -> None:
    """Tells torch's C++ of the GPUs of `devices`. Raises Unfit, and then nothing is changed."""
    c10, cpu = _library("c10"), _library("torch_cpu")
    registry = ctypes.addressof(ctypes.c_uint64.in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE"))
    guard = _guard(
        VirtualTable(
            _word(registry), _functions("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
        )
    )
    hooks = _result(cpu, "_ZN2at6detail12getCUDAHooksEv")
    table = _hooks(
        VirtualTable(hooks, _hook_functions()), _pinned_allocator(_result(c10, "_ZN3c1022GetDefaultCPUAllocatorEv"))
    )
    WORDS[(registry >> 3) + CUDA] = guard
    WORDS[hooks >> 3] = table
    _hide_timer(cpu)


def _guard(cpu: VirtualTable) -> int:
    if cpu.names[0] != "type" or cpu.call("type", "index") != CPU or cpu.call("deviceCount", "index") != 1:
        raise Unfit("the device guard is not laid out as its header says")
    stream = MachineCode(_stream_code())
    slots: Slots = {
        "type": Calls("index", lambda this: CUDA),
        "exchangeDevice": Calls("device device", lambda this, to: CUDA | devices.exchange(_index(to)) << 8),
        "getDevice": Calls("device", lambda this: CUDA | devices.current() << 8),
        "setDevice": Calls("void device", lambda this, to: devices.set_current(_index(to))),
        "uncheckedSetDevice": Calls("void device", lambda this, to: devices.set_current(_index(to))),
        "deviceCount": Calls("index", lambda this: devices.count()),
        # An event is done at once: the CPU's own functions that do nothing serve, without entering Python.
        **dict.fromkeys(("record", "block", "synchronizeEvent", "synchronizeDevice"), SameAs("synchronizeStream")),
        "queryEvent": SameAs("queryStream"),
        **dict.fromkeys(("getStream", "getDefaultStream", "getStreamFromGlobalPool"), stream),
        **dict.fromkeys(("getNewStream", "exchangeStream"), stream),
    }
    made = (ctypes.c_uint64 * 4)(cpu.changed(slots))
    held.append(made)
    return ctypes.addressof(made)


def _index(device: int) -> int:
    index = device >> 8 & 0xFF
    return index - 256 if index > 127 else index


ABSENT = (  # what a GPU may have and a simulated one lacks: torch then takes its own kernels
    "hasCuDNN", "compiledWithCuDNN", "compiledWithMIOpen", "hasMAGMA", "hasCuSOLVER", "hasCuBLASLt",
    "supportsDilatedConvolutionWithCuDNN", "supportsDepthwiseConvolutionWithCuDNN",
    "supportsBFloat16ConvolutionWithCuDNNv8", "supportsBFloat16RNNWithCuDNN",
)  # fmt: skip


def _hooks(none: VirtualTable, pinned: int) -> int:
    facts = none.call("hasCUDA", "bool"), none.call("getNumGPUs", "int"), none.call("current_device", "index")
    if facts != (False, 0, -1):
        raise Unfit("the CUDA hooks are not laid out as their header says, or there is a GPU")
    exchange = Calls("index index", lambda this, to: devices.exchange(to))
    current = Calls("index", lambda this: devices.current())
    slots: Slots = {
        "init": Calls("void", lambda this: None),
        "hasCUDA": Calls("bool", lambda this: True),
        "isBuilt": Calls("bool", lambda this: True),
        "isAvailable": Calls("bool", lambda this: devices.count() > 0),
        "getNumGPUs": Calls("int", lambda this: devices.count()),
        "deviceCount": Calls("index", lambda this: devices.count()),
        "current_device": current, "getCurrentDevice": current,
        "setCurrentDevice": Calls("void index", lambda this, to: devices.set_current(to)),
        "exchangeDevice": exchange, "maybeExchangeDevice": exchange,
        "hasPrimaryContext": Calls("bool index", lambda this, index: True),
        "deviceSynchronize": Calls("void index", lambda this, index: None),
        "isPinnedPtr": Calls("bool pointer", lambda this, p: p in pinned_blocks),
        "getPinnedMemoryAllocator": Calls("pointer", lambda this: pinned),
        "getDeviceFromPtr": Calls("device pointer", lambda this, p: CUDA | devices.current() << 8),
        **dict.fromkeys(ABSENT, Calls("bool", lambda this: False)),
    }  # fmt: skip
    return none.changed(slots)


pinned_blocks: set[int] = set()  # addresses


def _pinned_allocator(cpu: int) -> int:
    """The CPU's allocator, but it notes the blocks that it gives."""
    table = VirtualTable(cpu, _functions("c10/core/Allocator.h", "Allocator"))
    real = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(table["allocate"])

    def allocate(result: int, this: int, size: int) -> int:  # a DataPtr is returned where the first argument says
        real(result, cpu, size)
        pinned_blocks.add(_word(result))
        return result

    allocator = (ctypes.c_uint64 * 8)(table.changed({"allocate": Calls("pointer pointer size", allocate)}, more=0))
    held.append(allocator)
    return ctypes.addressof(allocator)


# `Stream f(this, Device device)` → {device, 0}: the default stream. exchangeStream has it too: its argument begins
# with the device. A Stream is 16 bytes in two registers, which a function of ctypes cannot return.
X86 = "0fb7c6 31d2 c3"  # movzx eax, si; xor edx, edx; ret
ARM = "203c0053 010080d2 c0035fd6"  # uxth w0, w1; mov x1, 0; ret
STREAM_CODE = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}


def _stream_code() -> int:
    """The address of this code in memory that may be executed."""
    code = STREAM_CODE.get(platform.machine().lower())
    if code is None or os.name == "nt":
        raise Unfit(f"{platform.machine()} under {platform.system()} is not known")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(bytes.fromhex(code))
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    allowed = mmap.PROT_READ | mmap.PROT_EXEC
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), allowed):
        raise Unfit("the system gives no memory that may be executed")
    held.append(page)
    return address


def _hide_timer(cpu: ctypes.CDLL) -> None:
    """A CUDA build registers a timer for DDP that needs a driver. Its entry gets another key, so DDP has none."""
    names = ("_ZN4c10d13TimerRegistryB5cxx11Ev", "_ZN4c10d13TimerRegistryEv")
    name = next((name for name in names if hasattr(cpu, name)), None)
    if name is None:
        return
    table = _result(cpu, name) >> 3  # std::unordered_map: buckets, their number, first node, number of nodes
    node, left = WORDS[table + 2], min(WORDS[table + 3], 8)
    while node and left:
        if BYTES[node + 8] == CUDA:
            BYTES[node + 8] = 99
        node, left = _word(node), left - 1


def _library(name: str) -> ctypes.CDLL:
    ending = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{ending}"))


def _result(library: ctypes.CDLL, name: str) -> int:
    """What a function without arguments returns: an address."""
    function = getattr(library, name)
    function.restype = ctypes.c_void_p
    address: int = function()
    return address


def _hook_functions() -> list[str]:
    base = _functions("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
    body = _class_body("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface")
    again = set(re.findall(r"(\w+)\s*\([^()]*\)\s*const\s+override", body)) | set(base)
    return base + [name for name in _virtual(body) if name not in again]


def _functions(header: str, name: str) -> list[str]:
    return _virtual(_class_body(header, name))


def _virtual(body: str) -> list[str]:
    """Virtual functions in order of declaration. A destructor takes two places."""
    names: list[str] = []
    for found in re.finditer(r"virtual\s+([^;{(]*?)(~?\w+)\s*\(", body):
        names += ["~complete", "~deleting"] if found[2].startswith("~") else [found[2]]
    return names


def _class_body(header: str, name: str) -> str:
    """The text of a class in a header of torch, without comments."""
    text = (Path(torch.__file__).parent / "include" / header).read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    text = re.sub(r"#ifdef USE_ROCM.*?#endif", "", text, flags=re.DOTALL)
    begin = re.search(rf"struct\s+(?:\w+_API\s+)?{name}\b[^;{{]*\{{", text)
    if begin is None:
        raise Unfit(f"{header} has no {name}")
    depth, i = 1, begin.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        i += 1
    return text[begin.end() : i]
