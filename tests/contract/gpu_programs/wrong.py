"""Wrong programs for GPUs, and what hardware says of each: words from an H100's answers and torch's sources.

`said` gives, for those whose error has other words on simulated GPUs, what they say.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

VERSION = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
ORDINAL = "CUDA error: invalid device ordinal"
TWO = "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"
SAME = "Input type ({}) and weight type ({}) should be the same"
ON_GPU, ON_CPU = "torch.cuda.FloatTensor", "torch.FloatTensor"


class Wrong(NamedTuple):
    """words: part of the message."""

    program: Callable[[], Any]
    words: str
    kind: type[BaseException] = RuntimeError


def other(argument: str, device: str, common: str, method: str) -> str:
    """What the check before a kernel says."""
    if VERSION >= (2, 9):
        return (
            f"Expected all tensors to be on the same device, but got {argument} is on {device}, different from other "
            f"tensors on {common} (when checking argument in method wrapper_CUDA_{method})"
        )
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, {common} and {device}! "
        f"(when checking argument for argument {argument} in method wrapper_CUDA_{method})"
    )


def programs() -> dict[str, Wrong]:
    """The wrong programs, by what is wrong."""
    c, g, h = torch.ones(3, 4), torch.ones(3, 4, device="cuda"), torch.ones(3, 4, device="cuda:1")
    m, ids, labels = nn.Linear(4, 2).cuda(), torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    zero, one = "cuda:0", "cuda:1"
    conv = lambda *shape: nn.Conv2d(1, 1, 3)  # noqa: E731
    image = torch.ones(1, 1, 5, 5)
    q = torch.ones(1, 2, 3, 4)
    slow = other("weight", zero, "cpu", "__slow_conv2d_forward")
    lstm = "Input and {} tensors are not at the same device, found input tensor at {} and {} tensor at {}"
    return {
        "input on the CPU": Wrong(lambda: m(c), other("mat1", "cpu", zero, "addmm")),
        "model on the CPU": Wrong(lambda: nn.Linear(4, 2)(g), other("mat1", zero, "cpu", "addmm")),
        "sum of both": Wrong(lambda: c + g, TWO.format(zero, "cpu")),
        "sum of two GPUs": Wrong(lambda: g + h, TWO.format(zero, one)),
        "product of two GPUs": Wrong(lambda: g @ h.T, other("mat2", one, zero, "mm")),
        "batched product": Wrong(lambda: torch.bmm(g[None], c.T[None]), other("mat2", "cpu", zero, "bmm")),
        "cuda:9": Wrong(lambda: torch.ones(2, device="cuda:9"), ORDINAL),
        ".cuda(9)": Wrong(lambda: torch.ones(2).cuda(9), ORDINAL),
        "set_device(9)": Wrong(lambda: torch.cuda.set_device(9), ORDINAL),
        "model.to(cuda:4)": Wrong(lambda: nn.Linear(2, 2).to("cuda:4"), ORDINAL),
        "properties of cuda:9": Wrong(lambda: torch.cuda.get_device_properties(9), "Invalid device id", AssertionError),
        "numpy": Wrong(
            g.numpy,
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first.",
            TypeError,
        ),
        "asarray": Wrong(lambda: __import__("numpy").asarray(g), "can't convert cuda:0 device type tensor", TypeError),
        "embedding, ids on the CPU": Wrong(
            lambda: nn.Embedding(5, 3).cuda()(ids), other("index", "cpu", zero, "_index_select")
        ),
        "embedding on the CPU": Wrong(
            lambda: nn.Embedding(5, 3)(ids.cuda()), other("index", zero, "cpu", "_index_select")
        ),
        "convolution, input on the CPU": Wrong(lambda: conv().cuda()(image), slow),
        "a larger one": Wrong(
            lambda: nn.Conv2d(3, 8, 5).cuda()(torch.ones(16, 3, 32, 32)),
            f"{SAME.format(ON_CPU, ON_GPU)} or input should be a MKLDNN tensor and weight is a dense tensor",
        ),
        "convolution on the CPU": Wrong(lambda: conv()(image.cuda()), SAME.format(ON_GPU, ON_CPU)),
        "convolution of shorts": Wrong(
            lambda: nn.Conv2d(1, 1, 3, bias=False)(image.cuda().short()), SAME.format("torch.cuda.ShortTensor", ON_CPU)
        ),
        "convolution of half": Wrong(
            lambda: conv().cuda()(image.cuda().half()),
            "Input type (c10::Half) and bias type (float) should be the same",
        ),
        "cross entropy, labels on the CPU": Wrong(
            lambda: F.cross_entropy(g, labels), other("target", "cpu", zero, "nll_loss_forward")
        ),
        "cross entropy, weights on the CPU": Wrong(
            lambda: F.cross_entropy(g, labels.cuda(), torch.ones(4)), other("weight", "cpu", zero, "nll_loss_forward")
        ),
        "mse, target on the CPU": Wrong(lambda: F.mse_loss(g, c), TWO.format(zero, "cpu")),
        "bce, target on the CPU": Wrong(lambda: F.binary_cross_entropy(g, c), TWO.format(zero, "cpu")),
        "bce with logits": Wrong(lambda: F.binary_cross_entropy_with_logits(g, c), TWO.format(zero, "cpu")),
        "batch norm, input on the CPU": Wrong(
            lambda: nn.BatchNorm1d(4).cuda()(c), "Expected all tensors to be on the same device"
        ),
        "layer norm on the CPU": Wrong(lambda: nn.LayerNorm(4)(g), other("weight", "cpu", zero, "_native_layer_norm")),
        "cat": Wrong(lambda: torch.cat([g, c]), "Expected all tensors to be on the same device"),
        "stack": Wrong(lambda: torch.stack([g, c]), "Expected all tensors to be on the same device"),
        "where": Wrong(lambda: torch.where(g > 0, g, c), TWO.format(zero, "cpu")),
        "in-place": Wrong(lambda: g.add_(c), TWO.format(zero, "cpu")),
        "in-place on the CPU": Wrong(lambda: c.add_(g), TWO.format(zero, "cpu")),
        "index of another GPU": Wrong(
            lambda: g[torch.ones(3, dtype=torch.bool, device="cuda:1")],
            "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)",
        ),
        "indices on the GPU": Wrong(
            lambda: c[ids.cuda()], "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        ),
        "values on the CPU": Wrong(lambda: g.__setitem__(g > 0, torch.ones(12)), TWO.format(zero, "cpu")),
        "masked_fill": Wrong(
            lambda: g.masked_fill(c > 0, 0.0),
            "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
        ),
        "gather": Wrong(
            lambda: g.gather(1, torch.zeros(3, 1, dtype=torch.long)), other("index", "cpu", zero, "gather")
        ),
        "index_select": Wrong(lambda: g.index_select(0, ids), other("index", "cpu", zero, "_index_select")),
        "scatter": Wrong(
            lambda: g.scatter(1, torch.zeros(3, 1, dtype=torch.long), 1.0), other("index", "cpu", zero, "scatter_value")
        ),
        "complex": Wrong(lambda: torch.complex(g, c), other("imag", "cpu", zero, "out_complex_out")),
        "mm, out on the GPU": Wrong(
            lambda: torch.mm(c, c.T, out=torch.empty(3, 3).cuda()), other("self", "cpu", zero, "mm_out_out")
        ),
        "lstm, input on the CPU": Wrong(
            lambda: nn.LSTM(4, 5).cuda()(c), lstm.format("parameter", "cpu", "parameter", zero)
        ),
        "lstm, state on the CPU": Wrong(
            lambda: nn.LSTM(4, 5).cuda()(g, (torch.zeros(1, 5), torch.zeros(1, 5))),
            lstm.format("hidden", zero, "hidden", "cpu"),
        ),
        "attention": Wrong(
            lambda: F.scaled_dot_product_attention(q.cuda(), q, q),
            "Expected query, key, and value to have the same device type, but got query.device: cuda:0 key.device: cpu",
        ),
        "generator of the CPU": Wrong(
            lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
            "Expected a 'cuda' device type for generator but found 'cpu'",
        ),
        "set_": Wrong(
            lambda: g.clone().set_(c),
            'Attempted to set the storage of a tensor on device "cuda:0" to a storage on different device "cpu"',
        ),
        "a gradient of the GPU": Wrong(lambda: setattr(nn.Parameter(torch.ones(2)), "grad", leaf.detach()), "grad"),
        "out of memory": Wrong(
            lambda: torch.empty(20 << 30, dtype=torch.uint8, device="cuda"),
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 14.76 GiB of which 14.",
            torch.OutOfMemoryError,
        ),
        "shapes": Wrong(lambda: g @ g, "mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)"),
        "a leaf in place": Wrong(
            lambda: leaf.add_(1), "a leaf Variable that requires grad is being used in an in-place operation."
        ),
        "dtypes": Wrong(lambda: m(g.half()), "mat1 and mat2 must have the same dtype, but got Half and Float"),
        "events without timing": Wrong(
            lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
            "Both events must be created with argument 'enable_timing=True'.",
            ValueError,
        ),
        "DataParallel on the CPU": Wrong(
            lambda: nn.DataParallel(nn.Linear(2, 2), [0, 1])(torch.ones(2, 2).cuda()),
            "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them on",
        ),
        "item in a capture": Wrong(capture_item, "CUDA error: operation not permitted when stream is capturing"),
        "pinned tensor of the GPU": Wrong(
            lambda: g.pin_memory(), "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        ),
    }


CANNOT_PIN = "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
ABSENT = "Attempting to deserialize object on CUDA device {} but torch.cuda.device_count() is 4."


def more() -> dict[str, Wrong]:
    """Mistakes that learners make with the device of a state, a stream, a generator or a checkpoint."""
    g, labels, zero, one = torch.ones(3, 4, device="cuda"), torch.tensor([0, 1, 2]), "cuda:0", "cuda:1"
    image, time = torch.ones(2, 1, 5, 5, device="cuda"), torch.cuda.Event
    sequences = torch.ones(2, 3, 4, device="cuda")
    data = torch.utils.data
    q = torch.ones(1, 2, 3, 4, device="cuda")
    two, on_cpu = TWO.format(zero, "cpu"), "Expected a 'cpu' device type for generator but found 'cuda'"
    return {
        "labels on another GPU": Wrong(
            lambda: F.cross_entropy(g, labels.cuda(1)), other("target", one, zero, "nll_loss_forward")
        ),
        "weights of a loss": Wrong(lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(4))(g, g), two),
        "SGD's state on the CPU": Wrong(lambda: moved_after_a_step(torch.optim.SGD, momentum=0.9), two),
        "Adam's state on the CPU": Wrong(lambda: moved_after_a_step(torch.optim.Adam), two),
        "the same, one by one": Wrong(lambda: moved_after_a_step(torch.optim.Adam, foreach=False), two),
        "the same, fused": Wrong(
            lambda: moved_after_a_step(torch.optim.AdamW, fused=True), other("exp_avgs", "cpu", zero, "__fused_adamw_")
        ),
        "checkpoint of a larger machine": Wrong(lambda: loaded(b"cuda:7"), ABSENT.format(7)),
        "map_location": Wrong(lambda: loaded(b"cuda:3", "cuda:9"), ABSENT.format(9)),
        "map_location as a number": Wrong(lambda: loaded(b"cuda:3", 0), "'int' object is not callable", TypeError),
        ".cuda(8)": Wrong(lambda: nn.Linear(2, 2).cuda(8), ORDINAL),
        ".cuda(-1)": Wrong(lambda: torch.ones(2).cuda(-1), "Device index must not be negative"),
        "cuda:-1": Wrong(lambda: torch.ones(2).to("cuda:-1"), "Invalid device string: 'cuda:-1'"),
        "cuda0": Wrong(lambda: torch.ones(2).to("cuda0"), "Invalid device string: 'cuda0'"),
        "gpu": Wrong(lambda: torch.ones(2).to("gpu"), "device type at start of device string: gpu"),
        "set_device(cuda)": Wrong(
            lambda: torch.cuda.set_device("cuda"),
            "Expected a torch.device with a specified index or an integer, but got:cuda",
            ValueError,
        ),
        "set_device(cpu)": Wrong(
            lambda: torch.cuda.set_device("cpu"), "Expected a cuda device, but got: cpu", ValueError
        ),
        "a loader that pins tensors of a GPU": Wrong(
            lambda: next(iter(data.DataLoader(data.TensorDataset(g), pin_memory=True))), CANNOT_PIN
        ),
        "pinned on a GPU": Wrong(
            lambda: torch.ones(2, pin_memory=True, device="cuda"), "Only dense CPU tensors can be pinned"
        ),
        "array of a list": Wrong(
            lambda: __import__("numpy").array([g, g]), "can't convert cuda:0 device type tensor to numpy.", TypeError
        ),
        "convolution on another GPU": Wrong(
            lambda: nn.Conv2d(1, 1, 3).cuda(1)(image), other("weight", one, zero, "_cudnn_convolution")
        ),
        "transposed convolution on another GPU": Wrong(
            lambda: nn.ConvTranspose2d(1, 1, 3).cuda(1)(image),
            other("weight", one, zero, "_cudnn_convolution_transpose"),
        ),
        "batch norm on another GPU": Wrong(
            lambda: nn.BatchNorm2d(1).cuda(1)(image), other("weight", one, zero, "_cudnn_batch_norm")
        ),
        "GRU on another GPU": Wrong(
            lambda: nn.GRU(4, 5).cuda(1)(g),
            "Input and parameter tensors are not at the same device, found input tensor at cuda:0 and parameter tensor "
            "at cuda:1",
        ),
        "generator of a GPU": Wrong(lambda: torch.randn(2, generator=torch.Generator("cuda")), on_cpu),
        "a loader with a generator of a GPU": Wrong(
            lambda: list(data.DataLoader(range(4), shuffle=True, generator=torch.Generator("cuda"))), on_cpu
        ),
        "random_split with a generator of a GPU": Wrong(
            lambda: data.random_split(range(4), [2, 2], torch.Generator("cuda")),
            "Expected a 'cpu' generator device but found 'cuda:0'",
        ),
        "state of the CPU's generator": Wrong(
            lambda: torch.cuda.set_rng_state(torch.get_rng_state()), "RNG state is wrong size"
        ),
        "state that map_location moved": Wrong(
            lambda: torch.cuda.set_rng_state(torch.cuda.get_rng_state().cuda()),
            "RNG state must be a torch.ByteTensor",
            TypeError,
        ),
        "state of cuda:9": Wrong(lambda: torch.cuda.get_rng_state(9), "tuple index out of range", IndexError),
        "stream of the CPU": Wrong(
            lambda: torch.cuda.Stream(device="cpu"), "Expected a cuda device, but got: cpu", ValueError
        ),
        "stream of cuda:9": Wrong(lambda: torch.cuda.Stream("cuda:9"), ORDINAL),
        "an event on streams of two GPUs": Wrong(
            lambda: [event.record(torch.cuda.Stream(n)) for event in [time()] for n in range(2)],
            "Event device 0 does not match recording stream's device 1.",
        ),
        "time between two GPUs": Wrong(
            lambda: recorded(time(enable_timing=True), 0).elapsed_time(recorded(time(enable_timing=True), 1)),
            "CUDA error: invalid resource handle",
        ),
        "memory of cuda:9": Wrong(lambda: torch.cuda.memory_allocated(9), "did you call init?"),
        "gradient on the CPU": Wrong(
            lambda: (torch.ones(2, requires_grad=True, device="cuda") * 2).backward(torch.ones(2)),
            "invalid gradient at index 0 - expected device cuda:0 but got cpu",
        ),
        "binary cross entropy under autocast": Wrong(
            lambda: torch.autocast("cuda")(lambda: F.binary_cross_entropy(g.sigmoid(), g))(), "are unsafe to autocast."
        ),
        "a model in half under GradScaler": Wrong(scaled_half, "Attempting to unscale FP16 gradients.", ValueError),
        "a step without scaling": Wrong(
            lambda: torch.amp.GradScaler("cuda").step(torch.optim.SGD([nn.Parameter(g)], 0.1)),
            "Attempted step but _scale is None.",
            AssertionError,
        ),
        "lengths on the GPU": Wrong(
            lambda: nn.utils.rnn.pack_padded_sequence(sequences, torch.tensor([3, 2]).cuda(), batch_first=True),
            "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
        ),
        "mask of attention": Wrong(
            lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool)),
            other("attn_bias", "cpu", zero, "__scaled_dot_product_efficient_attention"),
        ),
        "einsum": Wrong(lambda: torch.einsum("ij,kj->ik", g, torch.ones(3, 4)), other("mat2", "cpu", zero, "bmm")),
        "take_along_dim": Wrong(
            lambda: torch.take_along_dim(g, labels[:, None], 1),
            "Expected tensor to have cuda:0 Device, but got tensor with cpu Device",
        ),
        "layer norm of half": Wrong(
            lambda: nn.LayerNorm(4).cuda()(g.half()), "expected scalar type Half but found Float"
        ),
        "linear layer of integers": Wrong(
            lambda: nn.Linear(4, 2).cuda()(g.long()), "mat1 and mat2 must have the same dtype, but got Long and Float"
        ),
        "DataParallel on cuda:9": Wrong(
            lambda: nn.DataParallel(nn.Linear(2, 2).cuda(), [0, 9]), "Invalid device id", AssertionError
        ),
    }


def moved_after_a_step(kind: Any, **options: Any) -> None:
    """`model.cuda()` after the optimizer has made its state."""
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), 0.1, **options)
    for device in ("cpu", "cuda"):
        model.to(device)
        optimizer.zero_grad()
        model(torch.ones(3, 4, device=device)).sum().backward()
        optimizer.step()


def loaded(device: bytes, to: Any = None) -> Any:
    file = io.BytesIO()
    torch.save(torch.ones(2, device="cuda:3"), file)
    return torch.load(io.BytesIO(file.getvalue().replace(b"cuda:3", device)), map_location=to)


def recorded(event: Any, index: int) -> Any:
    event.record(torch.cuda.Stream(index))
    return event


def scaled_half() -> None:
    model, scaler = nn.Linear(2, 2).cuda().half(), torch.amp.GradScaler("cuda")
    scaler.scale(model(torch.ones(1, 2, device="cuda").half()).sum()).backward()
    scaler.step(torch.optim.SGD(model.parameters(), 0.1))


def capture_item() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(2, device="cuda").sum().item()


def said() -> dict[str, str]:
    """What is wrong → "", or the error that came, and the words that were expected."""
    found = {}
    warnings.simplefilter("ignore")
    for name, (program, words, kind) in (programs() | more()).items():
        try:
            program()
        except kind as error:
            found[name] = "" if words in str(error) else f"{type(error).__name__}: {error}\n expected: {words}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}\n expected: {kind.__name__}: {words}"
        else:
            found[name] = f"no error\n expected: {words}"
    return found
