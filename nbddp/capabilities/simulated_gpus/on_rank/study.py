# ruff: noqa
# mypy: ignore-errors
"""simgpu: run unchanged CUDA / nccl programs on ordinary CPU wheels of torch.

A simulated CUDA tensor is a real torch tensor (keys CUDA, AutogradCUDA, AutocastCUDA; device
cuda:i also for C++) whose bytes lie in host memory.  Autograd, autocast, views, DDP's reducer are
torch's own C++.  Below autograd every operator reaches a Python kernel registered for the CUDA
dispatch key; it makes CPU-labelled twins of the arguments (same storage), runs the CPU kernel and
relabels what comes out.

    import simgpu; simgpu.install(4)          # before the first backward and before any CUDA use
"""
import ctypes, os, re, sys, threading, time, types, warnings, weakref
import torch

GiB, MiB = 1 << 30, 1 << 20
CUDA, CPU = 1, 0                              # c10::DeviceType
N, NAME, TOTAL, CAPABILITY = 1, "Tesla T4", 15843721216, (7, 5)
CONTEXT = 105 * MiB                           # what a CUDA context takes before the first tensor
_keep = []                                    # ctypes callbacks and buffers must never be freed

class Refused(RuntimeError):
    "this torch does not look like the ones simgpu knows; nothing has been changed"

# ------------------------------------------------------------------ 1. raw memory, checked layout
# One ctypes array over the whole address space: a load or a store costs about 60 ns.
M8 = (ctypes.c_uint8 * (1 << 47)).from_address(0)
M16 = (ctypes.c_uint16 * (1 << 46)).from_address(0)
M64 = (ctypes.c_uint64 * (1 << 44)).from_address(0)

class Layout:
    "byte offsets inside TensorImpl, StorageImpl, GeneratorImpl: found by comparing, not assumed"

L = Layout()

def _dlpack_relabel(t, kind, index):
    "a tensor of another device over the same memory, made by torch itself from a changed capsule"
    capsule = torch._C._to_dlpack(t)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    p = get(capsule, b"dltensor")             # DLManagedTensor: void* data; int32 type; int32 id; …
    dev = (ctypes.c_int32 * 2).from_address(p + 8)
    dev[0], dev[1] = kind, index
    return torch._C._from_dlpack(capsule)

def _raw_keys(t):
    return torch._C._dispatch_keys(t).raw_repr()

def _find_layout():
    lazy, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
    try:
        cpu = torch.arange(6.0).reshape(2, 3)
        cu = {i: _dlpack_relabel(cpu, 2, i) for i in (3, 5)}
    finally:
        torch.cuda._lazy_init = lazy
    if str(cu[3].device) != "cuda:3" or not cu[5].is_cuda:
        raise Refused("a relabelled DLPack capsule did not give a CUDA tensor")
    kc, kg = _raw_keys(cpu), _raw_keys(cu[3])
    L.cpu_only, L.cuda_only = kc & ~kg, kg & ~kc
    size = 184                                # TensorImpl is 184..208 bytes since torch 2.0

    def one(found, what):
        if len(found) != 1:
            raise Refused(f"{what} was found at {len(found)} places")
        return found[0]

    def scan(p, q, n, want):                  # offsets of 16-bit device words (type | index<<8)
        return [o for o in range(0, n, 2) if (M16[(p + o) >> 1], M16[(q + o) >> 1]) == want]

    c, g3, g5 = cpu._cdata, cu[3]._cdata, cu[5]._cdata
    L.keys = one([o for o in range(16, size, 8) if M64[(c + o) >> 3] == kc and M64[(g3 + o) >> 3] == kg], "key_set_")
    L.dev = one([o for o in scan(g3, g5, size, (0x301, 0x501)) if M16[(c + o) >> 1] == 0xFF00], "device_opt_")
    if M8[c + L.dev + 2] != 1 or M8[g3 + L.dev + 2] != 1:
        raise Refused("device_opt_ has no 'engaged' byte")
    gen = torch.Generator()
    if hasattr(gen, "_cdata"):
        p, key = gen._cdata, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).raw_repr()
        L.gdev = one([o for o in range(16, 96, 8) if M16[(p + o) >> 1] == 0xFF00 and key in (M64[(p + o - 8) >> 3], M64[(p + o + 8) >> 3])],
                     "GeneratorImpl's device")
    # try it: make cuda:6 out of a CPU tensor and look at it through torch
    t = torch.ones(3)
    _to_cuda(t, 6)
    if str(t.device) != "cuda:6" or _raw_keys(t) != kg:
        raise Refused("relabelling in place does not work")
    _to_cpu(t)
    if str(t.device) != "cpu" or t.sum().item() != 3 or _raw_keys(t) != kc:
        raise Refused("relabelling back does not work")

def _to_cuda(t, i):
    p = t._cdata
    k = (p + L.keys) >> 3
    M64[k] = M64[k] & ~L.cpu_only | L.cuda_only
    M16[(p + L.dev) >> 1] = CUDA | i << 8

