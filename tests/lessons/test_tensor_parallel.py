"""Lesson 16: meshes and their groups against DeviceMesh's own, and the checks of its exercises on real ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.errors import BadInput
from nbddp.lessons.l16_tensor_parallel.figure import draw_mesh
from nbddp.lessons.l16_tensor_parallel.groups import right_groups
from nbddp.lessons.l16_tensor_parallel.simulation import BETWEEN, DATA, NONE, TENSOR, WITHIN, build_mesh
from nbddp.teach import check
from tests.lessons.answers import Mutant, defined, exercise, solution

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
    assert "activations stay on the fast links" in build_mesh(2, 2, 2).words()
    assert "activations wait for the slow links" in build_mesh(2, 2, 2, DATA).words()


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="2 ranks cannot be divided into groups of 8"):
        build_mesh(1, 2, 8)


def test_the_groups_are_those_of_a_device_mesh(pool: nbddp.Pool) -> None:
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
        assert all(t.get_fontsize() >= 6.5 for t in axes.texts)
        assert shown.words == made.words()


# -- column_then_row -------------------------------------------------------------------------

LAYERS = """
def column_then_row(x, up, down):
    import torch
    import torch.distributed as dist
    def summed(t):
        t = t.clone()
        dist.all_reduce(t)
        return t
    def function(forward, backward):
        class Made(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return summed(t) if forward else t.view_as(t)
            @staticmethod
            def backward(ctx, g):
                return summed(g) if backward else g
        return Made.apply
    F, G = function(False, True), function(True, False)
"""


def body(text: str) -> str:
    return LAYERS + "\n".join("    " + line for line in text.strip("\n").splitlines())


WRONG_LAYERS = [
    Mutant("own part", body("return torch.relu(F(x) @ up.T) @ down.T"), "each rank has its own part of a sum"),
    Mutant("mean", body("return G(torch.relu(F(x) @ up.T) @ down.T) / dist.get_world_size()"),
           "that is the sum divided by the world size"),
    Mutant("twice", body("return G(G(torch.relu(F(x) @ up.T) @ down.T))"), "the world size × the sum"),
    Mutant("no f", body("return G(torch.relu(x @ up.T) @ down.T)"),
           "gradient of x[0][0]: expected"),
    Mutant("no f, why", body("return G(torch.relu(x @ up.T) @ down.T)"), "so all-reduce its gradient in backward"),
    Mutant("g both ways", body("G = function(True, True)\nreturn G(torch.relu(F(x) @ up.T) @ down.T)"),
           "the backward of your sum all-reduces again"),
    Mutant("torch's own", body("from torch.distributed.nn.functional import all_reduce\n"
                               "return all_reduce(torch.relu(F(x) @ up.T) @ down.T)"),
           "4 ranks: the outputs are right; rank 0: gradient of down[0][0]: expected"),
    Mutant("by four", body("return G(torch.relu(F(x) @ up.T) @ down.T) * 4 / dist.get_world_size()"),
           "3 ranks: rank 0"),
    Mutant("f and g swapped", body("return F(torch.relu(G(x) @ up.T) @ down.T)"), "compare relu(x @ up.T) @ down.T"),
    Mutant("no relu", body("return G(F(x) @ up.T @ down.T)"), "compare relu(x @ up.T) @ down.T on this rank's parts"),
    Mutant("relu after", body("return torch.relu(G(F(x) @ up.T @ down.T))"), "compare relu"),
    Mutant("detached", body("return G((torch.relu(F(x) @ up.T) @ down.T).detach())"), "has no graph"),
    Mutant("x detached", body("return G(torch.relu(x.detach() @ up.T) @ down.T)"), "x has no gradient"),
    Mutant("hidden", body("return torch.relu(F(x) @ up.T)"), "return an output of shape (3, 4)"),
    Mutant("one rank alone", body("y = torch.relu(F(x) @ up.T) @ down.T\nreturn y if dist.get_rank() else G(y)"),
           "deadlock: "),
    Mutant("dies", body("import os\nif dist.get_rank() == 1: os._exit(3)"), "rank 1"),
    Mutant("unwritten", body("..."), "still to be written"),
]  # fmt: skip
RIGHT_LAYERS = [
    body("return G(torch.relu(F(x) @ up.T) @ down.T)"),
    body("x = x * 1\nx.register_hook(summed)\ny = torch.relu(x @ up.T) @ down.T\ndist.all_reduce(y)\nreturn y"),
]


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("mutant", WRONG_LAYERS, ids=str)
def test_wrong_layers_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.column_then_row)


def test_right_layers_pass(pool: nbddp.Pool) -> None:
    assert check.column_then_row(solution("16", "column_then_row"))
    for source in RIGHT_LAYERS:
        assert check.column_then_row(defined(source, "column_then_row")), source
    assert "still to be written" in check.column_then_row(exercise("16", "column_then_row")).line


# -- groups_of -------------------------------------------------------------------------------

GROUPS = "def groups_of(rank, data, tensor):\n    r, d, t = rank, data, tensor\n    row, column = r // t, r % t\n"
GROUPS += "    return "
ROW, COLUMN = "list(range(row * t, row * t + t))", "list(range(column, d * t, t))"
WRONG_GROUPS = [
    Mutant("swapped", GROUPS + f"{COLUMN}, {ROW}", "the two lists are swapped"),
    Mutant("data inside", GROUPS + "list(range(r % d, d * t, d)), list(range(r // d * d, r // d * d + d))",
           "that mesh has data ranks side by side; here"),
    Mutant("without itself", GROUPS + f"[k for k in {ROW} if k != r], [k for k in {COLUMN} if k != r]",
           "a rank is a member of both of its groups"),
    Mutant("coordinates", GROUPS + "row, column", "those are coordinates"),
    Mutant("rank 0's", GROUPS + "list(range(t)), list(range(0, d * t, t))", "those are the groups of rank 0"),
    Mutant("one list", GROUPS + ROW, "return a pair of lists of ranks"),
    Mutant("descending", GROUPS + f"{ROW}[::-1], {COLUMN}", "in ascending order"),
    Mutant("two by two", GROUPS + f"{ROW}, list(range(column, 4, 2))", "look at the list of the same shard"),
    Mutant("unwritten", GROUPS + "None", "still to be written"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", WRONG_GROUPS, ids=str)
def test_wrong_groups_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.groups_of)


def test_right_groups_pass(pool: nbddp.Pool) -> None:
    assert check.groups_of(solution("16", "groups_of"))
    same = GROUPS + "[k for k in range(d * t) if k // t == row], [k for k in range(d * t) if k % t == column]"
    assert check.groups_of(defined(same, "groups_of"))
    assert "still to be written" in check.groups_of(exercise("16", "groups_of")).line
