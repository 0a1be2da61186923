"""What a trace shows of any program, against traces made by hand whose answers are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.analysis.activity import activities
from nbddp.analysis.cause import BACKWARD, CODE, COPY, FORWARD, INPUT, OPTIMIZER
from nbddp.analysis.steps import Span, length, minus
from nbddp.capabilities.collectives.breakdown import Split
from nbddp.capabilities.collectives.figure import draw_program
from nbddp.capabilities.collectives.instances import kinds, meetings
from nbddp.capabilities.collectives.program import Breakdown, longest, program, shortened
from nbddp.capabilities.trace.merge import Merged
from nbddp.figures.table import Table
from tests.handmade import ENGINE, GLOO, NCCL_STREAM, Made, merged
from tests.unit.test_trace import SPANS, points

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64>(cutlass_80_tensorop_s1688gemm::Params)"
REDUCES = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def us(*microseconds: int) -> tuple[int, ...]:
    return tuple(1000 * m for m in microseconds)


def found(made: Merged) -> Breakdown:
    return program(made.data["traceEvents"])


@given(SPANS, SPANS)
def test_what_is_left_of_spans_without_others(one: list[Span], other: list[Span]) -> None:
    left = minus(one, other)
    assert points(left) == points(one) - points(other)
    assert all(a[1] < b[0] or a[1] <= b[0] for a, b in itertools.pairwise(left))


# -- GPUs and NCCL ---------------------------------------------------------------------------------


def gpu_rank(forward_ends: int, arrives: int) -> Made:
    """A step on a GPU: loader 0–40 on the host, copy 50–80, forward from 100, backward for 100, all-reduce from
    `arrives` to 420, optimizer 420–450."""
    made = Made()
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 40)
    made.memcpy("Memcpy HtoD (Pageable -> Device)", 50, 80)
    made.kernel(GEMM, 100, forward_ends, launched=85)
    made.span("autograd::engine::evaluate_function: AddmmBackward0", 90, 110, ENGINE)
    made.kernel(GEMM, forward_ends, forward_ends + 100, launched=95, thread=ENGINE)
    made.called("allreduce_", "nccl:all_reduce", 102, 108, thread=ENGINE)
    made.span("nccl:all_reduce", 103, 107, ENGINE, "user_annotation")
    made.kernel(REDUCES, arrives, 420, launched=105, thread=ENGINE, stream=NCCL_STREAM)
    made.annotation("Optimizer.step#SGD.step", 120, 140)
    made.kernel("multi_tensor_apply_kernel", 420, 450, launched=130)
    return made


def on_gpus() -> Merged:
    """Rank 1's forward takes 50 µs longer."""
    return merged(gpu_rank(200, 250), gpu_rank(250, 340))


def test_a_gpus_time_is_compute_exposed_communication_copies_and_idle() -> None:
    answer = found(on_gpus())
    whole, compute, exposed, copies, idle, communication, hidden, waiting = us(400, 230, 120, 30, 20, 170, 50, 40)
    assert answer.gpus
    assert answer.ranks[0] == Split(whole, compute, exposed, copies, idle, communication, hidden, waiting)
    assert answer.ranks[0].overlap == pytest.approx(5 / 17)
    assert answer.ranks[1] == Split(*us(400, 280, 70, 30, 20, 80, 10, 0))


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    phases = activities(on_gpus().data["traceEvents"])[1].phases
    took = {name: length(spans) for name, spans in phases.items()}
    assert [took[n] for n in (FORWARD, BACKWARD, OPTIMIZER, COPY, INPUT)] == list(us(150, 100, 30, 30, 40))


def test_the_last_kernel_of_nccl_to_begin_is_the_last_rank_and_one_collective_makes_none_late() -> None:
    made = on_gpus()
    assert made.joined == 1
    arrows = [e for e in made.data["traceEvents"] if e["ph"] in "sf" and e.get("cat") == "collective"]
    assert [(e["pid"], e["tid"]) for e in arrows] == [(1, NCCL_STREAM), (1001, NCCL_STREAM)], "from kernel to kernel"
    (kind,) = kinds(meetings(activities(made.data["traceEvents"])))
    assert (kind.op, kind.count, kind.last, (kind.late, kind.moving)) == ("all_reduce", 1, {1: 1}, us(90, 80))
    words = found(made).sentences()
    assert not any("rank 1" in line for line in words), "one of them is the last to come to each collective"


def test_collectives_of_two_groups_on_two_streams_are_told_apart() -> None:
    """Tensor parallel's all-reduce is called after data parallel's, and its kernel overtakes it."""
    ranks = []
    for late in (0, 30):
        made = Made()
        made.kernel(GEMM, 0, 100, launched=0)
        made.called("allreduce_", "nccl:all_reduce", 10, 20, group="dp")
        made.kernel(REDUCES, 150, 300, launched=15, stream=21)
        made.called("allreduce_", "nccl:all_reduce", 30, 40, group="tp")
        made.kernel(REDUCES, 110 + late, 200, launched=35, stream=22)
        ranks.append(made)
    met = meetings(activities(merged(*ranks).data["traceEvents"]))
    assert [(m.group, m.longest_wait, m.moving) for m in met] == [("tp", *us(30, 60)), ("dp", *us(0, 150))]