def _to_cpu(t):
    p = t._cdata
    k = (p + L.keys) >> 3
    M64[k] = M64[k] & ~L.cuda_only | L.cpu_only
    M16[(p + L.dev) >> 1] = 0xFF00

def _twin(t):
    "a CPU-labelled tensor over the same storage (.data is a shallow copy in C++, no dispatch)"
    t = t.data
    p = t._cdata
    k = (p + L.keys) >> 3
    M64[k] = M64[k] & ~L.cuda_only | L.cpu_only
    M16[(p + L.dev) >> 1] = 0xFF00
    return t

# ------------------------------------------------------------------ 2. C++ hooks by changed vtables
def _virtuals(header, cls):
    "names of a class's virtual functions in order of declaration, read from the installed header"
    root = os.path.join(os.path.dirname(torch.__file__), "include")
    with open(os.path.join(root, header)) as f:
        text = f.read()
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    text = re.sub(r"#ifdef USE_ROCM.*?#endif", "", text, flags=re.S)
    m = re.search(r"struct\s+(?:\w+_API\s+)?%s\b[^;{]*\{" % cls, text)
    if not m:
        raise Refused(f"no {cls} in {header}")
    depth, i = 1, m.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        i += 1
    body, out = text[m.end():i], []
    for d in re.finditer(r"virtual\s+([^;{(]*?)(~?\w+)\s*\(", body):
        out += ["~1", "~0"] if d.group(2)[0] == "~" else [d.group(2)]
    return out, body

_CT = {"v": None, "u16": ctypes.c_uint16, "i8": ctypes.c_int8, "b": ctypes.c_bool, "i": ctypes.c_int, "p": ctypes.c_void_p, "d": ctypes.c_double}

def _new_vtable(old, names, slots):
    "copy of a vtable (with its two header words) where some slots are Python callbacks"
    n = len(names) + 24                       # a subclass may have more
    buf = (ctypes.c_uint64 * (n + 2))()
    for i in range(-2, n):
        buf[i + 2] = M64[(old >> 3) + i]
    for name, (sig, fn) in slots.items():
        if name not in names:
            continue
        if sig == "as":                       # another slot's C++ function does
            buf[names.index(name) + 2] = buf[names.index(fn) + 2]
            continue
        if sig == "at":
            buf[names.index(name) + 2] = fn
            continue
        ret, *args = sig.split()
        cb = ctypes.CFUNCTYPE(_CT[ret], ctypes.c_void_p, *[_CT[a] for a in args])(fn)
        _keep.append(cb)
        buf[names.index(name) + 2] = ctypes.cast(cb, ctypes.c_void_p).value
    _keep.append(buf)
    return ctypes.addressof(buf) + 16

