# ruff: noqa
# mypy: ignore-errors
"""simgpu_nccl: the nccl backend on simulated GPUs is gloo on the CPU twins of the tensors.

The user's process group knows gloo as its backend for cuda only, so a CPU tensor gets torch's own "No backend type
associated with device type cpu".  The c10d operators at the CUDA key relabel the tensors and call themselves with a
shadow group, where the same gloo is the backend for cpu; work objects and futures are gloo's own."""
import ctypes, os, types, warnings
import torch
from nbddp.capabilities.simulated_gpus.on_rank.study import CUDA, M8, M64, Device, Tensor, _flat, _keep, _relabel_args, _res, _to_cuda

_shadow = {}                                  # id(gloo backend) -> a group that knows it as the CPU's backend

def _duplicate_check(sh, device):
    "nccl refuses two ranks on one GPU when the communicator is made, at the first collective"
    if sh["device"] is not None:
        return
    sh["device"] = device
    store, rank, size = sh["store"], sh["rank"], sh["size"]
    import socket
    me = f"{socket.gethostname()}:{_physical(device)}"
    try:
        store.set(f"simgpu/{rank}", me)
        others = [store.get(f"simgpu/{r}").decode() for r in range(size)]
    except Exception:
        return
    for r, o in enumerate(others):
        if r != rank and o == me:
            import torch.distributed as dist
            raise dist.DistBackendError(
                f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN "
                f"for details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
                f"Last error:\nDuplicate GPU detected : rank {rank} and rank {r} both on CUDA device {(_physical(device) + 1) * 0x1000:x}")

def _average(f, ReduceOp):
    "gloo has no AVG (2.6 raises, 2.10's reduce-scatter silently sums): sum and divide"
    def wrapper(self, *args):
        opts = args[-1] if args else None
        if getattr(opts, "reduceOp", None) != ReduceOp.AVG:
            return f(self, *args)
        opts.reduceOp = ReduceOp.SUM
        f(self, *args).wait()
        opts.reduceOp = ReduceOp.AVG
        out = args[0] if isinstance(args[0], list) else [args[0]]
        for t in out:
            t.div_(self.size())
        done = torch.futures.Future()         # not gloo's work: its second wait() would copy the sum again
        done.set_result(out)
        return torch._C._distributed_c10d._create_work_from_future(done)
    return wrapper

def _no_cuda_timer():
    "a CUDA build registers a timer for DDP that needs a driver: give its entry in the hash table another key"
    lib = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    try:
        get = lib._ZN4c10d13TimerRegistryB5cxx11Ev
    except AttributeError:
        try:
            get = lib._ZN4c10d13TimerRegistryEv
        except AttributeError:
            return
    get.restype = ctypes.c_void_p
    table = get()
    node, n = M64[(table >> 3) + 2], 0        # std::unordered_map: buckets, count, first node, size
    while node and n < M64[(table >> 3) + 3] < 8:
        if M8[node + 8] == CUDA:
            M8[node + 8] = 99
        node, n = M64[node >> 3], n + 1

def _physical(i):
    v = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [x.strip() for x in v.split(",")] if v else None
    return int(ids[i]) if ids and i < len(ids) and ids[i].isdigit() else i

def install():
    import torch.distributed as dist
    if not dist.is_available():
        return
    import torch.distributed.distributed_c10d as d
    P = torch._C._distributed_c10d
    ReduceOp = dist.ReduceOp

    class Options(P.ProcessGroupGloo._Options if hasattr(P.ProcessGroupGloo, "_Options") else object):
        def __init__(self, is_high_priority_stream=False):
            super().__init__()
            self.__dict__["is_high_priority_stream"] = is_high_priority_stream
            self.__dict__["config"] = types.SimpleNamespace()

    class _Meta(type):
        def __instancecheck__(cls, o):
            return id(o) in _shadow

    class ProcessGroupNCCL(metaclass=_Meta):
        def __new__(cls, store, rank, size, options=None, timeout=None):
            timeout = getattr(options, "_timeout", timeout) or d.default_pg_timeout
            gloo = P.ProcessGroupGloo(d.PrefixStore("simnccl/", store), rank, size, timeout=timeout)
            group = P.ProcessGroup(d.PrefixStore("simshadow/", store), rank, size)
            group._register_backend(torch.device("cpu"), P.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(P.ProcessGroup.BackendType.GLOO)
            _shadow[id(gloo)] = dict(gloo=gloo, group=group, boxed=group.boxed(), device=None, store=store, rank=rank, size=size)
            return gloo
    ProcessGroupNCCL.Options = Options
    ProcessGroupNCCL.NCCLConfig = types.SimpleNamespace
    for f in ("_shutdown", "shutdown", "abort", "_abort", "_group_start", "_group_end", "eager_connect_single_device", "perform_nocolor_split"):
        if not hasattr(P.ProcessGroupGloo, f):          # torch calls these on an nccl backend
            setattr(P.ProcessGroupGloo, f, lambda self, *a: None)
    P.ProcessGroupNCCL = d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    import datetime
    _no_cuda_timer()
    P.Logger.set_runtime_stats_and_log = lambda self: None    # it wants a CUDA timer, which a CPU build lacks
    d._NCCL_AVAILABLE = True
    d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)
    dist.is_nccl_available = d.is_nccl_available = lambda: True
    for f in ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"):
        if hasattr(P.ProcessGroup, f):
            setattr(P.ProcessGroup, f, _average(getattr(P.ProcessGroup, f), ReduceOp))
    lib = torch.library.Library("c10d", "IMPL")
    _keep.append(lib)
    unbox = P.ProcessGroup.unbox
    cuda = torch.device("cuda")

    def make(op):
        names = [a.name for a in op._schema.arguments]
        at = names.index("process_group")
        flat = op._schema.name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")

        def kernel(*args, **kwargs):
            try:
                backend = unbox(args[at])._get_backend(cuda)
            except RuntimeError:
                raise RuntimeError("No backend type associated with device type cuda") from None
            sh = _shadow.get(id(backend))
            if sh is None:
                raise RuntimeError("simgpu: a collective on cuda tensors needs the nccl backend")
            if any(not t.is_cuda for t in _flat(args)):
                raise ValueError("Tensors must be CUDA and dense")
            new, _, first, _, back = _relabel_args(op, args, {})
            if first is not None and op._schema.name not in ("c10d::send", "c10d::recv_", "c10d::recv_any_source_"):
                _duplicate_check(sh, first)
            new[at] = sh["boxed"]
            if flat:                          # gloo cuts along dimension 0, nccl does not look at shapes
                new[0], new[1] = new[0].view(-1), new[1].view(-1)
            out = op(*new, **kwargs)
            for a, t in back.values():        # gloo works on addresses: the label may change under way, so that
                _to_cuda(t, a.get_device())   # futures and DDP's bucket views hold cuda tensors again
            return (args[0], out[1]) if flat else _res(out, op, first, back)
        return kernel
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("c10d::") and full not in ("c10d::check_for_nan", "c10d::monitored_barrier_"):
            op = getattr(torch.ops.c10d, full[6:].split(".")[0]).default
            if any(a.name == "process_group" for a in op._schema.arguments):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    lib.impl(full[6:], make(op), "CUDA")

