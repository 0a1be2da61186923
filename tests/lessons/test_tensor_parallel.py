"""Lesson 16: meshes and their groups against DeviceMesh's own, and the checks of its exercises on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.errors import BadInput
from nbddp.lessons.l16_tensor_parallel.figure import draw_mesh
from nbddp.lessons.l16_tensor_parallel.groups import right_groups
from nbddp.lessons.l16_tensor_parallel.layers import judge_layers
from nbddp.lessons.l16_tensor_parallel.on_rank import Computed, Expected
from nbddp.lessons.l16_tensor_parallel.simulation import BETWEEN, DATA, NONE, TENSOR, WITHIN, build_mesh
from nbddp.pool.pool import WorkerPool

NPROC = 4

# -- the mesh --------------------------------------------------------------------------------

meshes = {
    "nodes": st.sampled_from((1, 2, 4)), "gpus": st.sampled_from((2, 4, 8)), "tensor": st.sampled_from((1, 2)),
    "inner": st.sampled_from((TENSOR, DATA)),
}  # fmt: skip


@given(**meshes)
def test_two_groups_of_a_mesh_share_exactly_one_rank(**chosen: object) -> None:
    made = build_mesh(**chosen)  # type: ignore[arg-type]
    for side in (TENSOR, DATA):
        assert sorted(r for g in made.groups(side) for r in g) == list(range(made.ranks))
    for rank in range(made.ranks):
        same_samples, same_shard = made.group(rank, TENSOR), made.group(rank, DATA)
        assert set(same_samples) & set(same_shard) == {rank}
        assert (len(same_samples), len(same_shard)) == (made.tensor, made.data)
        if made.inner == TENSOR:
            assert [same_samples, same_shard] == right_groups(rank, made.data, made.tensor)


def test_tensor_ranks_side_by_side_stay_within_a_node() -> None:
    assert [build_mesh(2, 4, 4).link(side) for side in (TENSOR, DATA)] == [WITHIN, BETWEEN]
    assert [build_mesh(2, 4, 4, DATA).link(side) for side in (TENSOR, DATA)] == [BETWEEN, WITHIN]
    assert build_mesh(2, 2, 4).link(TENSOR) == BETWEEN
    assert [build_mesh(1, 4, 1).link(side) for side in (TENSOR, DATA)] == [NONE, WITHIN]
    assert "activations stay on the fast links" in build_mesh(2, 2, 2).describe()
    assert "activations wait for the slow links" in build_mesh(2, 2, 2, DATA).describe()


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="2 ranks cannot be divided into groups of 8"):
        build_mesh(1, 2, 8)


def test_the_groups_are_those_of_a_device_mesh(pool: WorkerPool) -> None:
    def groups() -> list[list[int]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group()
        made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        return [dist.get_process_group_ranks(made[side].get_group()) for side in ("tensor", "data")]

    found = pool.call(groups)
    assert [found[r] for r in range(4)] == [right_groups(r, 2, 2) for r in range(4)]


def test_every_rank_is_drawn_once_inside_its_node() -> None:
    for gpus, tensor in ((2, 2), (8, 8)):
        made = build_mesh(4, gpus, tensor)
        shown = draw_mesh(made)
        (axes,) = shown.figure.axes
        texts = [t.get_text() for t in axes.texts]
        assert [t for t in texts if t.startswith("rank ")] == [f"rank {r}" for r in range(made.ranks)]
        assert max(p.get_x() + p.get_width() for p in axes.patches) <= 6.4
        assert shown.words == made.describe()


# -- the layers' check ---------------------------------------------------------------------------


def test_one_ranks_wrong_gradient_is_named_where_another_has_none() -> None:
    right: Expected = {"output": [[1.0]], "x": [[2.0]], "up": [[3.0]] * 12, "down": [[4.0] * 12]}
    wrong: Computed = {"output": [[1.0]], "shape": [1, 1], "graph": True, "x": [[7.0]], "up": [[3.0]] * 6,
                       "down": [[4.0] * 6]}  # fmt: skip
    line = judge_layers(right, {0: wrong, 1: {**wrong, "x": None}})
    assert line.startswith("the outputs are right; rank 0: in the gradient of x[0][0], expected 2.000, got 7.000")
