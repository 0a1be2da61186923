"""Lesson 04: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

CHUNK_TO_SEND = Table("chunk_to_send", within("def chunk_to_send(rank, step, world_size):\n    ..."), nproc=4, wrong={
    "return rank": "step 1: rank 0 sends chunk 0 (A) to rank 1, which has AB in it",
    "return (rank + step) % world_size": "through the chunks in the other direction",
    "return (rank - step % (world_size - 1)) % world_size":
        "step 3: rank 0 sends chunk 0 (A), which is incomplete, and nothing is added after this: the second half",
    "return step % world_size": "all ranks send the same chunk",
    "return rank - step": "is -1, but 4 ranks have chunks 0 to 3: apply % world_size",
    "return (rank - step) % 4": "chunk_to_send(0, 1, 3) is 3, but 3 ranks",
    "return (rank - 2 * step) % world_size": "on 4 ranks, step ",
    "return [][rank]": "chunk_to_send(0, 0, 4) raised IndexError",
    "return (rank - step) % (world_size - 1)": "so take % world_size, not % (world_size - 1)",
    "if step < world_size - 1: return (rank - step) % world_size":
        "chunk_to_send(0, 3, 4) is None; here the function ends without a value to return, but each of the 6 steps",
    "import torch.distributed as dist; return dist.get_rank()": "the arguments contain everything",
    "return 'ABCD'[rank]": "chunk_to_send(0, 0, 4) is 'A', but 4 ranks have chunks 0 to 3",
    "return rank, (rank + 1) % world_size": "is [0, 1], but 4 ranks have chunks 0 to 3",
    "return float(rank)": "chunk_to_send(0, 0, 4) is 0.0, but",
    "return (rank + 1) % world_size": "every step sends the same chunk, so nothing that",
}, right=[
    "return (rank + step * (world_size - 1)) % world_size",
    "return (rank + 1 - step) % world_size",  # begins elsewhere
    "chunk = rank\n    for _ in range(step):\n        chunk = chunk - 1 if chunk else world_size - 1\n    return chunk",
])  # fmt: skip

HEAD = """
def ring_all_reduce(x):
    import torch, torch.distributed as dist
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
"""
LOOP = """
    chunks = list(x.clone().tensor_split(n))
    for step in range(2 * (n - 1)):
        out, into = (rank - step) % n, (left - step) % n
        got = torch.empty_like(chunks[into])
        work = dist.isend(chunks[out], right)
        dist.recv(got, left)
        work.wait()
        chunks[into] = chunks[into] + got if step < n - 1 else got
    return torch.cat(chunks)
"""


def changed(*pairs: tuple[str, str]) -> str:
    """The right answer with something replaced."""
    text = LOOP
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return HEAD + text


SEND_FIRST = ("work = dist.isend(chunks[out], right)\n        dist.recv(got, left)\n        work.wait()",
              "dist.send(chunks[out], right)\n        dist.recv(got, left)")  # fmt: skip
EVERYTHING = """
    total, passed = x.clone(), x.clone()
    for _ in range(n - 1):
        got = torch.empty_like(x)
        work = dist.isend(passed, right); dist.recv(got, left); work.wait()
        total += got
        passed = got
    return total
"""
STAR = """
    if rank:
        dist.send(x, 0); dist.recv(x, 0)
        return x
    for r in range(1, n):
        dist.recv(got := torch.empty_like(x), r); x = x + got
    for r in range(1, n): dist.send(x, r)
    return x
