"""Lesson 14's exercises: a step that all ranks take or none, and clipping by the norm of the whole gradient."""

from __future__ import annotations

from nbddp.lessons.l14_precision.norms import clip_global_norm
from nbddp.lessons.l14_precision.steps import step_together

__all__ = ["clip_global_norm", "step_together"]
