"""Kernels for the CUDA key: each makes CPU twins of its arguments, calls the CPU's kernel, and labels what comes out.

They stand below autograd and autocast, which are torch's own. No mode is active, so they hold in every thread.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.cards import MIB
from nbddp.capabilities.simulated_gpus.on_rank import devices, dtypes, machine, memory, mixed_devices
from nbddp.capabilities.simulated_gpus.on_rank.arguments import Keywords, Relabelled, Tensor, flat

Kernel = Callable[..., Any]
CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
UNLIKE = re.compile("not implemented for|Expected a value of type 'Tensor'|requires the input tensor to be Float")
NO_HALF = re.compile("not implemented for '(Half|BFloat16)'")
LOW = {dtypes.WORDS[dtype]: dtype for dtype in dtypes.HALF}
LARGEST = 1 << 63  # bytes: from there on torch has an error of its own
MUCH = 1 << 28  # product of the arguments' elements, from which the result's size is computed first
random_operators: set[str] = set()  # names of those that take a generator
own: set[str] = set()  # names, or key and name, of those that have a kernel before `operators.py` serves the others
recording: list[Callable[..., Any]] = []  # a CUDA graph that is being captured: gets each call


def library(namespace: str) -> Any:
    """To register kernels in. A CUDA build has some already; torch reports that with a warning each time."""
    warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
    made = torch.library.Library(namespace, "IMPL")
    machine.held.append(made)
    return made


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The general kernel: any operator, any arguments."""
    if recording:
        return recording[-1](run_now, op, args, kwargs)
    return run_now(op, *args, **kwargs)


def run_now(op: Any, *args: Any, **kwargs: Any) -> Any:
    if devices.forked:
        torch.cuda._lazy_init()
    devices.check()
    call = Relabelled(op, args, kwargs)
    if call.mixed:
        mixed_devices.check(op, args, kwargs)
    index = devices.index_for(kwargs.get("device")) if call.device is None else call.device
    generator = _lend_generator(call, index) if op._schema.name in random_operators else None
    try:
        with torch._C._AutoDispatchBelowAutograd():
            out = op(*call.args, **call.kwargs)
    except NotImplementedError as error:
        raise _no_kernel(op, error) from None
    except RuntimeError as error:
        if not UNLIKE.search(str(error)):
            raise
        out = _otherwise(op, call.args, call.kwargs, error)
    finally:
        if generator is not None:
            machine.label_generator(*generator)
    return _results(op, out, index, call.originals)


def _no_kernel(op: Any, error: NotImplementedError) -> NotImplementedError:
    if "Could not run" not in str(error):
        return error
    return NotImplementedError(
        f"simulated GPUs cannot run {op._schema.name}: torch has no kernel of it for the CPU, which computes for them"
    )


def _otherwise(op: Any, args: Sequence[Any], kwargs: Keywords, error: RuntimeError) -> Any:
    """Where the CPU's kernel lacks half precision, compute in float32 and round. Else a number came for a tensor."""
    if "Expected a value of type 'Tensor'" in str(error):
        return op._overloadpacket(*args, **kwargs)
    lacks = NO_HALF.search(str(error))
    if lacks is None or writes(op):
        raise error
    low = LOW[lacks[1]]
    wide = op(*[_widened(arg, low) for arg in args], **{name: _widened(arg, low) for name, arg in kwargs.items()})
    return _narrowed(wide, low)


