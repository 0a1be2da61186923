"""Lesson 04: the ring on symbols against closed forms, and the checks of its two exercises on real ranks."""

from __future__ import annotations

import pytest

import nbddp
from nbddp.lessons.l04_collectives.collectives import (
    ALL_REDUCE,
    COLLECTIVES,
    GATHER,
    REDUCE_SCATTER,
    TensorPiece,
    collective,
)
from nbddp.lessons.l04_collectives.figure import COLOURS, draw_ring
from nbddp.lessons.l04_collectives.figure_collectives import draw_before_after
from nbddp.lessons.l04_collectives.simulation import ADDING, complete, simulate_ring
from nbddp.teach import check, explore
from tests.colours import contrast
from tests.lessons.answers import Mutant, defined, exercise, pool_of, solution

NPROC = 4  # of the module's pool


def test_the_explorer_opens_before_the_first_step_and_shows_a_broken_ring_beside_it() -> None:
    first, second = explore.ring().settings
    assert simulate_ring(**first).last is None
    assert simulate_ring(**second).verdict().startswith("wrong: 16 of 16")


def test_the_figure_has_a_letter_for_each_part_and_a_tick_for_each_complete_chunk() -> None:
    for shot in (simulate_ring(4, 2), simulate_ring(4, 5), simulate_ring(5, 99, ADDING)):
        shown = draw_ring(shot)
        texts = [t.get_text() for t in shown.figure.axes[0].texts]
        parts = [parts for row in shot.grid for parts in row]
        assert texts.count("✓") == sum(map(complete, parts))
        assert sum(t[-1:] in "ABCDE" and len(t) < 3 for t in texts if t) == sum(c > 0 for p in parts for c in p)
        assert shown.words == shot.words()
        assert all(t.get_fontsize() >= 6.5 for t in shown.figure.axes[0].texts)
    assert all(contrast("#ffffff", colour) >= 4.5 for colour in COLOURS)


# -- collectives before and after ------------------------------------------------------------

REAL = """
def left_by():
    import torch, torch.distributed as dist
    dist.init_process_group()
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, root = torch.tensor([10**rank]), rank == 0
    pieces = [torch.tensor([(p + 1) * 10**rank]) for p in range(n)]
    def some(): return [torch.zeros_like(whole) for _ in range(n)]
    def one(): return torch.zeros_like(whole)
    sent, piece, summed, total = whole.clone(), one(), one(), whole.clone()
    dist.broadcast(sent, 0)
    dist.scatter(piece, pieces if root else None, 0)
    dist.gather(whole, gathered := some() if root else None, 0)
    dist.all_gather(everything := some(), whole)
    dist.reduce(reduced := whole.clone(), 0)
    dist.all_reduce(total)
    dist.reduce_scatter(summed, pieces)
    dist.all_to_all_single(turned := torch.zeros(n, dtype=torch.int64), torch.cat(pieces))
    dist.destroy_process_group()
    def numbers(tensors): return [int(v) for t in tensors for v in t]
    return {
        "broadcast": numbers([sent]), "scatter": numbers([piece]), "gather": numbers(gathered) if root else [],
        "all-gather": numbers(everything), "reduce": numbers([reduced]) if root else [],
        "all-reduce": numbers([total]), "reduce-scatter": numbers([summed]), "all-to-all": numbers([turned]),
    }
"""


def test_collectives_on_symbols_are_torchs(pool: nbddp.Pool) -> None:
    real = list(pool.call(defined(REAL, "left_by")))
    for name in COLLECTIVES:
        after = collective(name, 4).after
        assert [[_number(cell) for cell in row] for row in after] == [theirs[name] for theirs in real], name


def _number(cell: TensorPiece) -> int:
    """What torch has in a cell if rank r has 10 ** r, and p + 1 times as much as piece p."""
    times = 1 if cell.piece is None else cell.piece + 1
    return sum(times * 10**r for r in cell.ranks)


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce_and_gather_is_for_one_rank() -> None:
    """What the lesson's questions about the explorer say, which opens on neither."""
    rows = collective(REDUCE_SCATTER, 4).after
    assert [row[0].ranks for row in rows] == [c.ranks for row in collective(ALL_REDUCE, 4).after for c in row]
    assert [row[0].piece for row in rows] == [0, 1, 2, 3]
    assert [len(row) for row in collective(GATHER, 4).after] == [4, 0, 0, 0]
    assert explore.before_after().settings[0]["name"] not in (GATHER, REDUCE_SCATTER, ALL_REDUCE)


