# ruff: noqa
# mypy: ignore-errors
"""simgpu_cuda: what simgpu needs besides the dispatcher: torch.cuda's Python side (devices, memory statistics, streams,
events, generators, storages) and the operators that exist only for CUDA."""
import ctypes, os, sys, threading, time
import torch
import nbddp.capabilities.simulated_gpus.on_rank.study as core
from nbddp.capabilities.simulated_gpus.on_rank.study import CAPABILITY, CONTEXT, CUDA, L, M16, M64, MiB, Tensor, _adopt, _blocks, _cuda_error, _cur, _exchange, _index, _mem, _room, _set, _twin

# ------------------------------------------------------------------ 5. torch.cuda
class _Props:
    def __init__(self, i):
        self.name, self.total_memory = core.NAME, core.TOTAL
        self.major, self.minor = CAPABILITY
        self.multi_processor_count, self.max_threads_per_multi_processor, self.warp_size = 40, 1024, 32
        self.max_threads_per_block, self.shared_memory_per_block, self.regs_per_multiprocessor = 1024, 49152, 65536
        self.is_integrated = self.is_multi_gpu_board = False
        self.L2_cache_size, self.gcnArchName, self.uuid = 4 * MiB, core.NAME, f"SIM-{i}"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = i, 0, 0
        self.shared_memory_per_block_optin = 65536
        self.shared_memory_per_multiprocessor = 65536

    def __repr__(self):
        return (f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
                f"total_memory={self.total_memory // MiB}MB, multi_processor_count={self.multi_processor_count})")

class Stream(torch.Stream):
    "work is done at once, so a stream only has a name"
    _ids = [0]

    def __new__(cls, device=None, priority=0, stream_id=None, device_index=None, device_type=None, **kw):
        if stream_id is None:
            Stream._ids[0] += 1
            stream_id = Stream._ids[0]
            device_index = _index(torch.device("cuda", device) if isinstance(device, int) else torch.device(device) if device is not None else None)
        self = super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)
        self.__dict__["_prio"] = priority
        return self

    cuda_stream = property(lambda s: s.stream_id)
    _as_parameter_ = property(lambda s: ctypes.c_void_p(s.stream_id))
    priority = property(lambda s: s._prio)
    query = lambda s: True
    synchronize = lambda s: None
    wait_event = lambda s, e: None
    wait_stream = lambda s, o: None
    priority_range = staticmethod(lambda: (0, -5))

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self):
        self.__dict__.setdefault("_was", []).append((_cur(), _stream.get((threading.get_ident(), self.device_index), 0)))
        _set(self.device_index)
        _stream[threading.get_ident(), self.device_index] = self.stream_id
        return self

    def __exit__(self, *a):
        dev, sid = self._was.pop()
        _stream[threading.get_ident(), self.device_index] = sid
        _set(dev)

    def __eq__(self, o):
        return isinstance(o, torch.Stream) and (self.stream_id, self.device) == (o.stream_id, o.device)

    def __hash__(self):
        return hash((self.stream_id, self.device_index))

    def __repr__(self):
        return f"<torch.cuda.Stream device=cuda:{self.device_index} cuda_stream={self.stream_id:#x}>"

_stream = {}

