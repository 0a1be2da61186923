"""What a fork repeats of its parent, made anew: each process draws its own random numbers, as one started by itself.

A forked process begins with its parent's generators, and so would its siblings: without a seed, all ranks would draw
the same weights, masks and permutations. Generators of accelerators are made in the process that uses one, and
operating-system randomness (`secrets`, `uuid`, numpy's `default_rng`) is nobody's copy. One thing cannot be made anew:
`hash()` of strings, by which a set of strings is ordered, is the interpreter's for as long as it lives.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time


def begin() -> None:
    """Make this process's own what a fork has copied: seeds, keys, and what was read from the environment."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # the CPU's alone: `torch.seed` would seed all GPUs alike
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # TMPDIR may be another
    time.tzset()  # so may TZ
