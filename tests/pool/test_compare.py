"""Are the replicas equal? Real drift on real ranks, the plan of what travels, and the words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.capabilities.compare import command as compare_command
from nbddp.capabilities.compare import on_rank as compare_on_rank
from nbddp.capabilities.compare.command import Wanted, pieces, within
from nbddp.capabilities.compare.replicas import Compared, HeldValue, Leaf
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import Kernel

MODEL = """
import torch, torch.distributed as dist, numpy as np
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model = DDP(network())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def train(steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
train()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with warm.pool(4) as pool:
        pool.run_cell(MODEL, screen=NullScreen())
        yield pool


def cell(pool: WorkerPool, code: str) -> list[object]:
    return list(pool.run_cell(textwrap.dedent(code), want_value=True, screen=NullScreen()))


def test_ddp_keeps_replicas_equal(pool: WorkerPool) -> None:
    pool.run_cell(MODEL, screen=NullScreen())
    report = pool.compare("model", "optimizer")
    assert report.equal
    assert repr(report) == (
        "model: 4 parameters equal on 4 ranks (232 bytes each)\n"
        "optimizer: 12 state tensors and 12 settings equal on 4 ranks (480 bytes each)"
    )
    assert "<table" not in report._repr_html_()


def test_a_missing_broadcast_is_seen(pool: WorkerPool) -> None:
    cell(pool, "torch.manual_seed(rank)\ndrift = network()")
    mine = cell(pool, "[p.detach().double().numpy() for p in drift.parameters()]")
    report = pool.compare("drift")
    assert not report.equal
    words = repr(report)
    assert words.startswith("drift differs: 4 of 4 tensors; first: 0.weight (ranks 1–3 differ from rank 0 by at most ")
    assert "\nno two ranks agree\n" in words
    for i, d in enumerate(report.compared[0].differences()):
        assert d.largest == max(abs(mine[r][i] - mine[0][i]).max() for r in (1, 2, 3))  # type: ignore[index]
        assert d.classes == ((0,), (1,), (2,), (3,))


def test_an_unseeded_buffer_is_seen_and_ddps_own_way_with_buffers_told(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        normed = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        after = normed(torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)))
        unseeded = network(); unseeded.load_state_dict(model.module.state_dict())
        unseeded.register_buffer("noise", torch.full((3,), float(rank == 2)))
    """,
    )
    words = repr(pool.compare("normed"))
    assert words.startswith("normed differs: 2 of 7 tensors; first: 1.running_mean (ranks 1–3 differ")
    assert "only buffers differ: DDP copies rank 0's to all ranks before the next forward" in words
    words = repr(pool.compare("unseeded"))
    assert words.startswith(
        "unseeded differs: 1 of 5 tensors; first: noise (rank 2 differs from rank 0 by at most 1.0e+00; "
        "norms 0 and 1.7321)\nranks 0–1, 3 agree\n"
    )
    assert "only buffers" not in words


def test_a_skipped_all_reduce_is_seen_in_model_and_optimizer(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        skipped = DDP(network())
        sgd = torch.optim.SGD(skipped.parameters(), lr=0.1, momentum=0.9)
        skipped(torch.ones(2, 4)).sum().backward(); sgd.step(); sgd.zero_grad()
    """,
    )
    assert pool.compare("skipped", "sgd").equal
    cell(
        pool,
        """
        with skipped.no_sync():
            skipped(torch.ones(2, 4) * (1 + (rank >= 2))).sum().backward()
        sgd.step()
    """,
    )
    report = pool.compare("skipped", "sgd")
    words = repr(report)
    assert words.startswith(
        "skipped differs: 3 of 4 tensors; first: 0.weight (ranks 2–3 differ from rank 0 by at most "
    )
    assert words.count("\nranks 0–1 and ranks 2–3 agree among themselves\n") == 2
    assert "sgd differs: 3 of " in words
    assert "; first: 0.weight.momentum_buffer (" in words
    rows = {row[0]: row for row in report.rows}
    assert rows["skipped.0.weight"][2] == "rank 1"
    assert "sgd.0.weight.momentum_buffer" in rows


