"""GPUs that can be simulated: the known facts of each model, and the value of `--simulate-gpus` (pure).

Names are those of `torch.cuda.get_device_name`. Memory is `total_memory` as machines have published it; it differs by
some MiB from driver to driver. Links are those of `nvidia-smi topo -m` on the usual server of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbddp.errors import BadInput
from nbddp.launch.machine import SELF, counted
from nbddp.launch.options import nearest

MIB = 1 << 20
MOST = 16  # GPUs of a node: no usual server has more
ASKED = re.compile(r"(\d+)(?:[xX×](.+))?")
HALF = 4  # GPUs at one CPU of a PCIe server with more
PCIE = "PCIe"  # in place of a code: one CPU's host bridge, and the way between two CPUs
CUBE_MESH = (  # eight V100 without a switch, each with six NVLinks
    ("X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"),
    ("NV1", "X", "NV2", "NV1", "SYS", "NV2", "SYS", "SYS"),
    ("NV1", "NV2", "X", "NV2", "SYS", "SYS", "NV1", "SYS"),
    ("NV2", "NV1", "NV2", "X", "SYS", "SYS", "SYS", "NV1"),
    ("NV2", "SYS", "SYS", "SYS", "X", "NV1", "NV1", "NV2"),
    ("SYS", "NV2", "SYS", "SYS", "NV1", "X", "NV2", "NV1"),
    ("SYS", "SYS", "NV1", "SYS", "NV1", "NV2", "X", "NV2"),
    ("SYS", "SYS", "SYS", "NV1", "NV2", "NV1", "NV2", "X"),
)


@dataclass(frozen=True)
class Card:
    """One model of a GPU.

    - name: as `torch.cuda.get_device_name` gives it. memory: `total_memory`, in bytes.
    - capability: compute capability, (major, minor). multi_processor_count: streaming multiprocessors.
    - links: the code of the way between any two of a server, such as `NV12`; PCIE; or a matrix of codes.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    multi_processor_count: int
    links: str | tuple[tuple[str, ...], ...] = PCIE


CARDS: Mapping[str, Card] = {  # as typed → the model
    "T4": Card("Tesla T4", 15843721216, (7, 5), 40),
    "V100-16GB": Card("Tesla V100-SXM2-16GB", 16945512448, (7, 0), 80, CUBE_MESH),
    "V100-32GB": Card("Tesla V100-SXM2-32GB", 32494 * MIB, (7, 0), 80, CUBE_MESH),
    "P100": Card("Tesla P100-PCIE-16GB", 16280 * MIB, (6, 0), 56),
    "A100-40GB": Card("NVIDIA A100-SXM4-40GB", 42298834944, (8, 0), 108, "NV12"),
    "A100-80GB": Card("NVIDIA A100-SXM4-80GB", 81038 * MIB, (8, 0), 108, "NV12"),
    "A10G": Card("NVIDIA A10G", 22587 * MIB, (8, 6), 80),
    "L4": Card("NVIDIA L4", 22563 * MIB, (8, 9), 58),
    "L40S": Card("NVIDIA L40S", 45495 * MIB, (8, 9), 142),
    "RTX-4090": Card("NVIDIA GeForce RTX 4090", 24217 * MIB, (8, 9), 128),
    "H100": Card("NVIDIA H100 80GB HBM3", 81079 * MIB, (9, 0), 132, "NV18"),
}
DEFAULT = "T4"
ALSO = {  # names that mean one of these
    "V100": "V100-16GB", "A100": "A100-40GB", "H100-80GB": "H100", "RTX4090": "RTX-4090", "4090": "RTX-4090",
    "TESLA-T4": "T4", "P100-16GB": "P100",
}  # fmt: skip


@dataclass(frozen=True)
class SimulatedGpus:
    """The GPUs of one node, all of a model, and which of them a process sees, by their numbers."""

    cards: tuple[Card, ...]
    visible: tuple[int, ...]

    @property
    def seen(self) -> tuple[Card, ...]:
        """In the order of CUDA: the first is cuda:0."""
        return tuple(self.cards[i] for i in self.visible)


def cards_of(text: str) -> tuple[Card, ...]:
    """`4`, `4xA100-80GB` → so many cards. Raises BadInput."""
    asked = ASKED.fullmatch(text.strip())
    if asked is None:
        raise BadInput(f"{text!r} does not name simulated GPUs; {_usage()}")
    number, model = int(asked[1]) if len(asked[1]) < 6 else MOST + 1, asked[2] or DEFAULT
    if not 1 <= number <= MOST:
        raise BadInput(f"{text!r}: a node has 1 to {MOST} simulated GPUs, not {asked[1]}; {_usage()}")
    return (CARDS[_known(model, text)],) * number


def typed(cards: Sequence[Card]) -> str:
    """`4xT4`: how these cards are asked for."""
    return f"{len(cards)}x{short_name(cards[0])}"


def short_name(card: Card) -> str:
    """`T4`."""
    return next(name for name, one in CARDS.items() if one == card)


def words(cards: Sequence[Card]) -> str:
    """`4 simulated GPUs (T4, 16 GB; computed on the CPU; times are not a GPU's)`."""
    kind, memory = re.sub(r"-\d+GB", "", short_name(cards[0])), sold_gigabytes(cards[0])
    return f"{counted(len(cards), 'simulated GPU')} ({kind}, {memory} GB; computed on the CPU; times are not a GPU's)"


def sold_gigabytes(card: Card) -> int:
    """The memory under which the model is sold: a part of it is the driver's, so the next size above."""
    return next(size for size in (16, 24, 32, 40, 48, 80) if card.memory <= size << 30)


def link_matrix(cards: Sequence[Card]) -> tuple[tuple[str, ...], ...]:
    """The codes of the ways between the GPUs of a node, as `machine.Node.links` has them."""
    n = len(cards)
    return tuple(tuple(SELF if a == b else _link(cards[0], a, b) for b in range(n)) for a in range(n))


def visible(cards: Sequence[Card], listed: str | None) -> SimulatedGpus:
    """What a process sees by CUDA_VISIBLE_DEVICES, or without it. CUDA takes entries up to the first that is none, and
    sees no GPU at all where one is repeated."""
    if listed is None:
        return SimulatedGpus(tuple(cards), tuple(range(len(cards))))
    found: list[int] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not (entry.isascii() and entry.isdigit() and int(entry) < len(cards)):
            break
        if int(entry) in found:
            return SimulatedGpus(tuple(cards), ())
        found.append(int(entry))
    return SimulatedGpus(tuple(cards), tuple(found))


def _link(card: Card, a: int, b: int) -> str:
    if card.links == PCIE:
        return "PHB" if a // HALF == b // HALF else "SYS"
    if isinstance(card.links, str):
        return card.links
    size = len(card.links)
    return card.links[a][b] if a < size and b < size else "SYS"


def _known(model: str, text: str) -> str:
    name = model.strip().upper().replace(" ", "-").replace("_", "-")
    name = ALSO.get(name, name)
    if name in CARDS:
        return name
    near = nearest(name, [*CARDS, *ALSO])
    meant = f"did you mean {near}? " if near else ""
    raise BadInput(f"{text!r}: no GPU {model!r} is known; {meant}{_usage()}")


def _usage() -> str:
    return f"write it as 4 or 4x{DEFAULT}, with one of {', '.join(CARDS)}"