def test_words_and_picture_of_a_collective() -> None:
    made = collective(REDUCE_SCATTER, 2)
    assert made.words().splitlines() == [
        "reduce-scatter on 2 ranks: rank r has the sum of all ranks' pieces r",
        "rank 0  A0 A1  →  A0+B0",
        "rank 1  B0 B1  →  A1+B1",
    ]
    assert collective(GATHER, 2).words().endswith("rank 1  B  →  –")
    for name in COLLECTIVES:
        made = collective(name, 4)
        pictured = draw_before_after(made)
        texts = [t.get_text() for t in pictured.figure.axes[0].texts]
        cells = [cell for row in (*made.before, *made.after) for cell in row]
        assert sum(text[:1] in "ABCD" for text in texts if text) == sum(len(cell.ranks) for cell in cells)
        assert texts.count("–") == sum(not row for row in (*made.before, *made.after))
        assert pictured.words == made.words()
        assert all(t.get_fontsize() >= 6.5 for t in pictured.figure.axes[0].texts)


# -- chunk_to_send ---------------------------------------------------------------------------

CHUNK = "def chunk_to_send(rank, step, world_size):\n    "
WRONG_CHUNKS = [
    Mutant("always its own", CHUNK + "return rank", "step 1: rank 0 sends chunk 0 (A) to rank 1, which has AB in it"),
    Mutant("the other way", CHUNK + "return (rank + step) % world_size", "through the chunks in the other direction"),
    Mutant("starts over", CHUNK + "return (rank - step % (world_size - 1)) % world_size",
           "step 3: rank 0 sends chunk 0 (A), which is incomplete, and nothing is added after this: the second half"),
    Mutant("all alike", CHUNK + "return step % world_size", "all ranks send the same chunk"),
    Mutant("no modulo", CHUNK + "return rank - step", "is -1, but 4 ranks have chunks 0 to 3: apply % world_size"),
    Mutant("one on", CHUNK + "return rank + 1", "chunk_to_send(3, 0, 4) is 4, but 4 ranks have chunks 0 to 3"),
    Mutant("for four only", CHUNK + "return (rank - step) % 4", "chunk_to_send(0, 1, 3) is 3, but 3 ranks"),
    Mutant("two lower", CHUNK + "return (rank - 2 * step) % world_size", "on 4 ranks, step "),
    Mutant("unwritten", CHUNK + "...", "still to be written"),
    Mutant("not implemented", CHUNK + "raise NotImplementedError", "still to be written"),
    Mutant("a float", CHUNK + "return float(rank)", "chunk_to_send(0, 0, 4) is 0.0, but"),
    Mutant("raises", CHUNK + "return [][rank]", "chunk_to_send(0, 0, 4) raised IndexError"),
    Mutant("the next, always", CHUNK + "return (rank + 1) % world_size",
           "every step sends the same chunk, so nothing that"),
    Mutant("one less round", CHUNK + "return (rank - step) % (world_size - 1)",
           "so take % world_size, not % (world_size - 1)"),
    Mutant("half of it", CHUNK + "if step < world_size - 1: return (rank - step) % world_size",
           "chunk_to_send(0, 3, 4) is None; here the function ends without a value to return, but each of the 6 steps"),
    Mutant("asks the ranks", CHUNK + "import torch.distributed as dist; return dist.get_rank()",
           "the arguments contain everything"),
    Mutant("letters", CHUNK + "return 'ABCD'[rank]", "chunk_to_send(0, 0, 4) is 'A', but 4 ranks have chunks 0 to 3"),
    Mutant("a pair", CHUNK + "return rank, (rank + 1) % world_size", "is [0, 1], but 4 ranks have chunks 0 to 3"),
]  # fmt: skip
RIGHT_CHUNKS = [
    CHUNK + "return (rank + step * (world_size - 1)) % world_size",
    CHUNK + "return (rank + 1 - step) % world_size",  # begins elsewhere
    CHUNK + "chunk = rank\n    for _ in range(step):\n        chunk = chunk - 1 if chunk else world_size - 1\n"
    "    return chunk",
]  # fmt: skip


@pytest.mark.parametrize("mutant", WRONG_CHUNKS, ids=str)
def test_wrong_schedules_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.chunk_to_send)


def test_right_schedules_pass(pool: nbddp.Pool) -> None:
    assert check.chunk_to_send(solution("04", "chunk_to_send"))
    for source in RIGHT_CHUNKS:
        assert check.chunk_to_send(defined(source, "chunk_to_send")), source
    assert "still to be written" in check.chunk_to_send(exercise("04", "chunk_to_send")).line


