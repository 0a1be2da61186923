"""Models whose memory is measured: written with torch alone, of published sizes, from fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

Tensors = tuple[torch.Tensor, ...]


class Bottleneck(nn.Module):
    """Three convolutions and a way around them, as in ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != 4 * width:
            shorter = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shorter, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: images. Returns: images of 4 times the width."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet50() -> nn.Module:
    """ResNet-50 with 1000 classes: 25,557,032 parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, stride if block == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Block(nn.Module):
    """A transformer's layer: attention and a network of two layers, each after a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: batch × tokens × width. Returns: the same shape."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A language model of GPT-2 small's size: 12 layers, width 768, 50257 words, weights of the ends shared."""

    def __init__(self, words: int = 50257, tokens: int = 1024, width: int = 768, layers: int = 12, heads: int = 12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Args: ids: batch × tokens. Returns: batch × tokens × words."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.ln(self.blocks(x)))


class Bert(nn.Module):
    """BERT-base of transformers, random, told in two classes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.inner = BertForSequenceClassification(BertConfig())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Args: ids: batch × tokens. Returns: batch × 2."""
        return self.inner(input_ids=ids).logits


def mlp() -> nn.Module:
    """Four layers of width 4096."""
    layers = [part for _ in range(3) for part in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4096, 10))


def cnn() -> nn.Module:
    """A small network for images of 32 × 32."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    )


def images(batch: int, size: int, classes: int) -> Tensors:
    """Random images and labels, from seed 1."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, size, size, generator=g), torch.randint(0, classes, (batch,), generator=g)


def rows(batch: int, width: int, classes: int) -> Tensors:
    """Random rows and labels, from seed 1."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, width, generator=g), torch.randint(0, classes, (batch,), generator=g)


def texts(batch: int, tokens: int, words: int, classes: int = 0) -> Tensors:
    """Random words, and the next word of each or one label a text, from seed 1."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, words, (batch, tokens + 1), generator=g)
    return ids[:, :-1], torch.randint(0, classes, (batch,), generator=g) if classes else ids[:, 1:]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch chooses its way."""
    return torch.optim.AdamW(model.parameters(), 1e-4)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of one kernel."""
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


@dataclass(frozen=True)
class Training:
    """One model with its data and optimizer; `half` is autocast's type or None; `ddp` puts it into DDP."""

    model: Callable[[], nn.Module]
    data: Callable[[], Tensors]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    half: torch.dtype | None = None
    ddp: bool = False

    def loss(self, model: nn.Module, batch: Tensors) -> Any:
        """The loss of one batch, under autocast if the row says so."""
        with torch.autocast("cuda", dtype=self.half or torch.float16, enabled=self.half is not None):
            y = model(batch[0])
            return F.cross_entropy(y.reshape(-1, y.shape[-1]), batch[1].reshape(-1))


TRAININGS = {
    "MLP, batch 256": Training(mlp, lambda: rows(256, 4096, 10), adamw),
    "CNN, batch 64": Training(cnn, lambda: images(64, 32, 10), sgd),
    "MLP, batch 256, DDP": Training(mlp, lambda: rows(256, 4096, 10), adamw, ddp=True),
    "ResNet-50, batch 32": Training(resnet50, lambda: images(32, 224, 1000), sgd),
    "ResNet-50, batch 32, bfloat16": Training(resnet50, lambda: images(32, 224, 1000), sgd, torch.bfloat16),
    "GPT-2 small, 4 x 512": Training(GPT, lambda: texts(4, 512, 50257), adamw),
    "GPT-2 small, 4 x 512, float16": Training(GPT, lambda: texts(4, 512, 50257), adamw, torch.float16),
    "BERT-base, 8 x 128": Training(Bert, lambda: texts(8, 128, 30522, 2), adamw),
    "GPT-2 small, 4 x 512, fused, DDP": Training(GPT, lambda: texts(4, 512, 50257), fused, torch.bfloat16, ddp=True),
}
