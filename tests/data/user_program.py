"""A user's program: type checkers know what it gets. It is checked with the package, and not run. The
checker has to refuse what is marked as wrong (tests/unit/test_surface.py)."""

from typing import Any

from typing_extensions import assert_type

import nbddp
from nbddp import export, teach
from nbddp.teach import check


def train(rate: float, steps: int = 10) -> dict[str, float]:
    return {"loss": rate * steps}


def report(losses: nbddp.RankValues[dict[str, float]]) -> float:
    return losses[0]["loss"]


with nbddp.Pool(nproc=4, hosts="nodea,nodeb", simulate_gpus="4xT4", env={"OMP_NUM_THREADS": "1"}) as pool:
    losses = pool.run(train, 0.1, steps=3)
    assert_type(losses, nbddp.RankValues[dict[str, float]])
    assert_type(losses[0], dict[str, float])
    assert_type(losses[:2], list[dict[str, float]])
    assert_type(pool.call(len, ("abc",), ranks=[0], timeout=30.0)[0], int)
    assert_type(report(losses), float)
    assert_type(pool.running, bool)
    assert_type(pool.compare("model", ranks=[0, 1]).equal, bool)
    forecast = pool.forecast(inter_node="25GB/s", nodes=8, strong=True)
    text: str = str(forecast) + str(pool.timings(step=3)) + str(pool.topology()) + str(pool.status())
    rows: list[dict[str, float]] = pool.memory().to_dict()["ranks"]
    pool.bench(["all_reduce", "broadcast"], [1024], repeat=2).save("bench.png")
    assert_type(pool.prove("step", "model", batch=["x"]).proven, bool)
    assert_type(len(pool.findings(allow=["past-ddp"])), int)
    pool.trace().write("trace.json.gz")
    pool.collectives().save("program.png")
    step: int = pool.allocations(step=3).to_dict()["step"]
    held = [row["total_bytes"] for row in pool.sizes("model").to_dict()["sizes"]]
    checked = pool.checkup()
    problems: list[str] = [] if checked is None else checked.to_dict()["findings"]
    pool.run_script("train.py", "--epochs", "1", logs="logs", timeout=600.0)
    with check.on(pool):
        pass

# values
assert_type(losses.by_rank(), dict[int, dict[str, float]])
assert_type(losses.ranks, tuple[int, ...])
assert_type(losses.count({}) + losses.index({}, 1, 3), int)
mean = sum(each["loss"] for each in losses) / len(losses)
pool.push({"rate": 0.1}, ranks=[0])
assert_type(pool.pull(["rate", "step"]), dict[str, nbddp.RankValues[Any]])
lost = [value for value in pool.pull("model")["model"] if isinstance(value, nbddp.NotSent)]
assert_type(pool.run_cell("1 + 1", want_value=True, show=(), max_restarts=1), nbddp.RankValues[Any])

# the pool's life
assert_type(pool.start() + pool.restart(ranks=[1]) + pool.scale(2) + pool.sync() + pool.attach(7), list[str])
assert_type(pool.world_size, int)
pool.stop()

# export and teaching
launch = export.Launch("train.py", nnodes=2, rendezvous=export.STATIC)
others = [export.Launch(rendezvous=kind) for kind in (export.C10D, export.SRUN)]
assert_type(export.torchrun_line(launch, node=1), str)
assert_type(export.sbatch_script(launch, export.Job(time="02:00:00")) + export.script(["x = 1"]), str)
with teach.grade.ranks(nproc=2) as grader:
    assert_type(grader, teach.grade.Grader)
print(teach.predict, teach.explore)

panel = nbddp.Panel(pool)
assert_type(panel.pool, nbddp.Pool)
panel.close()
job = nbddp.Slurm(nodes=2, time="1:00:00")
nbddp.Pool(nnodes=(1, 4), slurm=job)

try:
    pool.run(train, 0.1)
except nbddp.WorkerFailed as failed:
    assert_type(failed.rank, int)
except (nbddp.RunHung, nbddp.RunTimedOut, nbddp.RunStopped) as ended:
    assert_type(ended.report, str)
    print([(state.rank, state.status, state.where, state.doing) for state in ended.states])
except nbddp.RunFailed as other:
    assert_type(other.attempts, tuple[str, ...])
except nbddp.CellSyntaxError as typo:
    assert_type(typo.line, int | None)
except (nbddp.SlurmRefused, nbddp.AgentFailed) as agent:
    print(agent)
except (nbddp.PoolNotRunning, nbddp.PoolError, nbddp.BadInput) as refused:
    print(refused)
except (nbddp.CommandStopped, nbddp.NbddpError):
    nbddp.load_ipython_extension(None)

pool.run(train, "fast")  # type: ignore[arg-type]  # wrong: rate is a float
pool.run(train, 0.1, step=3)  # type: ignore[call-arg]  # wrong: there is no step
pool.forecast(internode="25GB/s")  # type: ignore[call-arg]  # wrong: inter_node
nbddp.Pool(nprocs=4)  # type: ignore[call-arg]  # wrong: nproc
nbddp.Pool(device=3)  # type: ignore[arg-type]  # wrong: a str
losses.append({})  # type: ignore[attr-defined]  # wrong: nothing can be added
pool.ensure()  # type: ignore[attr-defined]  # wrong: not for users
nbddp.run(train)  # type: ignore[attr-defined]  # wrong: there is none
print(panel.session)  # type: ignore[attr-defined]  # wrong: not for users
pool.run_script("train.py", screen=None)  # type: ignore[call-arg]  # wrong: not for users
pool.pull(3)  # type: ignore[arg-type]  # wrong: names are texts
pool.restart(1)  # type: ignore[arg-type]  # wrong: several ranks
export.Launch(nodes=2)  # type: ignore[call-arg]  # wrong: nnodes
losses["0"]  # type: ignore[call-overload]  # wrong: a rank is a number
pool.checkup().to_dict()  # type: ignore[union-attr]  # wrong: there may be no hosts
