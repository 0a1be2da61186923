"""Screens that tests look at."""

from __future__ import annotations

from nbddp.output.screens import NullScreen


class Hearing(NullScreen):
    """Keeps what is said between and after runs."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)
