"""Lesson 15's exercises: bytes of a rank, a sharded optimizer step, and the rest of an epoch after a resume."""

from __future__ import annotations

from nbddp.lessons.l15_sharding.memory import bytes_per_rank
from nbddp.lessons.l15_sharding.positions import rest_of_epoch
from nbddp.lessons.l15_sharding.steps import sharded_step

__all__ = ["bytes_per_rank", "rest_of_epoch", "sharded_step"]
