"""How micro-batches went through DDP: how often gradients were exchanged, and which were stored meanwhile.

Right gradients are not enough in lesson 13: all but the last micro-batch belong inside `no_sync`, and each goes
backward before the next goes forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbddp.lessons.framework.answer import OK


@dataclass(frozen=True)
class Passes:
    """What one rank did with `count` micro-batches; the fields are those of `watched` in `on_rank`."""

    count: int
    called: int
    entered: int
    exchanged: Sequence[bool]
    kept: int

    @property
    def exchanges(self) -> int:
        return sum(self.exchanged)

    def line(self) -> str:
        """For gradients that are right: were they exchanged as they should be?"""
        n, passes = self.count, len(self.exchanged)
        right = "the gradients are right, but "
        if self.exchanges == 1 and passes == n:
            return OK if self.kept <= 1 else right + self._all_at_once()
        if self.exchanges == 0:
            return right + (
                "DDP exchanged none of them: leave the last micro-batch outside no_sync and it does, bucket by bucket "
                "while backward runs"
            )
        if passes < n:
            return right + (
                f"{micro(n)} went through the model in {times(passes, 'forward')}: that needs the activations of all "
                "of them at once, which accumulation avoids"
            )
        if self.exchanges > 1:
            return right + self._too_often()
        return f"{right}the model was called {times(passes)} for {micro(n)}"

    def _all_at_once(self) -> str:
        return (
            f"up to {self.kept} losses waited for backward() at a time: that keeps the activations of all of them, "
            "which accumulation avoids; call backward() for each micro-batch"
        )

    def _too_often(self) -> str:
        often = f"they were exchanged {times(self.exchanges)}"
        if self.called and not self.entered:
            return (
                f"{often}: model.no_sync() was called and never entered; it is a context manager, so write `with "
                "model.no_sync():`"
            )
        if self.entered and self.exchanges == self.count:
            return (
                f"{often} although no_sync was entered: DDP decides in forward whether backward will exchange, so "
                "forward belongs inside no_sync as well"
            )
        return (
            f"{often} for {micro(self.count)}, and once is enough: all but the last belong inside `with "
            "model.no_sync():`"
        )

    def not_exchanged(self) -> str:
        """Why gradients may be each rank's own: the exchange was left out or came too early; empty if it was in its
        place."""
        who = micro(self.count)
        if not self.exchanged:
            return f"{who}: nothing went through DDP; call model(inputs), since model.module bypasses it"
        if not self.exchanges and len(self.exchanged) < self.count:
            return (
                f"{who}: {times(len(self.exchanged), 'forward')}, all inside no_sync, so no gradients were exchanged. "
                "The last micro-batch is missing, and it belongs outside"
            )
        if not self.exchanges:
            return (
                f"{who}: no gradients were exchanged, so every rank has its own. The last micro-batch was inside "
                "no_sync too"
            )
        if not self.exchanged[-1]:
            at = 1 + max(i for i, did in enumerate(self.exchanged) if did)
            return (
                f"{who}: gradients were exchanged in micro-batch {at}, and later ones are every rank's own. The "
                "one outside no_sync must be the last"
            )
        return ""


def micro(count: int) -> str:
    return f"{count} micro-batch{'es' * (count != 1)}"


def times(count: int, noun: str = "") -> str:
    if noun:
        return f"{count} {noun}{'s' * (count != 1)}"
    return "once" if count == 1 else f"{count} times"
