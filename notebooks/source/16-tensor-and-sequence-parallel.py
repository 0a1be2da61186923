# %% [markdown]
# # Tensor and sequence parallel
#
# FSDP gathers a layer's weights before it computes. **Tensor parallelism** never gathers them: each rank multiplies by its own part of the weight, and
# the ranks exchange activations.
#
# **After this lesson you can**
#
# - split two linear layers over ranks, with right outputs and right gradients;
# - shard the activations between such layers as well;
# - do both with `parallelize_module`;
# - combine data and tensor parallelism on a mesh, placed so that activations stay within a node.

# %%
# %load_ext nbddp

# %% [markdown]
# ## Columns, then rows
#
# A linear layer computes *y* = *x Wᵀ*. Two layers with a ReLU between them are the feed-forward half of a transformer's layer. Each rank
# keeps some **output** features of the first weight, `up`, and the matching **input** features of the second, `down`. Megatron-LM, which
# made this method popular, writes *y* = *x A*. There they are the columns of *A* and the rows of *B*: hence **column-parallel** and
# **row-parallel**.
#
# Nothing is exchanged between the two layers, because ReLU works on each hidden value separately.

# %% tags=["prediction", "hidden"]
from nbddp.teach import predict

predict.sum_or_side_by_side()

# %%
# %%ddp --nproc 4
import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn

warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of some collectives
dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights and samples on all ranks
x, up, down = torch.randn(8, 16), torch.randn(32, 16), torch.randn(16, 32)
whole = torch.relu(x @ up.T) @ down.T

my_up, my_down = up.chunk(world_size)[rank], down.chunk(world_size, 1)[rank]
hidden = torch.relu(x @ my_up.T)
part = hidden @ my_down.T
total = part.clone()
dist.all_reduce(total)
print("my hidden values", tuple(hidden.shape), "· my part of the output", tuple(part.shape), end=" · ")
print("added up they are the output:", torch.allclose(total, whole, atol=1e-3))

# %% [markdown]
# ## And backward?
#
# Here every rank computes the same loss from the whole output, and runs backward through its own parts. Take care with the sum: autograd does not see
# `all_reduce`. The gradient of a sum with respect to each part is the gradient of the sum, unchanged.

# %% tags=["prediction", "hidden"]
predict.whose_gradient()


