"""Operators that torch has for CUDA alone, or computes otherwise there: written with others, on CUDA tensors.

Where the CPU has a way of its own, it is taken, so that digits equal those of the program on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import dtypes, kernels, machine, memory, versions
from nbddp.capabilities.simulated_gpus.on_rank.arguments import flat

aten = torch.ops.aten
FLASH = 1  # of SDPBackend


# -- SyncBatchNorm --------------------------------------------------------------------------------------


def _channels(x: Any) -> tuple[list[int], list[int]]:
    """All dimensions but the channels', and the shape that spreads channels over x."""
    return [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)


def batch_norm_stats(x: Any, eps: float) -> tuple[Any, Any]:
    wide = x.float() if x.dtype in dtypes.HALF else x
    var, mean = torch.var_mean(wide, _channels(x)[0], correction=0)
    return mean, torch.rsqrt(var + eps)


def batch_norm_gather_stats_with_counts(
    x: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: float, eps: float, counts: Any
) -> tuple[Any, Any]:
    weights = counts.reshape(-1, 1).to(mean.dtype)
    total = weights.sum()
    whole = (mean * weights).sum(0) / total
    var = ((1.0 / (invstd * invstd) - eps + (mean - whole) ** 2) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = var * (total / (total - 1))
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return whole, torch.rsqrt(var + eps)


def batch_norm_gather_stats(
    x: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: float, eps: float, count: int
) -> tuple[Any, Any]:
    counts = torch.full((mean.shape[0],), float(count), device=mean.device)
    return batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts)


def batch_norm_elemt(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    shape = _channels(x)[1]
    y = (x.to(mean.dtype) - mean.reshape(shape)) * invstd.reshape(shape)
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y.to(x.dtype)


def batch_norm_backward_reduce(
    grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, of_x: bool, of_weight: bool, of_bias: bool
) -> tuple[Any, Any, Any, Any]:
    dims, shape = _channels(x)
    grad = grad.to(mean.dtype)
    sums = grad.sum(dims)
    products = (grad * (x.to(mean.dtype) - mean.reshape(shape))).sum(dims)
    kind = mean.dtype if weight is None else weight.dtype
    return (
        sums if of_x else torch.empty(0, device=x.device),
        products if of_x else torch.empty(0, device=x.device),
        (products * invstd).to(kind) if of_weight and weight is not None else torch.empty(0, device=x.device),
        sums.to(kind) if of_bias else torch.empty(0, device=x.device),
    )


def batch_norm_backward_elemt(
    grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, sums: Any, products: Any, count: Any
) -> Any:
    shape = _channels(x)[1]
    total = count.sum().to(mean.dtype)
    centred = x.to(mean.dtype) - mean.reshape(shape)
    scale = (invstd * invstd * products / total).reshape(shape)
    made = grad.to(mean.dtype) - (sums / total).reshape(shape) - centred * scale
    return (made * (invstd if weight is None else invstd * weight).reshape(shape)).to(x.dtype)


# -- dropout and attention ------------------------------------------------------------------------------


def dropout(x: Any, p: float, train: bool) -> Any:
    if p < 0 or p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or x.numel() == 0:
        return x
    if x.dtype in dtypes.INTEGERS:
        raise dtypes.lacks("fused_dropout", x.dtype)
    if p == 1:
        return x * torch.zeros_like(x)
    with memory.uncounted():
        noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    memory.count(noise, x.numel())  # a GPU keeps a mask of one byte each
    return x * noise


def native_dropout(x: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    if train is False or x.numel() == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    _check_attention(query, key, value, attn_mask)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if _is_wrapper(query):
        choose = aten._scaled_dot_product_efficient_attention
        return choose(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    twins = [machine.twin(one).requires_grad_(_needs_grad(one)) for one in (query, key, value)]
    seen = attn_mask if attn_mask is None or not attn_mask.is_cuda else machine.twin(attn_mask)
    choice = aten._fused_sdp_choice(*twins, seen, dropout_p, is_causal, **options)
    if choice == FLASH and query.dim() == 4:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), float("-inf"))
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    math = aten._scaled_dot_product_attention_math
    if query.dtype == torch.float64:  # of which a GPU has no other kernel either
        return math(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    with memory.uncounted():
        out = math(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    memory.count(out, out.untyped_storage().nbytes())
    if out.grad_fn is not None:
        kept = [query, key, value]  # a GPU's kernel keeps these for backward, and nothing of their product
        out.grad_fn.register_prehook(lambda grads: kept.clear())
    return out


def efficient_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, Any, Any, Any]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = flash(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)
    seed, offset = torch.zeros(2, dtype=torch.int64, device=query.device).unbind()
    return out, sums, seed, offset


def efficient_attention_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    out: Any,
    sums: Any,
    seed: Any,
    offset: Any,
    dropout_p: float,
    wanted: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, Any, Any, Any]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = flash(grad, query, key, value, out, sums, dropout_p, is_causal, attn_mask=bias, scale=scale)
    return (*grads, None)  # no gradient of the bias, as an undefined tensor


def _check_attention(query: Any, key: Any, value: Any, mask: Any) -> None:
    """What attention checks before it chooses a kernel."""
    places = {query.device, key.device, value.device}
    if len(places) > 1:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1 or min(query.dim(), key.dim(), value.dim()) < 2:
        aten.scaled_dot_product_attention(*(machine.twin(one) for one in (query, key, value)))  # raises its own words
    if mask is not None and mask.device != query.device:
        method = "wrapper_CUDA___scaled_dot_product_efficient_attention"
        raise versions.other_device("attn_bias", mask.device, query.device, method)


def _is_wrapper(tensor: Any) -> bool:
    """Whether a subclass carries out operators, as DTensor does, which knows CUDA's kernels of attention."""
    wraps = torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)
    return bool(wraps and type(tensor).__name__ != "FakeTensor")


