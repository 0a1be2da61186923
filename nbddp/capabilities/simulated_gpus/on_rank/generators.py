"""Random numbers of a GPU: a generator of the CPU with the label of the device, so that equal seeds give equal numbers.

The state of a CUDA generator is 16 bytes, a seed and an offset. DTensor computes with the offset. Here it says how
many words of the Mersenne twister have been drawn, times eight. Four more say that half of a pair of normals is kept.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from nbddp.capabilities.simulated_gpus.on_rank import devices, machine

BLOCK = 624  # words between two states of the twister
STATE = struct.Struct("<Qii Q")  # of the CPU's state: seed, words left, seeded, words taken of this block
TWISTER = slice(STATE.size, STATE.size + 8 * BLOCK)
KEPT = STATE.size + 8 * BLOCK + 24, STATE.size + 8 * BLOCK + 36  # whether a double, a float normal is kept
CUDA_STATE = struct.Struct("<Qq")  # seed, offset
PER_WORD, HALF_PAIR = 8, 4
PAIR = 4  # words that two normals take
MOST = 1 << 28  # words that are drawn to come to an offset; beyond, the offset seeds
AT_ONCE = 1 << 20
REMEMBERED = 64  # states that were asked for last
_states: dict[tuple[int, int], bytes] = {}  # (seed, offset) → the CPU's state there
OriginalGenerator = torch.Generator


class CudaGenerator(OriginalGenerator):  # type: ignore[misc, valid-type]
    """As `torch.Generator("cuda:1")`."""

    _known: tuple[int, bytes]  # blocks drawn, and the twister then

    def __new__(cls, device: Any = "cuda") -> Any:
        asked = torch.device(device).index  # whether there is such a GPU is seen when it is used
        index = devices.current() if asked is None else asked
        made = OriginalGenerator.__new__(cls)
        machine.label_generator(made, index)
        made._begin()
        return made

    def __init__(self, device: Any = "cuda") -> None:
        pass

    def _cpu_state(self) -> bytes:
        return bytes(OriginalGenerator.get_state(self).numpy())

    def _begin(self) -> None:
        self._known = (0, self._cpu_state()[TWISTER])

    def manual_seed(self, seed: int) -> Any:
        OriginalGenerator.manual_seed(self, seed)
        self._begin()
        return self

    def seed(self) -> int:
        seed: int = OriginalGenerator.seed(self)
        self._begin()
        return seed

    def get_offset(self) -> int:
        state = self._cpu_state()
        _, left, _, taken = STATE.unpack_from(state)
        blocks, twister = self._known
        if state[TWISTER] != twister:
            blocks = self._blocks_until(state)
        fresh = blocks == 0 and (left, taken) == (1, 0)
        words = 0 if fresh else BLOCK * (blocks - 1) + taken
        half = any(state[at] for at in KEPT)
        return PER_WORD * words + (HALF_PAIR if half else 0)

    def _blocks_until(self, state: bytes) -> int:
        """Draws from a copy until it is where this generator is."""
        blocks, twister = self._known
        copy = OriginalGenerator()
        begin = bytearray(state)
        begin[: STATE.size] = STATE.pack(0, 1, 1, BLOCK)  # the next word makes the next block
        begin[TWISTER] = twister
        copy.set_state(torch.frombuffer(begin, dtype=torch.uint8))
        words = torch.empty(BLOCK, dtype=torch.int32)
        for blocks in range(blocks + 1, blocks + 1 + MOST // BLOCK):  # noqa: B020 (from there on)
            words.random_(generator=copy)
            if bytes(copy.get_state().numpy())[TWISTER] == state[TWISTER]:
                self._known = (blocks, state[TWISTER])
                return blocks
        raise RuntimeError("a simulated GPU's generator has drawn too many numbers for its state to be written")

    def set_offset(self, offset: int) -> None:
        if offset < 0 or offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        words, half = divmod(offset, PER_WORD)
        seed = self.initial_seed()
        index = self.device.index
        OriginalGenerator.manual_seed(self, seed)
        self._begin()
        remembered = _states.get((seed & (1 << 64) - 1, offset))
        machine.label_generator(self, None)
        try:
            if remembered is not None:
                OriginalGenerator.set_state(self, torch.frombuffer(bytearray(remembered), dtype=torch.uint8))
                return
            if words > MOST:
                OriginalGenerator.manual_seed(self, hash((seed, offset)) & (1 << 63) - 1)
                return
            left = max(0, words - PAIR) if half else words
            while left > 0:
                n = min(left, AT_ONCE)
                torch.empty(n, dtype=torch.int32).random_(generator=self)
                left -= n
            if half:
                torch.empty(1).normal_(generator=self)  # draws a pair, and keeps the second
        finally:
            machine.label_generator(self, index)

    def get_state(self) -> Any:
        key = self.initial_seed() & (1 << 64) - 1, self.get_offset()
        _states.pop(key, None)
        _states[key] = self._cpu_state()
        if len(_states) > REMEMBERED:
            del _states[next(iter(_states))]
        return torch.frombuffer(bytearray(CUDA_STATE.pack(*key)), dtype=torch.uint8)

    def set_state(self, state: Any) -> Any:
        if not isinstance(state, torch.Tensor):
            raise TypeError(f"expected a torch.ByteTensor, but got {type(state).__name__}")
        if state.dtype != torch.uint8 or state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() not in (8, CUDA_STATE.size):
            raise RuntimeError("RNG state is wrong size")
        raw = bytes(state.contiguous().numpy())
        seed, offset = CUDA_STATE.unpack(raw.ljust(CUDA_STATE.size, b"\0"))
        self.manual_seed(seed)
        self.set_offset(offset)
        return self

    def clone_state(self) -> Any:
        return self._copy()

    def graphsafe_get_state(self) -> Any:
        return self

    def graphsafe_set_state(self, other: Any) -> Any:
        return self.set_state(other.get_state())

    def _copy(self) -> Any:
        copy = CudaGenerator(self.device)
        copy.set_state(self.get_state())
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.device, self.get_state())


CudaGenerator.__name__ = CudaGenerator.__qualname__ = "Generator"
CudaGenerator.__module__ = "torch"


def _load(device: Any, state: Any) -> Any:
    made = torch.Generator(device)
    made.set_state(state)
    return made


class _Kind(type(OriginalGenerator)):  # type: ignore[misc]
    """`torch.Generator(device)` makes one of either kind; `isinstance` knows both."""

    def __call__(cls, device: Any = "cpu") -> Any:
        return CudaGenerator(device) if torch.device(device).type == "cuda" else OriginalGenerator(device)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, OriginalGenerator)


def install() -> None:
    torch.Generator = _Kind("Generator", (OriginalGenerator,), {"__module__": "torch"})
    torch.cuda.default_generators = _Default()


class _Default(tuple[Any, ...]):
    """The generator of each GPU, made when CUDA is first used: before, which ones there are may change."""

    _made: list[Any] = []

    def _all(self) -> list[Any]:
        while len(self._made) < devices.count():
            self._made.append(CudaGenerator(f"cuda:{len(self._made)}"))
            self._made[-1].seed()  # as a GPU's: in another state on each rank, until the program seeds it
        return self._made

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._all())[index]

    def __len__(self) -> int:
        return devices.count()

    def __iter__(self) -> Any:
        return iter(self._all())