def test_numbers_texts_and_containers(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        rate, word, loss, big = 0.1, "adam", 0.5 * (rank == 3), 2**70 + (rank == 1)
        mixed = {"a": torch.zeros(3), "b": [1, (torch.ones(2), "x")], 3: None, "n": float("nan"), "array": np.eye(2)}
        other = {**mixed, "b": [1 + (rank == 2), (torch.ones(2), "x")]}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        function = print
    """,
    )
    assert repr(pool.compare("rate")) == "rate: equal on 4 ranks (0.1)"
    assert repr(pool.compare("word")) == "word: equal on 4 ranks ('adam')"
    words = "loss differs: rank 3 differs from rank 0 by at most 5.0e-01; values 0.0 and 0.5\nranks 0–2 agree\n"
    assert repr(pool.compare("loss")).startswith(words)
    assert pool.compare("big").compared[0].differences()[0].largest == 1.0
    mixed = "mixed: 3 tensors, 2 numbers and 2 values equal on 4 ranks (52 bytes each)"
    assert repr(pool.compare("mixed")) == mixed
    assert "other differs: 1 of 7 values; first: b[0] (rank 2 differs" in repr(pool.compare("other"))
    assert pool.compare("scheduler").equal
    refused = "'function' holds a value of type builtin_function_or_method, which cannot be compared; name a tensor"
    with pytest.raises(nbddp.BadInput, match=refused):
        pool.compare("function")


def test_every_dtype_shape_and_layout(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        one = rank == 1
        kinds = {
            "bfloat16": torch.tensor([1.0, 2 + one], dtype=torch.bfloat16),
            "half": torch.tensor([1.0, 2 + one], dtype=torch.float16),
            "float8": torch.tensor([1.0, 2 + one]).to(torch.float8_e4m3fn),
            "int8": torch.tensor([-100, -128 + 255 * one], dtype=torch.int8),
            "int64": torch.tensor([2**62, 2**53 + int(one)]),
            "uint8": torch.tensor([255 * int(one)], dtype=torch.uint8),
            "bool": torch.tensor([True, bool(one)]),
            "complex": torch.tensor([1 + 1j, 3j * one]),
            "scalar": torch.tensor(1.5 + one),
            "strided": (torch.arange(12.0).reshape(3, 4) + one * 2).t(),
            "sparse": torch.tensor([0.0, 1 + one]).to_sparse(),
            "numpy": np.array([1.0, 2.0 + one])[::-1],
            "nan here": torch.tensor([float("nan") if one else 1.0]),
            "nan on both": torch.tensor([float("nan"), 1.0 + one]),
            "minus zero": torch.tensor([-0.0 if one else 0.0]),
            "infinite": torch.tensor([float("inf"), 1.0 + one]),
        }
        same = {"nan": torch.tensor([float("nan"), 1.0]), "empty": torch.zeros(0, 3), "scalar": torch.tensor(True),
                "read only": np.broadcast_to(np.float32(1), (2, 2)), "conj": torch.tensor([1j]).conj(),
                "strided": torch.arange(6).reshape(2, 3).t()}
        tied = network(); tied.load_state_dict(model.module.state_dict()); tied.again = tied[0]
    """,
    )
    report = pool.compare("kinds")
    found = {d.path: d.largest for d in report.compared[0].differences()}
    assert math.isnan(found.pop("nan here"))  # type: ignore[arg-type]
    assert found == {
        "bfloat16": 1, "half": 1, "float8": 1, "int8": 255, "int64": 1, "uint8": 255, "bool": 1, "complex": 3,
        "scalar": 1, "nan on both": 1, "strided": 2, "sparse.values": 1, "numpy": 1, "minus zero": 0, "infinite": 1,
    }  # fmt: skip
    assert "NaN on one side" in repr(report)
    assert "only in bits" in repr(report)
    assert repr(pool.compare("same")) == "same: 6 tensors equal on 4 ranks (81 bytes each)"
    assert repr(pool.compare("tied")) == "tied: 4 parameters equal on 4 ranks (232 bytes each)"