# %%
# %%ddp
class AddUp(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: the gradient, unchanged."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


alone = [t.clone().requires_grad_() for t in (x, up, down)]
(torch.relu(alone[0] @ alone[1].T) @ alone[2].T).square().mean().backward()
right = alone[0].grad, alone[1].grad.chunk(world_size)[rank], alone[2].grad.chunk(world_size, 1)[rank]

mine = [t.clone().requires_grad_() for t in (x, my_up, my_down)]
AddUp.apply(torch.relu(mine[0] @ mine[1].T) @ mine[2].T).square().mean().backward()
same = [torch.allclose(t.grad, r, atol=1e-3) for t, r in zip(mine, right, strict=True)]
print(f"right without any exchange in backward: up {same[1]}, down {same[2]}, x {same[0]}")

# %% [markdown]
# `AddUp` is Megatron-LM's **g**: all-reduce in forward, nothing in backward. Its **conjugate f** is still missing: nothing in forward, all-reduce in
# backward. It belongs where *x* enters the column-parallel layer. So a pair of layers costs one all-reduce in each direction.
#
# ### Exercise: column, then row
#
# Write both layers, with a ReLU between them, so that the gradients of `x`, `up` and `down` are right. The check runs your function on all ranks and on
# one rank fewer, and compares with one process that has the whole weights.


# %% tags=["exercise"]
def column_then_row(x, up, down):
    """x: (samples, features), the same on all ranks; up: this rank's rows of the first weight, (hidden / ranks, features);
    down: its columns of the second, (features, hidden / ranks). Returns the whole output on every rank."""
    import torch
    import torch.distributed as dist

    ...  # your code


# %%
from nbddp.teach import check, explore

check.column_then_row(column_then_row)

# %% [markdown]
# Stuck? `check.column_then_row(column_then_row, hint=True)` gives a hint, and another one each time it is run.


# %% tags=["solution"]
def column_then_row(x, up, down):
    """x: (samples, features), the same on all ranks; up: this rank's rows of the first weight, (hidden / ranks, features);
    down: its columns of the second, (features, hidden / ranks). Returns the whole output on every rank."""
    import torch
    import torch.distributed as dist

    def summed(t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.view_as(t)

        @staticmethod
        def backward(ctx, gradient):
            return summed(gradient)

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return summed(t)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return G.apply(torch.relu(F.apply(x) @ up.T) @ down.T)


# %% [markdown]
# ## Sequence parallel
#
# Between two such pairs come layer norm and dropout. After the all-reduce, every rank computes them on all tokens: every rank does the same
# work and keeps the same activations in memory. **Sequence parallelism** shards the tokens there. The all-reduce is split into its two
# halves. A reduce-scatter along the tokens ends a row-parallel layer, and an all-gather begins the next column-parallel one. That moves as
# many bytes as the all-reduce, and on four ranks layer norm keeps a quarter of the tokens.

# %%
# %%ddp
norm = nn.LayerNorm(16)
tokens = torch.empty(len(part) // world_size, 16)  # my tokens, summed
dist.reduce_scatter_tensor(tokens, part.contiguous())
normed = norm(tokens).detach()
gathered = torch.empty(len(part), 16)
dist.all_gather_into_tensor(gathered, normed)
print("layer norm sees", len(tokens), "of", len(part), "tokens", end=" · ")
print("as with the all-reduce:", torch.allclose(gathered, norm(total), atol=1e-3))

# %% [markdown]
# ## The same in PyTorch
#
# `parallelize_module` takes a plan, a style for each layer: `ColwiseParallel`, `RowwiseParallel`, and `SequenceParallel` for the layers between. It
# turns weights into DTensors and inserts the collectives. `Shard(1)` means: split along dimension 1, the tokens.

# %%
# %%ddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    """x + down(relu(up(norm(x)))): the feed-forward half of a transformer's layer."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),  # gathers the tokens
    "down": RowwiseParallel(output_layouts=Shard(1)),  # reduce-scatters them
}
torch.manual_seed(1)
alone, sequences = Block(), torch.randn(4, 8, 16)  # sequences of 8 tokens
split = copy.deepcopy(alone)
tensor_ranks = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
parallelize_module(split, tensor_ranks, PLAN)
mine = split(sequences.chunk(world_size, 1)[rank])
right = alone(sequences).chunk(world_size, 1)[rank]
print("up", tuple(split.up.weight.to_local().shape), "· down", tuple(split.down.weight.to_local().shape), end=" · ")
print("my tokens", tuple(mine.shape), "· as in one process:", torch.allclose(mine, right, atol=1e-5))

# %% [markdown]
# ## On a mesh
#
# Activations are exchanged in every layer, so tensor parallelism pays off only over fast links, within a node. Across nodes, data parallelism exchanges
# gradients once per step. The ranks form a **mesh** with one dimension for each kind of parallelism. A **tensor group** sees the same samples and holds
# different shards; a **data group** holds the same shard and sees different samples.

# %% tags=["prediction", "hidden"]
predict.same_samples()

# %% [markdown]
# The explorer opens without tensor parallelism. Set 2 tensor ranks on 2 nodes of 2 GPUs for the 2 × 2 mesh. Then place data ranks side by side, and
# compare the links.

# %% tags=["nbval-ignore-output"]
explore.mesh()

# %% [markdown]
# ### Exercise: the groups of a rank
#
# Tensor ranks are side by side: rank = data index × `tensor` + tensor index.


# %% tags=["exercise"]
def groups_of(rank, data, tensor):
    """On a mesh of data × tensor ranks: two ascending lists, both with the rank itself. First the ranks that see the same
    samples, then the ranks that hold the same shard."""
    ...  # your code


# %%
check.groups_of(groups_of)


# %% tags=["solution"]
def groups_of(rank, data, tensor):
    """On a mesh of data × tensor ranks: two ascending lists, both with the rank itself. First the ranks that see the same
    samples, then the ranks that hold the same shard."""
    first = rank // tensor * tensor
    return list(range(first, first + tensor)), list(range(rank % tensor, data * tensor, tensor))


# %% [markdown]
# ## FSDP over one dimension, tensor parallel over the other
#
# `mesh["tensor"]` is the tensor group of this rank, `mesh["data"]` its data group. First the weights are split over the tensor group. Then each part is
# sharded over the data group.

# %% tags=["prediction", "hidden"]
predict.kept_of_up()


# %%
# %%ddp
def losses(net, inputs, steps=5):
    """Train, and return the loss of every step."""
    optimizer, found = torch.optim.Adam(net.parameters(), lr=0.01), []
    for _ in range(steps):
        loss = net(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
data, tensor = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
both = copy.deepcopy(alone)
parallelize_module(both, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
halves = tuple(both.up.weight.to_local().shape), tuple(both.down.weight.to_local().shape)
fully_shard(both, mesh=mesh["data"])

mine = slice(2 * data, 2 * data + 2)
found = losses(both, sequences[mine])
dist.all_reduce(found, dist.ReduceOp.AVG)
right = losses(copy.deepcopy(alone), sequences)
print(f"data {data}, tensor {tensor}: sequences {mine.start}–{mine.stop - 1}", end=" · ")
print("up, down cut to", *halves, "· of up kept", tuple(both.up.weight.to_local().shape))
if rank == 0:
    print("trained as in one process:", torch.allclose(found, right, atol=1e-5))

# %% [markdown]
# Ranks 0 and 1 see the same sequences, and hold different halves of `up`. Ranks 0 and 2 share the same half of `up` and see different
# sequences. Each keeps half of it, because FSDP shards over the data group. A real cluster usually has as many tensor ranks as a node has
# GPUs, and as many data ranks as nodes.
#
# ## To remember
#
# - Split the first layer by columns and the second by rows. This needs one all-reduce in forward, after the second layer, and one in
#   backward, for the first layer's input.
# - f and g are conjugates: in the direction in which one does nothing, the other all-reduces.
# - Sequence parallelism splits that all-reduce into a reduce-scatter and an all-gather. The bytes are the same, and activations between the two are
#   sharded.
# - On a mesh a tensor group sees the same samples, and a data group holds the same shard. Keep tensor groups within a node.
#
# **On real GPUs:** write `init_device_mesh("cuda", ...)`, and move the tensors. `%ddp topology` shows which GPUs are linked by NVLink: tensor groups
# belong there. `%%ddp --trace` shows the all-reduces between layers.
#
# ## Glossary
#
# - **column-parallel**: a linear layer split so that each rank computes some output features.
# - **conjugate pair**: two operations; each does in backward what the other does in forward.
# - **data group**: ranks that hold the same shard and see different samples.
# - **device mesh**: ranks arranged in rows and columns, with a process group for each row and column.
# - **row-parallel**: a linear layer split so that each rank multiplies some input features; the products are added up.
# - **sequence parallel**: tokens are sharded where layers work on each token alone.
# - **tensor group**: ranks that see the same samples and hold different shards.
#
# ## Further reading
#
# - M. Shoeybi and others: [Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism](https://arxiv.org/abs/1909.08053), 2019.
# - V. Korthikanti and others: [Reducing Activation Recomputation in Large Transformer Models](https://arxiv.org/abs/2205.05198), 2022: sequence parallelism.
# - PyTorch: [torch.distributed.tensor.parallel](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html) and
#   [DeviceMesh](https://docs.pytorch.org/docs/stable/distributed.html#devicemesh).

# %%
# %ddp stop
