import os

from torch.distributed import distributed_c10d  # noqa: F401


def is_available():
    return False


def is_initialized():
    return False


class TCPStore:
    """Holds the socket that it is given. Nobody answers there: workers without process groups never ask."""

    def __init__(self, host, port, *, master_listen_fd, **options):
        self._listening = master_listen_fd

    def __del__(self):
        os.close(self._listening)