def _widened(arg: Any, low: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.float() if arg.dtype == low else arg
    return [_widened(part, low) for part in arg] if isinstance(arg, list) else arg


def _narrowed(out: Any, low: Any) -> Any:
    if isinstance(out, Tensor):
        return out.to(low) if out.dtype == torch.float32 else out
    return type(out)(_narrowed(part, low) for part in out) if isinstance(out, list | tuple) else out


# -- random numbers: the CPU's kernel with the generator of the device --------------------------------


def _lend_generator(call: Relabelled, index: int) -> tuple[Any, int]:
    """The program's generator or the device's has the CPU's label while the kernel runs. Returns it and its GPU."""
    given = [a for a in (call.kwargs.get("generator"), *call.args) if isinstance(a, torch.Generator)]
    generator = given[0] if given else torch.cuda.default_generators[index]
    if generator.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    if not given:
        call.kwargs = {**call.kwargs, "generator": generator}
    own = generator.device.index
    machine.label_generator(generator, None)
    return generator, own


# -- results ------------------------------------------------------------------------------------------


def labelled(tensor: Any, index: int) -> Any:
    """A result of a CPU kernel becomes a tensor of cuda:index, and its memory counts. Raises OutOfMemoryError."""
    parts = [tensor] if tensor.layout is torch.strided else list(sparse_parts(tensor))
    for part in parts:
        storage = part.untyped_storage()
        if storage._cdata not in memory.blocks:
            memory.adopt(storage, index)
    machine.to_cuda(tensor, index)
    return tensor


def sparse_parts(tensor: Any) -> Iterator[Any]:
    """The dense tensors that a sparse CPU tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
        return
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    yield from (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
    yield tensor.values()


def _results(op: Any, out: Any, index: int, originals: dict[int, tuple[Any, Any]]) -> Any:
    if writes(op):
        for tensor, twin in originals.values():
            if twin.layout is not torch.strided or twin.is_nested:
                continue
            if tensor.shape != twin.shape or tensor.stride() != twin.stride():
                _resized(tensor, twin, index)
    return relabelled(out, index, originals)


def _resized(tensor: Any, twin: Any, index: int) -> None:
    """An `out=` argument that the kernel has resized."""
    sizes = twin.shape, twin.stride(), twin.storage_offset()
    torch.ops.aten.as_strided_.default.redispatch(CPU_KEY, tensor, *sizes)
    memory.adopt(twin.untyped_storage(), index)


def relabelled(out: Any, index: int, originals: dict[int, tuple[Any, Any]]) -> Any:
    """What a CPU kernel has returned: twins become their tensors again, new tensors belong to the GPU."""
    if isinstance(out, Tensor):
        pair = originals.get(id(out))
        if pair is not None:
            return pair[0]
        return out if out.is_cuda else labelled(out, index)
    if isinstance(out, list | tuple):
        return type(out)(relabelled(part, index, originals) for part in out) if type(out) in (list, tuple) else out
    return out


@functools.cache
def writes(op: Any) -> bool:
    """Whether it writes to an argument."""
    return any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments)


def is_view(op: Any) -> bool:
    """Whether its result shares memory with an argument that it does not write to."""
    return any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)


# -- kernels that know their operator -------------------------------------------------------------------


def general(op: Any) -> Kernel:
    return lambda *args, **kwargs: run(op, *args, **kwargs)


def functional(op: Any) -> Kernel:
    """For an operator that writes to no argument and takes no list of tensors: the way that is taken most."""
    call, special = op._op, op._schema.name in random_operators
    to_cuda, blocks = machine.to_cuda, memory.blocks

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = None if kwargs or special or recording or devices.forked or devices.broken else _twins(args)
        if found is None:
            return run(op, *args, **kwargs)
        index, elements, twins = found
        if elements > MUCH:
            _foresee(op, twins, index)
        try:
            out = call(*twins)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or UNLIKE.search(str(error)):
                return run(op, *args)
            raise
        if type(out) is not Tensor or out.layout is not torch.strided or any(out is one for one in twins):
            return _otherwise_relabelled(out, index, args, twins)
        storage = out.untyped_storage()
        if storage._cdata not in blocks:
            memory.adopt(storage, index)
        to_cuda(out, index)
        return out

    return kernel


def _twins(args: Sequence[Any]) -> tuple[int, int, list[Any]] | None:
    """The only device, the product of all elements, and the arguments for the CPU's kernel. None: not so simple."""
    index, elements, twins = -1, 1, []
    last: Any = None
    twin: Any = None
    for arg in args:
        if isinstance(arg, Tensor):
            if arg is last:  # attention asks whether query, key and value are one
                elements *= arg.numel()
                twins.append(twin)
                continue
            last, own = arg, machine.index_of(arg)
            if own < 0 or (index >= 0 and own != index):
                return None
            index = own
            elements *= arg.numel()
            arg = twin = machine.twin(arg)
        elif type(arg) in (list, tuple) and arg and (arg[0] is None or isinstance(arg[0], Tensor)):
            return None
        twins.append(arg)
    return None if index < 0 else (index, elements, twins)


def _otherwise_relabelled(out: Any, index: int, args: Sequence[Any], twins: Sequence[Any]) -> Any:
    """Several results, or an argument again."""
    pairs = zip(args, twins, strict=True)
    return relabelled(out, index, {id(two): (one, two) for one, two in pairs if isinstance(one, Tensor)})


_foreseen: dict[Any, int] = {}


def _foresee(op: Any, args: Sequence[Any], index: int) -> None:
    """Computes with the meta kernel what the result takes, so that the host's memory is not filled before the error."""
    key = (op, *((a.shape, a.dtype) if isinstance(a, Tensor) else repr(a) for a in args))
    size = _foreseen.get(key)
    if size is None:
        try:
            out = op(*(_on_meta(arg) for arg in args))
            size = sum(tensor.untyped_storage().nbytes() for tensor in flat([out]))
        except (RuntimeError, TypeError):  # it has no meta kernel, or the program is wrong: the kernel says how
            size = 0
        _foreseen[key] = size
    if size > MIB:
        memory.make_room(index, size)


def _on_meta(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


def foreach(op: Any) -> Kernel:
    """For lists of tensors. Where a list has several devices, one element after the other, as torch's slow way."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
        if not lists or len(lists[0]) == 1 or len({tensor.device for one in lists for tensor in one}) < 2:
            return run(op, *args, **kwargs)  # which finds that one element has two devices
        single = [
            op(*([arg[i]] if isinstance(arg, list | tuple) else arg for arg in args), **kwargs)
            for i in range(len(lists[0]))
        ]
        return [one for part in single for one in part] if single[0] is not None else None

    return kernel


def view(op: Any) -> Kernel:
    """Changes metadata only. The CPU's kernel copies the keys of its argument, so it may see the CUDA tensor itself."""
    call = op._handle.redispatch_boxed

    def kernel(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.layout is not torch.strided:
            return run(op, tensor, *args, **kwargs)
        made = call(CPU_KEY, tensor, *args, **kwargs)
        if isinstance(made, Tensor):
            machine.set_index(made, machine.index_of(tensor))  # the storage has said cpu
        else:
            for one in made:
                machine.set_index(one, machine.index_of(tensor))
        return made

    return kernel


def not_dense(op: Any) -> Kernel:
    """For sparse and nested tensors. What they consist of keeps the CPU's label: a program gets a labelled copy."""
    if not is_view(op):
        return general(op)

    def kernel(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        index = machine.index_of(tensor)
        out = op(machine.twin(tensor), *args, **kwargs)
        if isinstance(out, list | tuple):  # the parts of a nested tensor
            return [labelled(one.data, index) for one in out]
        return labelled(out.data, index) if isinstance(out, Tensor) else out

    return kernel


def metadata_write(op: Any) -> Kernel:
    """`resize_` and `set_` change the tensor itself."""
    call = op._handle.redispatch_boxed

    def kernel(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        index = machine.index_of(tensor)
        machine.to_cpu(tensor)  # set_ compares the device of the tensor with that of the storage
        try:
            call(CPU_KEY, tensor, *args, **kwargs)
        finally:
            machine.to_cuda(tensor, index)
        storage = tensor.untyped_storage()
        other = memory.index_of(storage)
        if other != index and (other >= 0 or (args and not isinstance(args[0], list | tuple))):
            where = f"cuda:{other}" if other >= 0 else "cpu"
            raise RuntimeError(
                f'Attempted to set the storage of a tensor on device "cuda:{index}" to a storage on different device '
                f'"{where}".  This is no longer allowed; the devices must match.'
            )
        memory.adopt(storage, index)
        return tensor

    return kernel


def new_empty(op: Any, elements: Callable[[Sequence[Any]], int]) -> Kernel:
    """A tensor without content. elements: how many it has, computed from the arguments."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        index = devices.index_for(kwargs.pop("device", None))
        if kwargs.pop("pin_memory", None):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size = dtype.itemsize * elements(args)
        if MIB < size < LARGEST:
            memory.make_room(index, size)
        with torch._C._AutoDispatchBelowAutograd():
            return labelled(op(*args, **kwargs), index)

    return kernel