def _stream_code():
    "Stream f(this, Device d): {d, 0}, the default stream; also right for exchangeStream(this, Stream s)"
    import mmap, platform
    code = {"x86_64": "0fb7c6" "31d2" "c3",               # movzx eax, si; xor edx, edx; ret
            "amd64": "0fb7c6" "31d2" "c3",
            "aarch64": "203c0053" "010080d2" "c0035fd6",  # uxth w0, w1; mov x1, 0; ret
            "arm64": "203c0053" "010080d2" "c0035fd6"}.get(platform.machine().lower())
    if code is None or os.name == "nt":
        raise Refused(f"no stream code for {platform.machine()} {os.name}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(bytes.fromhex(code))
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
        raise Refused("the system gives no executable memory")
    _keep.append(page)
    return address

_current = {}                                 # thread id -> current device

def _cur():
    return _current.get(threading.get_ident(), 0)

def _set(i):
    _current[threading.get_ident()] = i

def _exchange(i):
    t = threading.get_ident()
    old = _current.get(t, 0)
    if i >= 0:
        _current[t] = i
    return old

def _sx(word):                                # DeviceIndex out of a Device word
    i = word >> 8 & 0xFF
    return i - 256 if i > 127 else i

def _install_hooks():
    libdir = os.path.join(os.path.dirname(torch.__file__), "lib")
    ext = {"darwin": "dylib"}.get(sys.platform, "so")
    c10 = ctypes.CDLL(os.path.join(libdir, f"libc10.{ext}"))
    cpu = ctypes.CDLL(os.path.join(libdir, f"libtorch_cpu.{ext}"))
    # --- the device guard: autograd's engine asks it for device counts, streams, the current device
    names, _ = _virtuals("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
    registry = ctypes.addressof(ctypes.c_uint64.in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE"))
    cpu_guard = M64[registry >> 3]
    old = M64[cpu_guard >> 3]
    call = lambda name, ret: ctypes.CFUNCTYPE(ret, ctypes.c_void_p)(M64[(old >> 3) + names.index(name)])(cpu_guard)
    if names[0] != "type" or call("type", ctypes.c_int8) != 0 or call("deviceCount", ctypes.c_int8) != 1:
        raise Refused("the device guard's layout is not the header's")
    # Events do nothing: the CPU guard's own no-op functions serve, no Python is entered.
    events = {n: ("as", "synchronizeStream") for n in ("record", "block", "synchronizeEvent", "synchronizeDevice")}
    events["queryEvent"] = ("as", "queryStream")
    # A c10::Stream is 16 bytes in two registers, which no ctypes callback can return: machine code.
    stream = ("at", _stream_code())
    streams = {n: stream for n in ("getStream", "getDefaultStream", "getStreamFromGlobalPool", "getNewStream", "exchangeStream")}
    vt = _new_vtable(old, names, {"type": ("i8", lambda s: CUDA), "exchangeDevice": ("u16 u16", lambda s, d: CUDA | _exchange(_sx(d)) << 8),
        "getDevice": ("u16", lambda s: CUDA | _cur() << 8), "setDevice": ("v u16", lambda s, d: _set(_sx(d))),
        "uncheckedSetDevice": ("v u16", lambda s, d: _set(_sx(d))), "deviceCount": ("i8", lambda s: N), **events, **streams})
    obj = (ctypes.c_uint64 * 4)(vt)
    _keep.append(obj)
    # --- CUDAHooksInterface: at::hasCUDA(), pinned memory, lazy initialisation
    base, _ = _virtuals("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
    own, body = _virtuals("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface")
    overriding = set(re.findall(r"(\w+)\s*\([^()]*\)\s*const\s+override", body))
    hnames = base + [n for n in own if n not in overriding and n not in base]
    get = cpu._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    hooks = get()
    hold = M64[hooks >> 3]
    hcall = lambda name, ret: ctypes.CFUNCTYPE(ret, ctypes.c_void_p)(M64[(hold >> 3) + hnames.index(name)])(hooks)
    if hcall("hasCUDA", ctypes.c_bool) or hcall("getNumGPUs", ctypes.c_int) != 0 or hcall("current_device", ctypes.c_int8) != -1:
        raise Refused("the CUDA hooks' layout is not the header's")
    alloc = c10._ZN3c1022GetDefaultCPUAllocatorEv
    alloc.restype = ctypes.c_void_p
    pinned = _pinned_allocator(alloc())
    hvt = _new_vtable(hold, hnames, {"init": ("v", lambda s: None), "hasCUDA": ("b", lambda s: True), "isBuilt": ("b", lambda s: True),
        "isAvailable": ("b", lambda s: N > 0),
        **{n: ("b", lambda s: False) for n in ("hasCuDNN", "compiledWithCuDNN", "compiledWithMIOpen", "hasMAGMA", "hasCuSOLVER", "hasCuBLASLt",
                                               "supportsDilatedConvolutionWithCuDNN", "supportsDepthwiseConvolutionWithCuDNN",
                                               "supportsBFloat16ConvolutionWithCuDNNv8", "supportsBFloat16RNNWithCuDNN")},
        "getNumGPUs": ("i", lambda s: N), "deviceCount": ("i8", lambda s: N), "current_device": ("i8", lambda s: _cur()),
        "getCurrentDevice": ("i8", lambda s: _cur()), "setCurrentDevice": ("v i8", lambda s, i: _set(i)),
        "exchangeDevice": ("i8 i8", lambda s, i: _exchange(i)), "maybeExchangeDevice": ("i8 i8", lambda s, i: _exchange(i)),
        "hasPrimaryContext": ("b i8", lambda s, i: True), "isPinnedPtr": ("b p", lambda s, p: p in _pinned),
        "getPinnedMemoryAllocator": ("p", lambda s: pinned), "getDeviceFromPtr": ("u16 p", lambda s, p: CUDA | _cur() << 8),
        "deviceSynchronize": ("v i8", lambda s, i: None),})
    M64[(registry >> 3) + CUDA] = ctypes.addressof(obj)
    M64[hooks >> 3] = hvt

_pinned = set()                               # addresses of pinned blocks

def _pinned_allocator(cpu_alloc):
    "the CPU allocator, but it writes down the blocks it gives"
    names, _ = _virtuals("c10/core/Allocator.h", "Allocator")
    old = M64[cpu_alloc >> 3]
    slot = M64[(old >> 3) + names.index("allocate")]
    real = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(slot)

    def allocate(ret, this, n):               # DataPtr is returned through a hidden first argument
        real(ret, cpu_alloc, n)
        _pinned.add(M64[ret >> 3])
        return ret
    cb = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(allocate)
    buf = (ctypes.c_uint64 * (len(names) + 2))(*[M64[(old >> 3) + i] for i in range(-2, len(names))])
    buf[names.index("allocate") + 2] = ctypes.cast(cb, ctypes.c_void_p).value
    obj = (ctypes.c_uint64 * 8)(ctypes.addressof(buf) + 16)
    _keep.extend([cb, buf, obj])
    return ctypes.addressof(obj)

# ------------------------------------------------------------------ 3. memory of each device
class Memory:
    def __init__(self):
        self.now = self.peak = self.total_in = self.total_out = self.count = 0
        self.requested = self.requested_peak = 0
        self.reserved = self.reserved_peak = 0
        self.free_large = self.free_small = 0     # reserved, not allocated
        self.ooms = self.limit = 0

    def segment(self, n):                     # the sizes of CUDACachingAllocator's segments
        return 2 * MiB if n <= MiB else 20 * MiB if n < 10 * MiB else -(-n // (2 * MiB)) * 2 * MiB

    def add(self, n, raw):
        pool = "free_small" if n <= MiB else "free_large"
        free = getattr(self, pool)
        if free < n:
            seg = self.segment(n)
            self.reserved += seg
            self.reserved_peak = max(self.reserved_peak, self.reserved)
            free += seg
        setattr(self, pool, free - n)
        self.now += n
        self.requested += raw
        self.total_in += n
        self.count += 1
        if self.now > self.peak:
            self.peak = self.now

    def sub(self, n, raw):
        self.now -= n
        self.requested -= raw
        self.total_out += n
        self.count -= 1
        pool = "free_small" if n <= MiB else "free_large"
        setattr(self, pool, getattr(self, pool) + n)

_mem = []

def _size(n):
    return f"{n} bytes" if n < 1024 else f"{n / 1024:.2f} KiB" if n < MiB else f"{n / MiB:.2f} MiB" if n < GiB else f"{n / GiB:.2f} GiB"

def _room(i, nbytes):
    "raises torch's own out-of-memory error when nbytes do not fit on device i"
    m = _mem[i]
    n = -(-nbytes // 512) * 512
    if m.now + n + CONTEXT <= (m.limit or TOTAL):
        return
    m.ooms += 1
    m.reserved = max(m.now, min(m.reserved, TOTAL - CONTEXT))
    free = max(0, TOTAL - CONTEXT - m.reserved)
    cap = f" {_size(m.limit)} allowed;" if m.limit else ""
    v, doc = _version(), "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
    if v >= (2, 14):
        doc = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
    var = "PYTORCH_ALLOC_CONF" if (2, 9) <= v < (2, 14) else "PYTORCH_CUDA_ALLOC_CONF"
    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_size(m.segment(n) if n > MiB else n)}. GPU {i} has a total capacity of {_size(TOTAL)} "
        f"of which {_size(free)} is free. Including non-PyTorch memory, this process has {_size(m.reserved + CONTEXT)} memory in use.{cap} "
        f"Of the allocated memory {_size(m.now)} is allocated by PyTorch, and {_size(m.reserved - m.now)} is "
        f"reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        f"{var}=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  ({doc})")

class _Ref(weakref.ref):
    __slots__ = ("n", "raw", "mem", "key", "index")

_blocks = {}                                  # StorageImpl address -> _Ref

def _freed(r):
    r.mem.sub(r.n, r.raw)
    if _blocks.get(r.key) is r:
        del _blocks[r.key]

def _adopt(s, i):
    """count storage s as cuda:i's.  Its C++ label stays 'cpu': views made inside CPU kernels take their
    device from the storage.  Only TensorImpl carries the cuda label; Python's storage.device is patched."""
    if not torch.cuda._initialized:           # finding the layout used up C++'s own lazy initialisation
        torch.cuda._lazy_init()
    p = s._cdata
    raw = s.nbytes()
    m = _mem[i]
    n = -(-raw // 512) * 512
    old = _blocks.get(p)
    if old is not None:
        if old.raw == raw:
            return
        old.mem.sub(old.n, old.raw)           # the storage was resized
        old.n = old.raw = 0
    if m.now + n + CONTEXT > (m.limit or TOTAL):
        _room(i, raw)
    r = _Ref(s, _freed)
    r.n, r.raw, r.mem, r.key, r.index = n, raw, m, p, i
    _blocks[p] = r
    m.add(n, raw)

def _out(t, i):
    "relabel a result of a CPU kernel"
    _to_cuda(t, i)
    s = t.untyped_storage()
    if s._cdata not in _blocks:
        _adopt(s, i)
    return t

# ------------------------------------------------------------------ 4. kernels for the CUDA key
Tensor, Device, Generator = torch.Tensor, torch.device, torch.Generator
CPU_DEVICE = torch.device("cpu")
_CPU_KEY = None
_bad_fork = False

def _version():
    return tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2])

def _cuda_error(text="invalid device ordinal"):
    "the driver's error in torch's words (compared with libc10_cuda.so of 2.6, 2.10 and 2.14)"
    hint = "GPU device may be out of range, do you have enough GPUs?\n" if _version() >= (2, 8) else ""
    cls = getattr(torch, "AcceleratorError", RuntimeError)
    return cls(f"CUDA error: {text}\n{hint}CUDA kernel errors might be asynchronously reported at some other API call, "
               f"so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
               f"Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n")

def _index(device):
    "index of a cuda device argument; errors as the driver's"
    if _bad_fork:
        torch.cuda._lazy_init()
    i = _cur() if device is None or device.index is None else device.index
    if not 0 <= i < N:
        raise _cuda_error()
    return i

_yaml = {}

def _native(name):
    "what native_functions.yaml says of an operator: (has device check, is structured)"
    if not _yaml:
        import torchgen
        path = os.path.join(os.path.dirname(torchgen.__file__), "packaged/ATen/native/native_functions.yaml")
        key = None
        for line in open(path):
            if line.startswith("- func: "):
                key = line[8:].split("(")[0]
                _yaml[key] = [True, False]
            elif key and line.startswith("  device_check: NoCheck"):
                _yaml[key][0] = False
            elif key and line.startswith("  structured"):
                _yaml[key][1] = True
    return _yaml.get(name, (True, False))

# operators that take tensors of several devices
MIXED = {"aten::copy_", "aten::_copy_from", "aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_",
         "aten::index_put", "aten::_foreach_copy_", "aten::is_set_to", "aten::record_stream", "aten::_unsafe_index_put",
         "aten::repeat_interleave", "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_amp_foreach_non_finite_check_and_unscale_"}

INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}

def _flat(args):
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _flat(a)

def _check_mixed(op, args, kwargs):
    "two devices among the arguments: allowed, or torch's words"
    schema = op._schema
    if schema.name in INDEXING:
        for t in _flat(args[1:2]):
            if t.is_cuda and t.device != args[0].device:
                raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({args[0].device})")
    if schema.name in MIXED or not schema.name.startswith("aten::"):
        return
    name, over = schema.name[6:], schema.overload_name
    checked, structured = _native(name + ("." + over if over else ""))
    vals = {}
    for a, v in zip(schema.arguments, args):
        vals[a.name] = v
    vals.update(kwargs)
    if checked:
        method = f"wrapper_CUDA_{name}{'_' + over if over else ''}" if structured else f"wrapper_CUDA_{over}_{name}"
        common = None
        for a in schema.arguments:
            for t in _flat([vals.get(a.name)]):
                common = common or t.device
                if t.device != common:
                    if _version() >= (2, 9):
                        raise RuntimeError(f"Expected all tensors to be on the same device, but got {a.name} is on {t.device}, "
                                           f"different from other tensors on {common} (when checking argument in method {method})")
                    raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {common} "
                                       f"and {t.device}! (when checking argument for argument {a.name} in method {method})")
        return
    ts = list(_flat([vals.get("out")])) + list(_flat(list(args) + [v for k, v in kwargs.items() if k != "out"]))
    common = next(t.device for t in ts if t.is_cuda)
    for t in ts:
        if t.device != common and not (t.dim() == 0 and not t.is_cuda):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {common} and {t.device}!")

class _State:
    "of one call.  (No recursive closures in kernels: their reference cycles would keep tensors alive until gc.)"
    __slots__ = ("dev", "odd", "back", "op")

def _conv(a, st):
    "an argument for the CPU kernel"
    if isinstance(a, Tensor):
        if not a.is_cuda:
            b = _blocks.get(a.untyped_storage()._cdata) if a.layout is torch.strided else None
            if b is None or not torch._C._dispatch_keys(a).has(torch._C.DispatchKey.CUDA):
                st.odd = True
                return a
            _to_cuda(a, b.index)              # a view that some C++ made from the storage, which says 'cpu'
        i = a.get_device()
        if st.dev is None:
            st.dev = i
        elif st.dev != i:
            st.odd = True
        if type(a) is not Tensor and torch._C._dispatch_keys(a).has(torch._C.DispatchKey.Python):
            raise NotImplementedError(f"{st.op}: wrapper subclass {type(a)} reached the CUDA kernels")
        t = _twin(a)
        st.back[id(t)] = (a, t)
        return t
    if isinstance(a, (list, tuple)):
        return [_conv(x, st) for x in a]
    if isinstance(a, Device):
        return CPU_DEVICE if a.type == "cuda" else a
    return a

def _relabel_args(op, args, kwargs):
    "-> CPU arguments and {id(twin): (original, twin)}"
    st = _State()
    st.dev, st.odd, st.back, st.op = None, False, {}, op
    args = [_conv(a, st) for a in args]
    if kwargs:
        kwargs = {k: _conv(v, st) for k, v in kwargs.items()}
    return args, kwargs, st.dev, st.odd, st.back

def _widen(op, args, kwargs, error):
    "a CPU kernel that lacks half precision: compute in float32 and round; or a number where a tensor is declared"
    if "Expected a value of type 'Tensor'" in str(error):
        return op._overloadpacket(*args, **kwargs)        # a wrapped number arrives here as int or float
    m = re.search(r"not implemented for '(Half|BFloat16)'", str(error))
    if not m or any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments):
        raise error
    low = torch.float16 if m.group(1) == "Half" else torch.bfloat16
    up = lambda a: a.float() if isinstance(a, Tensor) and a.dtype == low else [up(x) for x in a] if isinstance(a, list) else a
    down = lambda o: o.to(low) if isinstance(o, Tensor) and o.dtype == torch.float32 else \
        tuple(down(x) for x in o) if isinstance(o, tuple) else [down(x) for x in o] if isinstance(o, list) else o
    return down(op(*[up(a) for a in args], **{k: up(v) for k, v in kwargs.items()}))

def run(op, *args, **kwargs):
    "the general kernel: any operator, any arguments"
    if _bad_fork:
        torch.cuda._lazy_init()
    cargs, ckw, dev, odd, back = _relabel_args(op, args, kwargs)
    if odd:
        _check_mixed(op, args, kwargs)
    if dev is None:
        dev = _index(kwargs.get("device"))
    if op._schema.name in RANDOM:
        ckw = _random(op, cargs, ckw, dev)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            out = op(*cargs, **ckw)
    except RuntimeError as e:
        if not re.search("not implemented for|Expected a value of type 'Tensor'", str(e)):
            raise
        out = _widen(op, cargs, ckw, e)
    finally:
        for g in _flipped.__dict__.pop("gens", ()):
            M16[(g._cdata + L.gdev) >> 1] = CUDA | dev << 8
    return _results(op, out, dev, back)

def _res(o, op, dev, back):
    if isinstance(o, Tensor):
        pair = back.get(id(o))
        if pair is not None:
            return pair[0]
        if o.layout is not torch.strided:
            raise NotImplementedError(f"simgpu: {op} gives a {o.layout} tensor, which is not simulated")
        return o if o.is_cuda else _out(o, dev)
    if isinstance(o, (list, tuple)):
        return [_res(x, op, dev, back) for x in o] if type(o) is list else tuple(_res(x, op, dev, back) for x in o)
    return o

def _results(op, out, dev, back):
    if _writes(op):
        for a, t in back.values():            # an out= argument may have been resized
            if t.shape != a.shape or t.stride() != a.stride():
                torch.ops.aten.as_strided_.default.redispatch(_CPU_KEY, a, t.shape, t.stride(), t.storage_offset())
                _adopt(t.untyped_storage(), dev)
    return _res(out, op, dev, back)

_write_cache = {}

def _writes(op):
    w = _write_cache.get(op)
    if w is None:
        w = _write_cache[op] = any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments)
    return w