def test_the_longest_kernels_have_short_names() -> None:
    calls = longest(on_gpus().data["traceEvents"])
    assert [(c.name, c.kind, c.count, c.total, c.rank) for c in calls] == [
        ("cutlass::Kernel2", "compute", 4, *us(450), 1),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", 2, *us(250), 0),
        ("Memcpy HtoD", "copy", 2, *us(60), 0),
        ("multi_tensor_apply_kernel", "compute", 2, *us(60), 0),
    ]
    assert shortened("void at::native::f<4, at::g<float>>(int, at::h<2>)") == "at::native::f"


# -- CPUs and gloo ---------------------------------------------------------------------------------


def on_cpus() -> Merged:
    """Rank 1 sleeps from 100 to 200 before the all-reduce, which ends at 300."""
    ranks = []
    for arrives in (100, 200):
        made = Made()
        made.span("aten::matmul", 0, 100)
        made.span("aten::mm", 10, 90)
        made.all_reduce(arrives, 300)
        made.span("aten::copy_", 250, 260, GLOO)  # gloo's own
        made.span("aten::add", 300, 350)
        ranks.append(made)
    return merged(*ranks)


def test_a_cpus_time_is_compute_exposed_communication_and_idle() -> None:
    answer = found(on_cpus())
    assert not answer.gpus
    assert answer.ranks[0] == Split(*us(350, 150, 200, 0, 0, 200, 0, 100))
    assert answer.ranks[1] == Split(*us(350, 150, 100, 0, 100, 100, 0, 0))
    assert answer.sentences()[2] == (
        "no rank is known to be late: another one comes last each time, or too few collectives tell"
    )
    assert answer.tables()[0].rows[0] == (0, "43 %", "57 %", "57 %", "29 %", "0 %", "0 %", "0 %")


def test_an_operation_that_waits_for_a_collective_computes_nothing() -> None:
    """Tensor parallel: the wait is an operation, and it is inside another."""
    made = Made()
    made.span("aten::mm", 0, 100)
    made.span("autograd::engine::evaluate_function: AllReduceBackward", 100, 300)
    made.span("AllReduceBackward", 100, 290)
    made.span("_c10d_functional::wait_tensor", 120, 280)
    (of,) = activities(merged(made).data["traceEvents"]).values()
    assert of.compute == [us(0, 120), us(280, 290)]
    assert of.communication == [us(120, 280)]


def test_compute_while_a_collective_is_on_its_way_hides_it() -> None:
    made = Made()
    made.called("_allgather_base_", "gloo:all_gather", 0, 10)
    made.span("gloo:all_gather", 12, 200, GLOO, "user_annotation")
    made.span("aten::mm", 20, 150)
    made.wait(150, 200)
    made.span("aten::mm", 200, 250)
    answer = found(merged(made))
    assert answer.ranks[0] == Split(*us(250, 180, 70, 0, 0, 200, 130, 0))
    assert answer.ranks[0].overlap == 0.65


def test_the_longest_calls_count_their_own_time_and_collectives_their_transfer() -> None:
    calls = {c.name: (c.kind, c.count, c.total) for c in longest(on_cpus().data["traceEvents"])}
    assert calls == {
        "gloo:all_reduce": ("communication", 2, *us(197 + 97)),
        "aten::mm": ("compute", 2, *us(160)),
        "aten::add": ("compute", 2, *us(100)),
        "aten::matmul": ("compute", 2, *us(40)),
    }


PLACES = {INPUT: 0, COPY: 1, FORWARD: 2, BACKWARD: 3, OPTIMIZER: 4, CODE: 5}