def _needs_grad(tensor: Any) -> bool:
    return bool(tensor.requires_grad and torch.is_grad_enabled())


# -- recurrent layers: the CPU's own operator, between two nodes that change labels -----------------------


class _ToCpu(torch.autograd.Function):  # type: ignore[misc]
    """The CPU's label, for operators that autograd records in between."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.index = machine.index_of(tensor)
        return machine.twin(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return kernels.labelled(grad.data, ctx.index)


class _ToCuda(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, index: int) -> Any:
        return kernels.labelled(tensor.data, index)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        return machine.twin(grad), None


def as_on_cpu(op: Any) -> Callable[..., Any]:
    """An operator whose whole way the CPU takes. Under autocast its tensors are cast, as cuDNN's are."""

    packed = op._schema.overload_name == "data"  # with a tensor of batch sizes after the input, which is on the CPU

    def kernel(*args: Any, **kwargs: Any) -> Any:
        hidden, parameters = args[2:4] if packed else args[1:3]
        for what, tensors in (("hidden", hidden), ("parameter", parameters)):
            for one in flat([tensors]):
                if one.device != args[0].device:
                    raise RuntimeError(
                        f"Input and {what} tensors are not at the same device, found input tensor at "
                        f"{args[0].device} and {what} tensor at {one.device}"
                    )
        low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        out = op(*(_on_cpu(arg, low) for arg in args), **kwargs)
        return tuple(_ToCuda.apply(one, machine.index_of(args[0])) for one in out)

    return kernel


def _on_cpu(arg: Any, low: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        cast = arg.to(low) if low is not None and arg.dtype == torch.float32 else arg
        return _ToCpu.apply(cast) if cast.is_cuda else cast
    return [_on_cpu(part, low) for part in arg] if isinstance(arg, list | tuple) else arg


def lstm_cell(ig: Any, hg: Any, cx: Any, b1: Any = None, b2: Any = None) -> tuple[Any, Any, Any]:
    gates = ig + hg if b1 is None else ig + b1 + (hg + b2)
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.empty(0, device=ig.device)


def gru_cell(ig: Any, hg: Any, hx: Any, b1: Any = None, b2: Any = None) -> tuple[Any, Any]:
    if b1 is not None:
        ig, hg = ig + b1, hg + b2
    (ir, iz, n), (hr, hz, hn) = ig.chunk(3, 1), hg.chunk(3, 1)
    r, z = (hr + ir).sigmoid(), (hz + iz).sigmoid()
    n = (n + hn * r).tanh()
    return (hx - n) * z + n, torch.empty(0, device=ig.device)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if weight is not None and weight.device != x.device and versions.at_least(2, 9):
        raise versions.other_device("weight", weight.device, x.device, "wrapper_CUDA___fused_rms_norm")
    return aten.rms_norm.default.decompose(x, shape, weight, eps)


WITHOUT_GRAD: Mapping[str, Callable[..., Any]] = {  # operators of which torch knows the backward
    one.__name__: one
    for one in (
        batch_norm_stats, batch_norm_gather_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
        batch_norm_backward_reduce, batch_norm_backward_elemt, native_dropout,
    )
} | {
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
}  # fmt: skip
COMPOSITE: Mapping[str, tuple[Callable[..., Any], str]] = {  # for autograd too → why
    "dropout": (dropout, "CUDA's kernel draws other numbers"),
    "scaled_dot_product_attention": (scaled_dot_product_attention, "the kernel is chosen as on the CPU"),
    "rms_norm": (rms_norm, "CUDA has a kernel of its own, which checks devices"),
    "_thnn_fused_lstm_cell": (lstm_cell, "there is none for the CPU"),
    "_thnn_fused_gru_cell": (gru_cell, "there is none for the CPU"),
    **{
        f"{name}.{overload}": (as_on_cpu(getattr(getattr(aten, name), overload)), "it would take the way of cuDNN")
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for overload in ("input", "data")
    },
}


def install() -> None:
    library = kernels.library("aten")
    for name, kernel in WITHOUT_GRAD.items():
        library.impl(name, kernel, "CUDA")
    for key in ("AutogradCUDA", "CUDA"):
        for name, (kernel, _) in COMPOSITE.items():
            library.impl(name, kernel, key)
    kernels.own |= WITHOUT_GRAD.keys() | COMPOSITE.keys()
