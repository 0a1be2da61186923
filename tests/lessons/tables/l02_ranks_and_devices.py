"""Lesson 02: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

GPUS = "def gpus_of(rank, n, g):\n    "
GPUS_OF = Table("gpus_of", within(GPUS + "..."), wrong={
    "return list(range(rank * g, rank * g + g))": "that counts GPUs over all nodes",
    "l = rank % n; return list(range(l * g, l * g + g + 1))": "has 2 indices, but",
    "return [f'cuda:{i}' for i in range(g)]": "device indices are integers",
    "l = rank % n; return [*range(l * g, l * g + g)][::-1]": "right but in another order",
    "raise NotImplementedError": "gpus_of raised NotImplementedError: you have not written it",
    "def gpus_of(rank, n, own):\n    first = rank\n    return [last]":
        "raised NameError: name 'last' is not defined (line 3, in gpus_of)",
    "return [[0][rank]]": "gpus_of(1, 4, 1) raised IndexError: list index out of range",
    "def gpus_of(rank):\n    return [rank]": "raised TypeError: gpus_of() takes 1 positional",
    "import os; l = int(os.environ['LOCAL_RANK']); return [*range(l * g, l * g + g)]":
        "gpus_of(0, 4, 1) is [0] on rank 0 and is [1] on rank 1: the result must depend only on the arguments",
    "raise SystemExit": "every rank called sys.exit() instead of returning an answer",
    "raise SystemExit(3)": "a rank called sys.exit(3) instead of returning an answer",
    "import os; os._exit(7)": "died: its process exited with code 7",
    "import threading\nlock = threading.Lock()\n" + GPUS + "return lock": "cannot be sent",
    "some = []\n    for i in range(g): some = some.append(i)\n    return some":
        "gpus_of(0, 4, 1): expected [0], got None; here the function ends without a value to return",
    "first = rank % n * g / 1; return list(range(first, first + g))": "/ gives a float, // a whole",
    "import os; return os.environ": "gpus_of(0, 4, 1): expected [0], got os.environ",
    "return rank % n * g": "return a list with one index",
}, right=[
    "return [rank % n * g + k for k in range(g)]",
    "first = (rank - rank // n * n) * g\n    return range(first, first + g)",
])  # fmt: skip

PLACE_OF = Table("place_of", within("def place_of(rank, n):\n    return ..."), wrong={
    "rank % n, rank // n": "the two are swapped",
    "(rank % n, rank % n)": "the node is the number of full nodes before",
    "(rank // n, rank // n)": "the number of ranks of the same node that come before",
    "(0, rank) if rank < n else (1, rank - n)": "a node has 4 ranks here, so the last local",
    "(str(rank // n), str(rank % n))": "expected [0, 0], got ['0', '0']; both must be integers",
    "(0, rank) if rank < n else None": "here the function ends without a value to return",
    "map(int, divmod(rank, n))": "expected [0, 0], got <map object>; return a pair",
}, right=[
    "(rank // n, rank % n)",
    "[(rank - rank % n) // n, rank - rank // n * n]",
])  # fmt: skip