# random numbers: the CPU kernel with the device's own generator, so equal to the CPU's for one seed
RANDOM = set()
_flipped = threading.local()

def _random(op, args, kwargs, dev):
    g = kwargs.get("generator")
    if g is None:
        for k, a in enumerate(args):
            if isinstance(a, Generator):
                g = a
    if g is None:
        kwargs = dict(kwargs)
        kwargs["generator"] = g = torch.cuda.default_generators[dev]
    elif g.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{g.device.type}'")
    M16[(g._cdata + L.gdev) >> 1] = 0xFF00    # CPU label while the kernel runs
    _flipped.gens = [g]
    return kwargs

_foreseen = {}

def _foresee(op, args, dev):
    "a result that may be large: its size from the meta kernel, so that the host's memory is not filled before the error"
    key = (op, *[(a.shape, a.dtype) if isinstance(a, Tensor) else repr(a) for a in args])
    n = _foreseen.get(key)
    if n is None:
        try:
            out = op(*[torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args])
            n = sum(o.untyped_storage().nbytes() for o in _flat([out]))
        except Exception:
            n = 0
        _foreseen[key] = n
    if n > MiB:
        _room(dev, n)

def _fast(op):
    "kernel of a functional operator: no writes, plain results (the hot path)"
    schema, call = op._schema, op._op
    rnd = schema.name in RANDOM

    def kernel(*args, **kwargs):
        dev, big, cargs = None, 1, []
        for a in args:
            if isinstance(a, Tensor):
                p = a._cdata
                w = M16[(p + L.dev) >> 1]
                if w & 0xFF != CUDA or (dev is not None and w >> 8 != dev) or rnd:
                    return run(op, *args, **kwargs)
                dev = w >> 8
                big *= a.numel()
                a = a.data
                p = a._cdata
                k = (p + L.keys) >> 3
                M64[k] = M64[k] & ~L.cuda_only | L.cpu_only
                M16[(p + L.dev) >> 1] = 0xFF00
            elif type(a) in (list, tuple) and a and isinstance(a[0], (Tensor, type(None))):
                return run(op, *args, **kwargs)
            cargs.append(a)
        if dev is None or _bad_fork or kwargs:
            return run(op, *args, **kwargs)
        if big > 1 << 28:
            _foresee(op, cargs, dev)
        try:
            out = call(*cargs)
        except RuntimeError as e:
            if not re.search("not implemented for|Expected a value of type 'Tensor'", str(e)):
                raise
            return run(op, *args)
        if type(out) is Tensor:
            if out.layout is torch.strided and not any(out is c for c in cargs):
                p = out._cdata
                k = (p + L.keys) >> 3
                M64[k] = M64[k] & ~L.cpu_only | L.cuda_only
                M16[(p + L.dev) >> 1] = CUDA | dev << 8
                s = out.untyped_storage()
                if s._cdata not in _blocks:
                    _adopt(s, dev)
                return out
        return _results(op, out, dev, {id(c): (a, c) for a, c in zip(args, cargs) if isinstance(a, Tensor)})
    return kernel

