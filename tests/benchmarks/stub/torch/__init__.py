"""What nbddp's agent and workers touch of torch when they start and when a cell ends, and nothing else.

For `tests/benchmarks/wide.py` alone: many agents on a machine that has no room for as many torches. There are no
tensors and no process groups (`distributed.is_available()` is False), so a worker has every part but those.
"""

import types

__version__ = "2.13.0"


def set_num_threads(number):
    pass


class Tensor:
    pass


default_generator = types.SimpleNamespace(seed=lambda: 0)
cuda = types.SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False, device_count=lambda: 0)
backends = types.SimpleNamespace(cuda=types.SimpleNamespace(is_built=lambda: False))

from torch import distributed, multiprocessing, nn, optim, torch_version  # noqa: E402, F401