class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False, device=None):
        self = super().__new__(cls, device="cuda", enable_timing=enable_timing)
        self.__dict__.update(_timing=enable_timing, _t=None)
        return self

    def __init__(self, *a, **k):
        pass

    def record(self, stream=None):
        self._t = time.perf_counter()

    def elapsed_time(self, other):
        if not (self._timing and other._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._t is None or other._t is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (other._t - self._t) * 1e3

    query = lambda s: True
    wait = lambda s, stream=None: None
    synchronize = lambda s: None
    __repr__ = lambda s: "<torch.cuda.Event 0x0>" if s._t is None else f"<torch.cuda.Event {id(s):#x}>"

def _stats(i):
    m = _mem[i]
    z = lambda cur, peak, a, f: {p: dict(current=cur, peak=peak, allocated=a, freed=f) for p in ("all", "small_pool", "large_pool")}
    segs = max(1, m.reserved // (20 * MiB)) if m.reserved else 0
    zero = lambda: z(0, 0, 0, 0)
    return dict(allocation=z(m.count, m.count, m.count, 0), segment=z(segs, segs, segs, 0), active=z(m.count, m.count, m.count, 0),
                inactive_split=zero(), allocated_bytes=z(m.now, m.peak, m.total_in, m.total_out),
                reserved_bytes=z(m.reserved, m.reserved_peak, m.reserved_peak, m.reserved_peak - m.reserved),
                active_bytes=z(m.now, m.peak, m.total_in, m.total_out), inactive_split_bytes=zero(),
                requested_bytes=z(m.requested, m.peak, m.total_in, m.total_out), oversize_allocations=dict(current=0, peak=0, allocated=0, freed=0),
                oversize_segments=dict(current=0, peak=0, allocated=0, freed=0), num_alloc_retries=m.ooms, num_ooms=m.ooms,
                num_sync_all_streams=0, num_device_alloc=segs, num_device_free=0, max_split_size=-1)

def _empty_cache():
    for m in _mem:
        m.reserved = -(-m.now // (2 * MiB)) * 2 * MiB
        m.free_small, m.free_large = 0, m.reserved - m.now

def _reset_peak(i):
    _mem[i].peak, _mem[i].reserved_peak = _mem[i].now, _mem[i].reserved

def _set_checked(i):
    if not 0 <= i < core.N:
        raise _cuda_error()
    _set(i)

def _cuda_init():
    if core.N < 1:
        raise RuntimeError("No CUDA GPUs are available")

def _legacy(name, dtype):
    "torch.cuda.FloatTensor and the like"
    class Meta(type):
        def __call__(cls, *a):
            if a and all(isinstance(x, int) for x in a):
                return torch.empty(*a, dtype=dtype, device="cuda")
            return torch.tensor(*a, dtype=dtype, device="cuda") if a else torch.empty(0, dtype=dtype, device="cuda")

        def __instancecheck__(cls, o):
            return isinstance(o, Tensor) and o.is_cuda and o.dtype == dtype
    return Meta(name, (), {"__module__": "torch.cuda", "dtype": dtype, "is_cuda": True})

def _relabelled(f, at):
    """_make_subclass and as_subclass make a view in C++ and give it a new Python object; a view that comes from a
    Python kernel has one already.  So the argument looks like a CPU tensor during the call (the GIL is held)."""
    def wrapper(*a, **k):                     # torch._dynamo compares signatures: this one passes
        t = a[at] if len(a) > at else None
        ks = torch._C._dispatch_keys(t) if isinstance(t, Tensor) else None
        if ks is None or not ks.has(torch._C.DispatchKey.CUDA) or ks.has(torch._C.DispatchKey.Python):
            return f(*a, **k)
        p = t._cdata
        keys, dev = M64[(p + L.keys) >> 3], M16[(p + L.dev) >> 1]      # (a fake tensor's inside: CUDA keys, device meta)
        M64[(p + L.keys) >> 3] = keys & ~L.cuda_only | L.cpu_only
        if dev & 0xFF == CUDA:
            M16[(p + L.dev) >> 1] = 0xFF00
        try:
            r = f(*a, **k)
        finally:
            M64[(p + L.keys) >> 3], M16[(p + L.dev) >> 1] = keys, dev
        q = r._cdata
        if M64[(q + L.keys) >> 3] & L.cpu_only == L.cpu_only:
            M64[(q + L.keys) >> 3] = M64[(q + L.keys) >> 3] & ~L.cpu_only | L.cuda_only
        if dev & 0xFF == CUDA:
            M16[(q + L.dev) >> 1] = dev
        return r
    return wrapper

def install():
    C, cuda = torch._C, torch.cuda
    tid = threading.get_ident
    nothing = lambda *a, **k: None
    names = dict(_cuda_init=_cuda_init, _cuda_getDeviceCount=lambda: core.N, _cuda_getDevice=_cur, _cuda_setDevice=_set_checked,
        _cuda_exchangeDevice=lambda i: _exchange(i) if i < core.N else _set_checked(i), _cuda_maybeExchangeDevice=_exchange,
        _cuda_isInBadFork=lambda: core._bad_fork, _cuda_getArchFlags=lambda: "sm_70 sm_75 sm_80 sm_86 sm_90",
        _cuda_getCompiledVersion=lambda: 12080, _cuda_synchronize=nothing, _cuda_ipc_collect=nothing, _cuda_emptyCache=_empty_cache,
        _cuda_memoryStats=_stats, _cuda_resetPeakMemoryStats=_reset_peak, _cuda_resetAccumulatedMemoryStats=nothing,
        _cuda_hasPrimaryContext=lambda i: True, _cuda_canDeviceAccessPeer=lambda a, b: a != b, _cuda_sleep=nothing,
        _cuda_getAllocatorBackend=lambda: "native", _cuda_memorySnapshot=lambda *a: dict(segments=[], device_traces=[], allocator_settings={}),
        _cuda_record_memory_history=nothing, _cuda_record_memory_history_legacy=nothing, _cuda_isHistoryEnabled=lambda: False,
        _cuda_setMemoryFraction=lambda f, i: setattr(_mem[i], "limit", int(f * core.TOTAL)),
        _cuda_getMemoryFraction=lambda i: (_mem[i].limit or core.TOTAL) / core.TOTAL,
        _cuda_getDefaultStream=lambda i: (0, i, CUDA), _cuda_getCurrentStream=lambda i: (_stream.get((tid(), i), 0), i, CUDA),
        _cuda_setStream=lambda stream_id, device_index, device_type: (_set(device_index), _stream.__setitem__((tid(), device_index), stream_id))[0],
        _cuda_getCurrentRawStream=lambda i: _stream.get((tid(), i), 0), _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_get_sync_debug_mode=lambda: 0, _cuda_set_sync_debug_mode=nothing, _cuda_lock_mutex=nothing, _cuda_unlock_mutex=nothing,
        _cuda_getCurrentBlasHandle=lambda: 0, _cuda_clearCublasWorkspaces=nothing, _cuda_cudaCachingAllocator_is_enabled=lambda: True,
        _cuda_hostMemoryStats=lambda: {}, _cuda_get_cudnn_benchmark_limit=lambda: 10, _cuda_set_cudnn_benchmark_limit=nothing, _cudnn=None)
    for k, v in names.items():
        if v is not None:
            setattr(C, k, v)
    for mod in [m for n, m in sys.modules.items() if n.startswith("torch.cuda.") and m]:
        for k in names.keys() & vars(mod).keys():
            setattr(mod, k, names[k])         # modules that imported a dummy of that name
    C._has_cuda = True
    torch.version.cuda = torch.version.cuda or "12.8"

    class cudart:
        class cudaError:
            success = 0
        cudaError_t = int
        cudaGetErrorString = staticmethod(lambda c: f"error {c}")
        cudaMemGetInfo = staticmethod(lambda i: (max(0, core.TOTAL - CONTEXT - max(_mem[i].reserved, _mem[i].now)), core.TOTAL))
        cudaHostRegister = cudaHostUnregister = staticmethod(lambda *a: 0)
        cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)
    cuda._cudart = cudart
    cuda._exchange_device, cuda._maybe_exchange_device = names["_cuda_exchangeDevice"], names["_cuda_maybeExchangeDevice"]
    cuda._is_in_bad_fork = names["_cuda_isInBadFork"]
    for k in ("_cuda_CUDAAllocator_AllocatorState", "_cuda_CUDAAllocator"):    # torch.compile imports them
        if not hasattr(C, k):
            setattr(C, k, type(k, (), {}))
    cuda._device_count_nvml = lambda: core.N
    for k in ("_queued_calls",):              # capability checks of a real driver
        getattr(cuda, k).clear()

    def props(device=None):
        cuda._lazy_init()
        i = cuda._utils._get_device_index(device, optional=True)
        if not 0 <= i < core.N:
            raise AssertionError("Invalid device id")
        return _Props(i)
    cuda.get_device_properties = props
    cuda._CudaDeviceProperties = C._CudaDeviceProperties = _Props
    cuda.is_bf16_supported = lambda including_emulation=True: including_emulation or CAPABILITY[0] >= 8
    for mod in (cuda, cuda.streams):
        mod.Stream, mod.Event = Stream, Event
    cuda.utilization = lambda device=None: 0
    cuda.nccl.version = lambda: (2, 27, 5)
    cuda.nccl.is_available = lambda tensors=(): True
    cuda.amp.common.amp_definitely_not_available = lambda: False
    if hasattr(torch, "accelerator"):
        for k, v in dict(_accelerator_setDeviceIndex=_set_checked, _accelerator_getDeviceIndex=_cur,
                         _accelerator_synchronizeDevice=nothing, _accelerator_getStream=lambda i: Stream(stream_id=_stream.get((tid(), i), 0), device_index=i),
                         _accelerator_setStream=lambda s: names["_cuda_setStream"](s.stream_id, s.device_index, CUDA),
                         _accelerator_exchangeDevice=_exchange, _accelerator_maybeExchangeDevice=_exchange, _accelerator_emptyCache=_empty_cache,
                         _accelerator_getDeviceStats=_stats, _accelerator_resetPeakStats=_reset_peak,
                         _accelerator_getMemoryInfo=cudart.cudaMemGetInfo).items():
            if hasattr(C, k):
                setattr(C, k, v)
    # C++ makes a view here and gives it a new Python object; a view from a Python kernel has one already
    torch.Tensor._make_subclass = staticmethod(_relabelled(torch.Tensor._make_subclass, 1))
    torch.Tensor.as_subclass = _relabelled(torch.Tensor.as_subclass, 0)
    for word, dtype in dict(Float="float32", Double="float64", Half="float16", BFloat16="bfloat16", Long="int64", Int="int32", Short="int16",
                            Char="int8", Byte="uint8", Bool="bool").items():
        setattr(cuda, word + "Tensor", _legacy(word + "Tensor", getattr(torch, dtype)))
    # generators: a CPU generator that carries the device's label
    real = torch.Generator

    class Generator_(real):
        def __new__(cls, device="cpu"):
            d = torch.device(device)
            if d.type != "cuda":
                return real.__new__(real if cls is Generator_ else cls, device)
            i = _index(d)
            g = real.__new__(cls)
            M16[(g._cdata + L.gdev) >> 1] = CUDA | i << 8
            return g

        def __init__(self, device="cpu"):
            pass

        def __reduce__(self):
            return _load_generator, (self.device, self.get_state())
    Generator_.__name__ = Generator_.__qualname__ = "Generator"
    meta = type("Meta", (type(real),), {"__instancecheck__": lambda c, o: isinstance(o, real)})
    torch.Generator = meta("Generator", (Generator_,), {"__module__": "torch"})
    cuda.default_generators = tuple(torch.Generator(f"cuda:{i}") for i in range(core.N))
    # storages on cuda
    old_new = torch.UntypedStorage.__new__

    def storage_new(cls, *args, device=None, **kw):
        d = torch.device(device) if device is not None else None
        if d is None or d.type != "cuda":
            return old_new(cls, *args, **kw) if device is None else old_new(cls, *args, device=device, **kw)
        i = _index(d)
        if args and isinstance(args[0], int):
            _room(i, args[0])
        s = old_new(cls, *args, **kw)
        _adopt(s, i)
        return s
    torch.UntypedStorage.__new__ = storage_new
    old_copy = torch.UntypedStorage.copy_

    def storage_copy(self, source, non_blocking=None):
        if self.device.type != "cuda" and source.device.type != "cuda":
            return old_copy(self, source, bool(non_blocking))
        if self.nbytes() != source.nbytes():
            raise RuntimeError("size does not match")
        ctypes.memmove(self.data_ptr(), source.data_ptr(), self.nbytes())
        return self
    torch.UntypedStorage.copy_ = storage_copy
    old_resize = torch.UntypedStorage.resize_

    def storage_resize(self, n):
        b = _blocks.get(self._cdata)
        if b is not None and n > b.raw:
            _room(b.index, n - b.raw)
        old_resize(self, n)
        if b is not None:
            _adopt(self, b.index)
        return self
    torch.UntypedStorage.resize_ = storage_resize
    real_device = torch._C.StorageBase.device

    def storage_device(self):
        b = _blocks.get(self._cdata)
        return real_device.__get__(self) if b is None else torch.device("cuda", b.index)
    torch.UntypedStorage.device = property(storage_device)
    torch.UntypedStorage.is_cuda = property(lambda self: self._cdata in _blocks)
    torch.UntypedStorage.get_device = lambda self: self.device.index if self.is_cuda else -1
    # after fork() a real driver cannot be used
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)

def _load_generator(device, state):
    g = torch.Generator(device)
    g.set_state(state)
    return g

def _after_fork():
    if torch.cuda._initialized:
        core._bad_fork = True

# operators that exist only for CUDA: SyncBatchNorm's, fused RNN cells
def _stats_shape(x):
    return [0] + list(range(2, x.dim())), [1, -1] + [1] * (x.dim() - 2)

def batch_norm_stats(x, eps):
    dims, _ = _stats_shape(x)
    xf = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    var, mean = torch.var_mean(xf, dims, correction=0)
    return mean, torch.rsqrt(var + eps)

def batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    c = counts.reshape(-1, 1).to(mean.dtype)
    total = c.sum()
    m = (mean * c).sum(0) / total
    var = ((1.0 / (invstd * invstd) - eps + (mean - m) ** 2) * c).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(m.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_((var * (total / (total - 1))).to(running_var.dtype), alpha=momentum)
    return m, torch.rsqrt(var + eps)

def batch_norm_gather_stats(x, mean, invstd, running_mean, running_var, momentum, eps, count):
    return batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps,
                                               torch.full((mean.shape[0],), float(count), device=mean.device))

def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    _, sh = _stats_shape(x)
    y = (x.to(mean.dtype) - mean.reshape(sh)) * invstd.reshape(sh)
    if weight is not None:
        y = y * weight.reshape(sh)
    if bias is not None:
        y = y + bias.reshape(sh)
    return y.to(x.dtype)

def batch_norm_backward_reduce(go, x, mean, invstd, weight, want_x, want_w, want_b):
    dims, sh = _stats_shape(x)
    g = go.to(mean.dtype)
    sum_dy = g.sum(dims)
    sum_dy_xmu = (g * (x.to(mean.dtype) - mean.reshape(sh))).sum(dims)
    e = lambda: torch.empty(0, device=x.device)
    return (sum_dy if want_x else e(), sum_dy_xmu if want_x else e(),
            (sum_dy_xmu * invstd).to(weight.dtype) if want_w and weight is not None else e(),
            sum_dy.to(weight.dtype if weight is not None else mean.dtype) if want_b else e())

def batch_norm_backward_elemt(go, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    _, sh = _stats_shape(x)
    total = count.sum().to(mean.dtype)
    g, xm = go.to(mean.dtype), x.to(mean.dtype) - mean.reshape(sh)
    gi = g - (sum_dy / total).reshape(sh) - xm * (invstd * invstd * sum_dy_xmu / total).reshape(sh)
    gi = gi * (invstd if weight is None else invstd * weight).reshape(sh)
    return gi.to(x.dtype)

def dropout(x, p, train):
    "as on the CPU (CUDA has a fused kernel that draws other numbers)"
    if p < 0 or p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or x.numel() == 0:
        return x
    return x * torch.zeros_like(x) if p == 1 else x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)

def _thnn_fused_lstm_cell(ig, hg, cx, b1=None, b2=None):
    g = ig + hg if b1 is None else ig + b1 + (hg + b2)
    i, f, c, o = g.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.empty(0, device=ig.device)

def _thnn_fused_gru_cell(ig, hg, hx, b1=None, b2=None):
    if b1 is not None:
        ig, hg = ig + b1, hg + b2
    (ir, iz, n), (hr, hz, hn) = ig.chunk(3, 1), hg.chunk(3, 1)
    r, z = (hr + ir).sigmoid(), (hz + iz).sigmoid()
    n = (n + hn * r).tanh()
    return (hx - n) * z + n, torch.empty(0, device=ig.device)

def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    "the kernel the CPU would choose, so that digits equal the CPU program's"
    a = torch.ops.aten
    kw = dict(attn_mask=None if attn_mask is None or not attn_mask.is_cuda else _twin(attn_mask), dropout_p=dropout_p,
              is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v = _twin(query), _twin(key), _twin(value)
    for t, o in ((q, query), (k, key), (v, value)):
        t.requires_grad_(o.requires_grad and torch.is_grad_enabled())
    choice = a._fused_sdp_choice(q, k, v, **kw)
    mask = attn_mask
    if choice == 1 and query.dim() == 4:                           # flash attention for CPU
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        return a._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return a._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]

SYNC_BATCH_NORM = (batch_norm_stats, batch_norm_gather_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
                   batch_norm_backward_reduce, batch_norm_backward_elemt)
COMPOSITE = (dropout, _thnn_fused_lstm_cell, _thnn_fused_gru_cell, scaled_dot_product_attention)