def trained(late: int, where: str, steps: int = 8, ranks: int = 4) -> Merged:
    """Ranks of DDP on CPUs; rank `late` takes 1 ms more in one part of each step. The others wait for it."""
    extra = {rank: [1000 if rank == late and i == PLACES[where] else 0 for i in range(6)] for rank in range(ranks)}
    made = {rank: Made() for rank in range(ranks)}
    at = dict.fromkeys(range(ranks), 0)
    for _ in range(steps):
        arrives = {}
        for rank, of in made.items():
            t, more = at[rank], extra[rank]
            t += 5 + more[5]
            of.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t, t + 10 + more[0])
            t += 10 + more[0]
            of.span("aten::to", t, t + 5 + more[1])
            t += 5 + more[1]
            of.annotation("DistributedDataParallel.forward", t, t + 20 + more[2])
            of.span("aten::linear", t + 1, t + 5)
            t += 20 + more[2]
            of.span("autograd::engine::evaluate_function: AddmmBackward0", t, t + 30 + more[3])
            of.span("AddmmBackward0", t + 1, t + 29)
            arrives[rank] = t + 30 + more[3]
        done = max(arrives.values()) + 20
        for rank, of in made.items():
            of.called("allreduce_", "gloo:all_reduce", arrives[rank], arrives[rank] + 2)
            of.span("gloo:all_reduce", arrives[rank] + 3, done, GLOO, "user_annotation")
            of.annotation("Optimizer.step#SGD.step", done, done + 10 + extra[rank][4])
            of.span("aten::add_", done + 1, done + 9)
            at[rank] = done + 10 + extra[rank][4]
    return merged(*made.values())


@pytest.mark.parametrize("where", PLACES)
def test_a_late_rank_gets_its_cause(where: str) -> None:
    answer = found(trained(2, where))
    assert answer.late is not None
    assert answer.late.rank == 2
    assert answer.why is not None
    assert (answer.why.rank, answer.why.what) == (2, where)
    assert answer.why.extra == pytest.approx(7_000_000, rel=0.01), "of seven of eight steps: from the first meeting on"


def test_ranks_that_come_at_the_same_time_have_no_late_one() -> None:
    answer = found(trained(9, INPUT))
    assert (answer.late, answer.why) == (None, None)
    assert not any("last" in line for line in answer.sentences())


def test_a_second_init_has_the_same_names_and_numbers_and_is_another_meeting() -> None:
    made = [Made(), Made()]
    for of in made:
        of.all_reduce(0, 20)
        of.collectives.append(of.collectives[0].__class__("gloo:all_reduce", "0", (), 1, 100_500))
        of.span("c10d::allreduce_", 100, 102)
        of.span("gloo:all_reduce", 103, 120, GLOO, "user_annotation")
    assert [m.begins for m in meetings(activities(merged(*made).data["traceEvents"]))] == list(us(0, 100))


# -- words and figure --------------------------------------------------------------------------------


def test_an_empty_trace_says_that_nothing_is_known() -> None:
    empty = found(merged(Made()))
    assert empty.sentences() == ["no compute or communication was recorded"]
    assert empty.tables() == []
    assert draw_program(empty).png().startswith(b"\x89PNG")
    assert program([]).sentences() == ["no compute or communication was recorded"]


@pytest.mark.parametrize("ranks", [1, 4, 40])
def test_the_figure_is_drawn_and_says_itself(ranks: int) -> None:
    shown = draw_program(found(merged(*(gpu_rank(200 + r, 250 + r) for r in range(ranks)))))
    bundle, _ = shown._repr_mimebundle_()
    assert bundle["text/html"].count("<table>") == (3 if ranks > 1 else 2)
    assert "multi_tensor_apply_kernel" not in bundle["text/html"].split("<table>")[0], "tables are not in the words too"
    assert ("16 of 40 ranks are drawn" in shown.words) == (ranks == 40)
    assert any("16 of 40 ranks are drawn" in text.get_text() for text in shown.figure.texts) == (ranks == 40)
    assert len(shown.figure.axes) == (2 if ranks > 1 else 1)


def test_of_40_ranks_16_are_drawn_and_the_late_one_among_them() -> None:
    answer = found(trained(30, FORWARD, ranks=40))
    assert answer.late is not None
    assert answer.late.rank == 30
    rows = [t.get_text() for t in draw_program(answer).figure.axes[0].get_yticklabels()]
    assert rows == [f"rank {r}" for r in (*range(15), 30)]
    assert [row[0] for row in answer.tables()[0].rows] == [*range(15), 30]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200), st.sampled_from(["kernel", "nccl", "copy"]))))
def test_the_parts_of_a_ranks_time_make_up_the_whole(spans: list[tuple[int, int, str]]) -> None:
    made = Made()
    for start, took, kind in spans:
        if kind == "copy":
            made.memcpy("Memcpy DtoH", start, start + took)
        else:
            made.kernel(REDUCES if kind == "nccl" else GEMM, start, start + took, launched=0)
    if spans:
        s = found(merged(made)).ranks[0]
        assert s.compute + s.exposed + s.copies + s.idle == s.whole
        assert min(s.compute, s.exposed, s.copies, s.idle, s.hidden) >= 0
        assert s.communication == s.exposed + s.hidden


def test_several_tables_stand_below_the_words_once() -> None:
    from nbddp.figures.html import page

    one, two = Table(("a",), [(1,)]), Table(("b",), [(2,)])
    html = page(b"\x89PNG" + bytes(30), 10, "words", [one, two])
    assert html.count("<table>") == 2
    assert html.split("<pre")[1].split("</pre>")[0].endswith(">words")
