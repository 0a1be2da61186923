"""Lesson 13's exercises: gradients accumulated, gradients that are right for unequal batches, and the learning rate of
a larger batch."""

from __future__ import annotations

from nbddp.lessons.l13_mean_of_means.accumulation import accumulate
from nbddp.lessons.l13_mean_of_means.rates import learning_rate
from nbddp.lessons.l13_mean_of_means.tokens import token_weighted_backward

__all__ = ["accumulate", "learning_rate", "token_weighted_backward"]
