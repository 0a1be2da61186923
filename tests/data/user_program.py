"""A user's program: type checkers know what it gets. It is checked with the package, and not run. The
checker has to refuse what is marked as wrong (tests/unit/test_surface.py)."""

from typing_extensions import assert_type

import nbddp
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

panel = nbddp.Panel(pool)
assert_type(panel.pool, nbddp.Pool)
job = nbddp.Slurm(nodes=2, time="1:00:00")
nbddp.Pool(nnodes=(1, 4), slurm=job)

try:
    pool.run(train, 0.1)
except nbddp.WorkerFailed as failed:
    assert_type(failed.rank, int)
except (nbddp.PoolNotRunning, nbddp.AgentFailed, nbddp.BadInput) as refused:
    print(refused)

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
pool.checkup().to_dict()  # type: ignore[union-attr]  # wrong: there may be no hosts