def _general(op):
    return lambda *a, **k: run(op, *a, **k)

def _view(op):
    "metadata only: the CPU kernel copies the keys of its argument, so it may see the CUDA tensor itself"
    re_ = op._handle.redispatch_boxed

    def view(a, *args, **kwargs):
        t = re_(_CPU_KEY, a, *args, **kwargs)
        M16[(t._cdata + L.dev) >> 1] = M16[(a._cdata + L.dev) >> 1]    # the storage said cpu
        return t
    return view

def _new_empty(op, numel):
    def kernel(*args, **kwargs):
        i = _index(kwargs.pop("device", None))
        kwargs.pop("pin_memory", None)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        n = dtype.itemsize * numel(args)
        if n > MiB:
            _room(i, n)
        with torch._C._AutoDispatchBelowAutograd():
            t = op(*args, **kwargs)
        return _out(t, i)
    return kernel

def _prod(sizes):
    n = 1
    for s in sizes:
        n *= int(s)
    return n

def _meta_write(op):
    "resize_, set_: change the tensor itself"
    re_ = op._handle.redispatch_boxed

    def kernel(self, *a, **k):
        i = self.get_device()
        _to_cpu(self)                         # set_ compares the tensor's device with the storage's
        try:
            re_(_CPU_KEY, self, *a, **k)
        finally:
            _to_cuda(self, i)
        s = self.untyped_storage()
        b = _blocks.get(s._cdata)
        if b is not None and b.index != i:
            raise RuntimeError(f"Attempted to set the storage of a tensor on device \"cuda:{i}\" to a storage on different device "
                               f"\"cuda:{b.index}\".  This is no longer allowed; the devices must match.")
        _adopt(s, i)
        return self
    return kernel

