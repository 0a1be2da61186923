"""Lesson 16's exercises: two layers split over ranks, with their gradients, and the groups of a rank on a mesh."""

from __future__ import annotations

from nbddp.lessons.l16_tensor_parallel.groups import groups_of
from nbddp.lessons.l16_tensor_parallel.layers import column_then_row

__all__ = ["column_then_row", "groups_of"]