# -- ring_all_reduce -------------------------------------------------------------------------

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
RECEIVE_FIRST = (SEND_FIRST[0], "dist.recv(got, left)\n        dist.send(chunks[out], right)")
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
WRONG_SUMS = [
    Mutant("one step too few", changed(("2 * (n - 1)", "2 * n - 3"), ("step < n - 1", "step < n - 2")),
           "4 ranks, 12 numbers: rank 0, x[0:3]: rank 3's part is missing; the adding stopped one step too early"),
    Mutant("passes on too little", changed(("2 * (n - 1)", "2 * n - 3")), "each chunk reached all ranks but one"),
    Mutant("half", changed(("2 * (n - 1)", "n - 1")), "as after a reduce-scatter: world_size - 1 more"),
    Mutant("receives into its chunk", changed(("dist.recv(got, left)", "dist.recv(chunks[into], left)"),
           ("chunks[into] = chunks[into] + got if step < n - 1 else got", "pass")),
           "what arrived replaced your chunk, and nothing was added: receive into a separate buffer"),
    Mutant("adds to the end", changed((" if step < n - 1 else got", "")), "is complete: replace yours, do not add"),
    Mutant("own chunk always", changed(("(rank - step)", "(rank)"), ("(left - step)", "(left)")),
           "rank 0, x[0:3]: the parts of ranks 1–3 are missing"),
    Mutant("takes it for its own", changed(("(left - step)", "(rank - step)")), "a wrong chunk was sent or received"),
    Mutant("never adds", changed(("chunks[into] + got if step < n - 1 else got", "got")),
           "replaced your chunk, and nothing was added"),
    Mutant("the mean", changed(("torch.cat(chunks)", "torch.cat(chunks) / n")), "the sum divided by the world size"),
    Mutant("x itself", changed(("torch.cat(chunks)", "x")), "every rank returned its own x: return the sum"),
    Mutant("turned", changed(("cat(chunks)", "cat(chunks[1:] + chunks[:1])")), "sums are right but in another order"),
    Mutant("one chunk", changed(("torch.cat(chunks)", "chunks[rank]")), "rank 0 returned 3 numbers; return the whole"),
    Mutant("all send first", changed(SEND_FIRST), "; the ranks wait in a circle: a send ends only when its receiver"),
    Mutant("all receive first", changed(RECEIVE_FIRST), "deadlock: rank 0 waits in recv from rank 3"),
    Mutant("waits too early", changed(("dist.recv(got, left)\n        work.wait()",
           "work.wait()\n        dist.recv(got, left)")), "Start the send with isend, then recv, then wait"),
    Mutant("fewer steps on rank 0", changed(("2 * (n - 1)", "2 * (n - 1) - (rank == 0)")), "took fewer steps"),
    Mutant("chunk", changed(("tensor_split", "chunk")), "4 ranks, 5 numbers: a rank raised IndexError: list"),
    Mutant("chunk, told why", changed(("tensor_split", "chunk")), "cut with x.tensor_split(world_size)"),
    Mutant("equal buffers", changed(("torch.empty_like(chunks[into])", "torch.empty(len(x) // n)")),
           "4 ranks, 5 numbers: "),
    Mutant("all-reduce", HEAD + "    dist.all_reduce(x); return x", "the sum is right, but all_reduce computed it"),
    Mutant("imported", "from torch.distributed import all_reduce\n" + HEAD + "    all_reduce(x); return x",
           "the sum is right, but all_reduce computed it"),
    Mutant("a star", HEAD + STAR, "the sum is right, but rank 0 sends to ranks 1–3"),
    Mutant("all of x", HEAD + EVERYTHING, "rank 0 sent 36 numbers where 6 chunks are 18: send chunks, not all of x"),
    Mutant("for four", changed(("range(2 * (n - 1))", "range(6)")), "3 ranks, 7"),
    Mutant("None on a rank", changed(("return torch.cat(chunks)", "return torch.cat(chunks) if rank else None")),
           "rank 0 returned None, other ranks a value"),
    Mutant("a number", HEAD + "    return 3", "rank 0 returned a single number"),
    Mutant("noise", changed(("torch.cat(chunks)", "torch.cat(chunks) + .5")), "are not sums of the ranks'"),
    Mutant("not implemented", HEAD + "    raise NotImplementedError", "still to be written"),
    Mutant("raises", HEAD + "    raise ValueError('no idea')", "a rank raised ValueError: no idea"),
    Mutant("makes a group", HEAD + "    dist.init_process_group()\n" + LOOP,
           "leave out init_process_group(): the check has created the process group"),
    Mutant("ends the group", changed(("    return", "    dist.destroy_process_group()\n    return")),
           "leave out destroy_process_group(): the check has created the process group and still needs it"),
    Mutant("no ring", HEAD.replace(" % n", "") + LOOP, "4 ranks, 12 numbers: a send or recv names a rank that does not "
           "exist; the ranks are 0 to 3, and the neighbours are (rank + 1) % world_size"),
    Mutant("four written", (HEAD + LOOP).replace("% n", "% 4").replace("(n)", "(4)"),
           "3 ranks, 7 numbers: a send or recv names a rank that does not"),
    Mutant("four chunks", changed(("% n", "% 4")),
           "4 ranks succeeded: is 4 written where dist.get_world_size() belongs?"),
    Mutant("to itself", changed((", right)", ", rank)")),
           "a send or recv names the rank itself; the ranks are 0 to 3"),
    Mutant("from the right", changed(("recv(got, left)", "recv(got, right)")),
           "send to one neighbour and receive from the other"),
    Mutant("another dtype", changed(("like(chunks[into])", "like(chunks[into], dtype=torch.int64)")),
           "receives into int64; the buffer needs the dtype of the message"),
    Mutant("the list", changed(("torch.cat(chunks)", "chunks")),
           "torch.cat(chunks) joins chunks; return the sum"),
    Mutant("its own sum", HEAD + "    return x.sum()",
           "rank 0 returned a single number: all ranks' x are added up, number by"),
    Mutant("n times its own", HEAD + "    return x * n", "every rank has only its own numbers, more than once"),
    Mutant("from zeros", changed(("list(x.clone().tensor_split(n))", "list(torch.zeros_like(x).tensor_split(n))")),
           "nothing was added to anything: start from what is in x"),
    Mutant("two steps more", changed(("2 * (n - 1)", "2 * n")),
           "the sum is right, but took 8 steps; a ring needs 6"),
    Mutant("on one rank", HEAD + "    if rank == 0: dist.all_reduce(x)\n    return x",
           "rank 0 waits in all_reduce #1; ranks 1–3 have finished the cell without calling it"),
    Mutant("from anybody", changed(("recv(got, left)", "recv(got)")),
           "3 ranks, 2 numbers: gloo cannot receive an empty tensor from any source; name the sender: dist.recv"),
    Mutant("forgets to wait", changed(("        work.wait()\n", ""), ("work = ", "")), "then wait for the send"),
]  # fmt: skip
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
RIGHT_SUMS = [PAIRED, HEAD + ODD_EVEN, IN_PLACE, OTHER_WAY, changed(("x.clone()", "x.double()"))]