def _copy(self, src, non_blocking=False):
    if not self.is_cuda and not src.is_cuda:
        return torch.ops.aten.copy_.default.redispatch(_CPU_KEY, self, src, non_blocking)
    d = _twin(self) if self.is_cuda else self.data
    torch.ops.aten.copy_.default._op(d, _twin(src) if src.is_cuda else src.data)
    return self

def _convolution_check(args):
    x, w = args[0], args[1]
    if x.device != w.device and x.device.type != w.device.type:
        kind = lambda t: {"torch.float32": "Float", "torch.float64": "Double", "torch.float16": "Half", "torch.bfloat16": "BFloat16"}.get(str(t.dtype), "Float")
        full = lambda t: f"torch.{'cuda.' if t.is_cuda else ''}{kind(t)}Tensor"
        raise RuntimeError(f"Input type ({full(x)}) and weight type ({full(w)}) should be the same")

def _convolution(op):
    fast = _fast(op)

    def kernel(*args, **kwargs):
        _convolution_check(args)
        return fast(*args, **kwargs)
    return kernel

FALLBACK_ONLY = False                         # for the comparison (ways.py)

def _register():
    global _CPU_KEY
    from nbddp.capabilities.simulated_gpus.on_rank import study_cuda as simgpu_cuda
    _CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    aten = torch.ops.aten
    any_ = torch.library.Library("_", "IMPL")
    any_.fallback(run, "CUDA")
    lib = torch.library.Library("aten", "IMPL")
    _keep.extend([any_, lib])
    warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    special = {"aten::empty.memory_format": _new_empty(aten.empty.memory_format, lambda a: _prod(a[0])),
        "aten::empty_strided": _new_empty(aten.empty_strided.default,
                                          lambda a: 1 + sum((int(n) - 1) * int(s) for n, s in zip(a[0], a[1])) if _prod(a[0]) else 0),
        "aten::copy_": _copy, "aten::resize_": _meta_write(aten.resize_.default), "aten::alias": _view(aten.alias.default),
        "aten::detach": _view(aten.alias.default), "aten::_lazy_clone": _general(aten.clone.default),
        "aten::_unsafe_view": _view(aten._unsafe_view.default), "aten::view.dtype": _view(aten.view.dtype), "aten::record_stream": lambda *a: None,
        **{f"aten::{f.__name__}": f for f in simgpu_cuda.SYNC_BATCH_NORM},
        **{f"aten::_use_{lib_}_ctc_loss{o}": lambda *a: False for lib_ in ("cudnn", "miopen") for o in ("", ".Tensor")}}
    for o in ("convolution", "_convolution", "convolution_overrideable"):
        special[f"aten::{o}"] = _convolution(getattr(aten, o).default)
    special["aten::convolution_backward"] = _fast(aten.convolution_backward.default)
    count = 0
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        name, _, over = full[6:].partition(".")
        try:
            packet = getattr(aten, name)
            op = getattr(packet, over or "default")
        except (AttributeError, RuntimeError):
            continue
        schema = op._schema
        if any(str(a.type) == "Optional[Generator]" or "Generator" in str(a.type) for a in schema.arguments):
            RANDOM.add(schema.name)
        fn = special.get(full)
        if fn is None:
            if has(full, "CompositeImplicitAutograd") and not has(full, "CPU"):
                if has(full, "CUDA"):         # a CUDA build has a fused kernel (rms_norm): take the composite one
                    for key in ("AutogradCUDA", "CUDA"):
                        lib.impl(full[6:], op.decompose, key)
                continue
            if not (has(full, "CPU") or name.startswith("_foreach_") or has(full, "CUDA")):
                continue                      # (a CUDA build has operators only for CUDA: run() says so)
            views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
            if name == "set_":
                fn = _meta_write(op)
            elif views and has(full, "CPU"):
                fn = _view(op)
            elif any(a.alias_info and a.alias_info.is_write for a in schema.arguments) or any(
                    "Tensor[]" in str(a.type) or "List[Tensor" in str(a.type) for a in schema.arguments):
                fn = _general(op)
            else:
                fn = _fast(op)
        if name.startswith("_thnn_fused_") and "backward" not in name or FALLBACK_ONLY and full not in special and name != "set_" and fn.__name__ != "view":
            continue
        try:
            lib.impl(full[6:], fn, "CUDA")
            count += 1
        except RuntimeError as e:
            if os.environ.get("SIMGPU_DEBUG"):
                print("not registered:", full, e)
    for key in ("AutogradCUDA", "CUDA"):
        for fn in simgpu_cuda.COMPOSITE:
            lib.impl(fn.__name__, fn, key)
    return count