def test_what_has_no_bytes_is_named_and_passed_over(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        odd = {"meta": torch.zeros(3, device="meta"), "lazy": torch.nn.LazyLinear(4), "plain": torch.ones(2),
               "objects": np.array([object(), None]),
               "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
               "function": print, "empty": [], "dtype": torch.float32, "none": {None, 2}}
        nothing = {}
    """,
    )
    words = repr(pool.compare("odd"))
    assert words.startswith(
        "odd: 1 tensor and 2 values equal on 4 ranks (8 bytes each); 6 objects not compared (Tensor of"
    )
    assert repr(pool.compare("nothing")) == "nothing: nothing to compare on 4 ranks: it is empty"


def test_what_is_differently_built_is_named(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        shape = torch.zeros(2 + (rank == 1), 3)
        dtype = torch.zeros(2, dtype=torch.float64 if rank == 3 else torch.float32)
        kind = 1.0 if rank == 0 else torch.tensor(1.0)
        keys = {"a": torch.ones(1)} | ({"more": 2} if rank > 1 else {})
        if rank != 2: some = 1
    """,
    )
    reports = {n: pool.compare(n) for n in ("shape", "dtype", "kind", "keys", "some")}
    assert not any(r.equal for r in reports.values())
    words = {n: repr(r) for n, r in reports.items()}
    assert words["shape"].startswith("shape differs: float32 [2, 3] on ranks 0, 2–3; float32 [3, 3] on rank 1\n")
    assert words["dtype"].startswith("dtype differs: float32 [2] on ranks 0–2; float64 [2] on rank 3\n")
    assert words["kind"].startswith("kind differs: a float on rank 0; a Tensor on ranks 1–3\nranks 1–3 agree")
    assert words["keys"].startswith("keys differs: 1 of 2 values; first: more (missing on ranks 0–1)\n")
    assert words["some"].startswith("some differs: there is no some on rank 2\nranks 0–1, 3 agree")
    with pytest.raises(nbddp.BadInput, match="'nowhere' is not defined on ranks 0–3; assign it in a %%ddp cell"):
        pool.compare("nowhere")


def test_only_some_ranks(pool: WorkerPool) -> None:
    cell(pool, "pair = torch.tensor([float(rank // 2)])")
    assert pool.compare("pair", ranks=[2, 3]).equal
    assert not pool.compare("pair", ranks=[1, 2]).equal
    assert repr(pool.compare("pair", ranks=[1])) == "pair: equal on 1 rank (float32 [1], 4 bytes each)"
    with pytest.raises(nbddp.BadInput, match="there are no ranks to compare"):
        pool.compare("pair", ranks=[])


def test_group_is_as_before_and_training_goes_on(pool: WorkerPool) -> None:
    sequence = "group = dist.group.WORLD; id(group), group._get_sequence_number_for_group(), dist.get_world_size()"
    cell(pool, "torch.manual_seed(rank)\ndrift = network()")
    before = cell(pool, sequence)
    assert not pool.compare("drift").equal
    assert pool.compare("model", "optimizer").equal
    assert cell(pool, sequence) == before
    cell(pool, "train(3)")
    assert pool.compare("model", "optimizer").equal