"""
PAIR = "[dist.P2POp(dist.isend, chunks[out], right), dist.P2POp(dist.irecv, got, left)]"
PAIRED = changed((SEND_FIRST[0], f"for work in dist.batch_isend_irecv({PAIR}): work.wait()"))
ODD_EVEN = """
    size = -(-len(x) // n)
    padded = torch.zeros(size * n)
    padded[: len(x)] = x
    rows, got = padded.view(n, size), torch.zeros(size)
    def swap(row):
        if rank % 2:
            dist.recv(got, right); dist.send(row, left)
        elif rank == 0 and n % 2:
            work = dist.isend(row, left); dist.recv(got, right); work.wait()
        else:
            dist.send(row, left); dist.recv(got, right)
    for step in range(n - 1):
        swap(rows[(rank + step) % n]); rows[(rank + step + 1) % n] += got
    for step in range(n - 1):
        swap(rows[(rank + step - 1) % n]); rows[(rank + step) % n] = got
    return padded[: len(x)]
"""  # to the left, in padded rows, odd ranks receive first
IN_PLACE = changed(("x.clone()", "x"), ("torch.cat(chunks)", "x"), ("chunks[into] + got if step < n - 1 else got",
                   "chunks[into].add_(got) if step < n - 1 else chunks[into].copy_(got)"))  # fmt: skip
OTHER_WAY = changed(("(rank - step)", "(rank + step)"), ("(left - step)", "(rank + step + 1)"), ("right)", "left)"),
                    ("recv(got, left)", "recv(got, right)"))  # fmt: skip
RING_ALL_REDUCE = Table("ring_all_reduce", every=3, nproc=4, wrong={
    changed(("2 * (n - 1)", "2 * n - 3"), ("step < n - 1", "step < n - 2")):
        "4 ranks, 12 numbers: rank 0, x[0:3]: rank 3's part is missing; the adding stopped one step too early",
    changed(("2 * (n - 1)", "2 * n - 3")): "each chunk reached all ranks but one",
    changed(("2 * (n - 1)", "n - 1")): "as after a reduce-scatter: world_size - 1 more",
    changed((" if step < n - 1 else got", "")): "is complete: replace yours, do not add",
    changed(("(rank - step)", "(rank)"), ("(left - step)", "(left)")):
        "rank 0, x[0:3]: the parts of ranks 1–3 are missing",
    changed(("(left - step)", "(rank - step)")): "a wrong chunk was sent or received",
    changed(("chunks[into] + got if step < n - 1 else got", "got")): "chunk replaced yours, and nothing was added",
    changed(("torch.cat(chunks)", "torch.cat(chunks) / n")): "the sum divided by the world size",
    changed(("torch.cat(chunks)", "x")): "every rank returned its own x: return the sum",
    changed(("cat(chunks)", "cat(chunks[1:] + chunks[:1])")): "sums are right but in another order",
    changed(("torch.cat(chunks)", "chunks[rank]")): "rank 0 returned 3 numbers; return the whole",
    changed(SEND_FIRST): "; the ranks wait in a circle: a send ends only when its receiver",
    changed(("2 * (n - 1)", "2 * (n - 1) - (rank == 0)")): "took fewer steps",
    changed(("tensor_split", "chunk")):
        ("4 ranks, 5 numbers: a rank raised IndexError: list", "cut with x.tensor_split(world_size)"),
    changed(("torch.empty_like(chunks[into])", "torch.empty(len(x) // n)")): "4 ranks, 5 numbers: ",
    HEAD + "    dist.all_reduce(x); return x": "the sum is right, but all_reduce computed it",
    HEAD + STAR: "the sum is right, but rank 0 sends to ranks 1–3",
    HEAD + EVERYTHING: "rank 0 sent 36 numbers where 6 chunks are 18: send chunks, not all of x",
    changed(("range(2 * (n - 1))", "range(6)")): "3 ranks, 7",
    changed(("return torch.cat(chunks)", "return torch.cat(chunks) if rank else None")):
        "rank 0 returned None, other ranks a value",
    changed(("torch.cat(chunks)", "torch.cat(chunks) + .5")): "are not sums of the ranks'",
    HEAD + "    raise ValueError('no idea')": "a rank raised ValueError: no idea",
    HEAD + "    dist.init_process_group()\n" + LOOP:
        "remove init_process_group(): the check has created the process group",
    changed(("    return", "    dist.destroy_process_group()\n    return")):
        "remove destroy_process_group(): the check has created the process group and still needs it",
    HEAD.replace(" % n", "") + LOOP:
        "4 ranks, 12 numbers: a send or recv names a rank that does not exist; the ranks are 0 to 3, and the "
        "neighbours are (rank + 1) % world_size",
    (HEAD + LOOP).replace("% n", "% 4").replace("(n)", "(4)"):
        "3 ranks, 7 numbers: a send or recv names a rank that does not",
    changed(("% n", "% 4")): "4 ranks succeeded: is 4 written where dist.get_world_size() belongs?",
    changed((", right)", ", rank)")): "a send or recv names the rank itself; the ranks are 0 to 3",
    changed(("like(chunks[into])", "like(chunks[into], dtype=torch.int64)")):
        "receives into int64; the buffer needs the dtype of the message",
    changed(("torch.cat(chunks)", "chunks")): "torch.cat(chunks) joins chunks; return the sum",
    HEAD + "    return x.sum()": "rank 0 returned a single number: all ranks' x are added up, number by",
    HEAD + "    return x * n": "every rank has only its own numbers, more than once",
    changed(("list(x.clone().tensor_split(n))", "list(torch.zeros_like(x).tensor_split(n))")):
        "nothing was added to anything: start from what is in x",
    changed(("2 * (n - 1)", "2 * n")): "the sum is right, but took 8 steps; a ring needs 6",
    HEAD + "    if rank == 0: dist.all_reduce(x)\n    return x":
        "rank 0 waits in all_reduce #1; ranks 1–3 have finished the cell without calling it",
    changed(("recv(got, left)", "recv(got)")):
        "3 ranks, 2 numbers: gloo cannot receive an empty tensor from any source; name the sender: dist.recv",
    changed(("        work.wait()\n", ""), ("work = ", "")): "then wait for the send",
    changed(("dist.recv(got, left)\n        work.wait()", "work.wait()\n        dist.recv(got, left)")):
        "Start the send with isend, then recv, then wait",
    changed(("recv(got, left)", "recv(got, right)")): "send to one neighbour and receive from the other",
}, right=[
    PAIRED,
    HEAD + ODD_EVEN,
    IN_PLACE,
    OTHER_WAY,
    changed(("x.clone()", "x.double()")),
])  # fmt: skip