# ------------------------------------------------------------------ 5. installation
installed = False

def install(gpus=None, name=None, memory=None):
    "simulate this many GPUs in this process (environment: SIMGPU, SIMGPU_NAME, SIMGPU_MEMORY in bytes)"
    global N, NAME, TOTAL, CAPABILITY, installed
    if installed:
        return
    if torch.cuda.is_available():
        raise Refused("there are real GPUs")
    N = int(gpus if gpus is not None else os.environ.get("SIMGPU", 1))
    NAME = name or os.environ.get("SIMGPU_NAME") or NAME
    TOTAL = int(memory or os.environ.get("SIMGPU_MEMORY") or TOTAL)
    v = os.environ.get("CUDA_VISIBLE_DEVICES")
    if v is not None:
        ids = []
        for x in v.split(","):
            if not x.strip().isdigit() or int(x) >= N:
                break
            ids.append(int(x))
        N = len(ids)
    _mem.extend(Memory() for _ in range(N))
    _find_layout()
    _install_hooks()
    from nbddp.capabilities.simulated_gpus.on_rank import study_cuda as simgpu_cuda, study_nccl as simgpu_nccl
    simgpu_cuda.install()
    _register()
    simgpu_nccl.install()
    installed = True

def selftest():
    "run in a child process: a wrong vtable slot ends the process (C++ exception) instead of raising"
    install(2)
    w = torch.randn(4, 3, device="cuda:1", requires_grad=True)
    x = torch.nn.Parameter(torch.ones(2, 4, device="cuda:1"))
    y = (x @ w).view(-1)[1:].relu().sum()
    y.backward()
    c = w.detach().cpu().requires_grad_()
    (torch.ones(2, 4) @ c).view(-1)[1:].relu().sum().backward()
    with torch.autocast("cuda", dtype=torch.float16):
        half = (x @ w).dtype
    good = (str(y.device), str(w.grad.device), str(w.untyped_storage().device), half) == ("cuda:1", "cuda:1", "cuda:1", torch.float16)
    if not good or not torch.equal(w.grad.cpu(), c.grad) or torch.cuda.memory_allocated(1) < 1024 or torch.cuda.memory_allocated(0):
        raise Refused("the self-test gave wrong results")
    print("simgpu ok")

def unusable(python=sys.executable):
    "'' or why simgpu must not be used with this interpreter's torch; ask once per torch version and keep the answer"
    import subprocess
    r = subprocess.run([python, "-c", "import simgpu; simgpu.selftest()"], capture_output=True, text=True, timeout=300,
                       env=dict(os.environ, PYTHONPATH=os.path.dirname(os.path.abspath(__file__))))
    return "" if r.returncode == 0 and "simgpu ok" in r.stdout else (r.stderr.strip().splitlines() or [f"exit {r.returncode}"])[-1]