def test_sharded_tensors_are_compared_where_they_are_replicated(pool: WorkerPool) -> None:
    cell(
        pool,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        sharded, hybrid = network(), network()
        for net, mesh in ((sharded, init_device_mesh("cpu", (4,))),
                          (hybrid, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))):
            fully_shard(net, mesh=mesh)
        adam = torch.optim.Adam(sharded.parameters())
        for net in (sharded, hybrid):
            net(torch.ones(2, 4)).sum().backward()
        adam.step()
    """,
    )
    parts = "sharded: nothing to compare on 4 ranks: 4 parameters are sharded; each rank holds its own part"
    assert repr(pool.compare("sharded")) == parts
    assert pool.compare("adam").equal
    assert repr(pool.compare("hybrid")).startswith("hybrid: 4 parameters equal on 4 ranks (")
    cell(pool, "if rank == 3: hybrid[0].weight.to_local().data[0, 0] += 0.25")
    report = pool.compare("hybrid")
    (only,) = report.compared[0].differences()
    assert (only.path, only.classes) == ("0.weight", ((1,), (3,)))
    assert only.largest == pytest.approx(0.25)
    assert "(rank 3 differs from rank 1 by at most 2.5e-01; norms" in repr(report)


def test_long_reports_are_cut_and_large_tensors_travel_in_pieces(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(
        pool,
        """
        many = [torch.full((1000,), float(rank)) for _ in range(25)]
        many[24] = many[24] + torch.linspace(0, 1, 1000) * rank
    """,
    )
    monkeypatch.setattr(compare_command, "pieces", lambda wanted: pieces(wanted, piece=48))
    monkeypatch.setattr(
        compare_command, "within", lambda wanted: within(sorted(wanted, key=lambda w: -int(w.path[1:-1])), 5000)
    )
    report = pool.compare("many")
    assert [d.largest for d in report.compared[0].differences()] == [None] * 24 + [6.0]
    assert len(report.rows) == 20
    assert repr(report).endswith("\nand 5 more")
    assert "not measured" in repr(report)


def test_compare_in_a_notebook(four: Kernel) -> None:
    assert four.run(f"%%ddp\n{MODEL}").ok
    assert four.run("report = %ddp compare model --ranks 0-2\nassert report.equal\nreport").ok
    shown = four.run("%ddp compare model optimizer").displays[-1]
    assert shown["text/plain"].startswith("model: 4 parameters equal on 4 ranks (232 bytes each)\n")
    four.run("%%ddp\nif rank == 2: model.module[0].bias.data += 1e-3")
    shown = four.run("%ddp compare model").displays[-1]
    assert "model differs: 1 of 4 tensors; first: 0.bias (rank 2 differs" in shown["text/plain"]
    assert "<td" in shown["text/html"]
    assert "--ranks names rank 7" in four.run("%ddp compare model --ranks 7").evalue


def test_digest_is_of_dtype_and_shape_too() -> None:
    import torch

    zeros = [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2), torch.zeros(6, dtype=torch.int32)]
    found = [compare_on_rank.look({"x": z}, "x") for z in [*zeros, torch.zeros(3, 2).t()]]
    marks = [f.leaves[""].digest for f in found if f is not None]
    assert len(set(marks)) == 4
    assert marks[0] == marks[4]


# -- the pure parts ----------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 200), max_size=12)


@given(sizes, st.integers(1, 64), st.data())
def test_every_byte_travels_once_in_batches_of_one_reference(some: list[int], piece: int, data: st.DataObject) -> None:
    meetings = st.tuples(st.integers(0, 2), st.sampled_from([(3,), (3, 4)]))
    drawn = data.draw(st.lists(meetings, min_size=len(some), max_size=len(some)))
    wanted = [Wanted("x", str(i), *drawn[i], n) for i, n in enumerate(some)]
    seen: dict[str, int] = {}
    for batch in pieces(wanted, piece):
        assert len({(s.wanted.reference, s.wanted.others) for s in batch}) == 1
        assert 0 < sum(s.stop - s.start for s in batch) <= piece
        for s in batch:
            assert s.start == seen.get(s.wanted.path, 0)
            seen[s.wanted.path] = s.stop
    assert seen == {w.path: w.bytes for w in wanted}


@given(sizes, st.integers(0, 500))
def test_what_is_measured_fits_the_limit(some: list[int], limit: int) -> None:
    wanted = [Wanted("x", str(i), 0, (1,), n) for i, n in enumerate(some)]
    assert sum(w.bytes for w in within(wanted, limit)) <= limit
    assert within(wanted, sum(some)) == wanted


@given(st.dictionaries(st.integers(0, 7), st.lists(st.sampled_from("xy"), min_size=3, max_size=3), min_size=1))
def test_equal_is_that_all_digests_are(digests: dict[int, list[str]]) -> None:
    held = {
        r: HeldValue(
            "list", {f"[{i}]": Leaf(f"[{i}]", "tensor", "float32", (1,), d, norm=0.0) for i, d in enumerate(some)}
        )
        for r, some in digests.items()
    }
    c = Compared("x", held)
    assert c.equal == (len({tuple(d) for d in digests.values()}) == 1)
    assert c.describe().startswith("x: " if c.equal else "x differs: ")
    for ranks in c.classes():
        assert len({tuple(digests[r]) for r in ranks}) == 1
    assert len(c.classes()) == len({tuple(d) for d in digests.values()})