@pytest.mark.every(3)
@pytest.mark.parametrize("mutant", WRONG_SUMS, ids=str)
def test_wrong_sums_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.ring_all_reduce)


def test_right_sums_pass(pool: nbddp.Pool) -> None:
    assert check.ring_all_reduce(solution("04", "ring_all_reduce"))
    for source in RIGHT_SUMS:
        assert check.ring_all_reduce(defined(source, "ring_all_reduce")), source
    assert "still to be written" in check.ring_all_reduce(exercise("04", "ring_all_reduce")).line


@pytest.mark.parametrize("call", ["init_process_group", "destroy_process_group"])
def test_a_group_that_is_made_or_ended_behind_the_check_spoils_no_later_answer(pool: nbddp.Pool, call: str) -> None:
    imported = f"from torch.distributed import {call} as made_or_ended\n" + changed(
        ("    return", "    made_or_ended()\n    return")
    )
    assert not check.ring_all_reduce(defined(imported, "ring_all_reduce")).ok
    assert check.ring_all_reduce(solution("04", "ring_all_reduce"))


def test_a_group_that_a_cell_has_left_stays(pool: nbddp.Pool) -> None:
    pool.call(_join)
    assert check.ring_all_reduce(solution("04", "ring_all_reduce"))
    assert list(pool.call(_size)) == [4, 4, 4, 4]


def _join() -> None:
    import torch.distributed as dist

    dist.init_process_group()


def _size() -> int:
    import torch
    import torch.distributed as dist

    dist.all_reduce(one := torch.ones(1))
    size = dist.get_world_size()
    dist.destroy_process_group()
    assert one == size
    return size


def test_a_pool_of_two_is_told_what_to_start(pool: nbddp.Pool) -> None:
    with pool_of(2):
        line = check.ring_all_reduce(solution("04", "ring_all_reduce")).line
    assert line == "this check needs 4 ranks and the pool has 2; %ddp start --nproc 4 makes them"
