"""Lesson 11: commands and scripts that a real shell and a real torchrun understand, and the checks of its exercises."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbddp.errors import BadInput
from nbddp.export import C10D, SRUN, STATIC, Job, Launch, sbatch_script, script, torchrun_line
from nbddp.lessons.l11_launching.exercise import hosts_of
from nbddp.lessons.l11_launching.simulation import GLOO, NCCL, plan_launch

words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8), max_size=4)


@settings(max_examples=60)
@given(arguments=words)
def test_a_shell_reads_every_word_as_it_was(arguments: list[str]) -> None:
    line = torchrun_line(Launch(script="it's mine.py", arguments=tuple(arguments)))
    assert shlex.split(line)[-len(arguments) - 1 :] == ["it's mine.py", *arguments]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"nnodes": 0}, "nnodes=0 is not possible; use 1 or more"),
        ({"nproc": 0}, "nproc=0 is not possible"),
        ({"rendezvous": "etcd"}, "not one of c10d, static, srun"),
        ({"port": 70000}, "not a port"),
        ({"host": "a b"}, "a host name without spaces"),
        ({"arguments": ("a\0b",)}, "NUL byte"),
        ({"nnodes": 2, "min_nodes": 3}, "use 1 to 2"),
        ({"nnodes": 2, "min_nodes": 1, "rendezvous": STATIC}, "only c10d"),
        ({"max_restarts": 1, "rendezvous": SRUN}, "only torchrun restarts workers; remove max_restarts"),
    ],
)
def test_an_impossible_launch_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Launch(**asked)


def test_no_line_for_a_node_that_is_not_there_and_none_without_torchrun() -> None:
    with pytest.raises(BadInput, match="nodes 0 to 1"):
        torchrun_line(Launch(nnodes=2), 2)
    with pytest.raises(BadInput, match="torchrun does not run"):
        torchrun_line(Launch(nnodes=2, rendezvous=SRUN))


def directives(text: str) -> dict[str, str]:
    """The #SBATCH options, read as sbatch reads them: up to the first line that is no comment, quotes taken off."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "), comments=True)
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value
    return found


def test_what_is_asked_of_slurm() -> None:
    job = Job(name="it's 1", partition="gpu", cpus_per_proc=3, memory_per_cpu="2G", output="my logs/%x-%j.out")
    torchrun = directives(sbatch_script(Launch(nnodes=2, nproc=4), job))
    assert torchrun == {
        "job-name": "it's 1", "partition": "gpu", "nodes": "2", "ntasks-per-node": "1", "gres": "gpu:4",
        "cpus-per-task": "12", "mem-per-cpu": "2G", "time": "01:00:00", "output": "my logs/%x-%j.out",
    }  # fmt: skip
    alone = directives(sbatch_script(Launch(nnodes=2, nproc=4, rendezvous=SRUN), job))
    assert (alone["ntasks-per-node"], alone["cpus-per-task"]) == ("4", "3")
    assert directives(sbatch_script(Launch(nproc=2, gpus_per_proc=2)))["gres"] == "gpu:4"
    assert "gres" not in directives(sbatch_script(Launch(nnodes=2, gpus_per_proc=0)))
    assert "\nsource env/bin/activate\n" in sbatch_script(Launch(), Job(setup=("source env/bin/activate",)))


@pytest.mark.parametrize("name", ["name", "partition", "memory_per_cpu", "time", "output"])
def test_no_value_can_end_its_directive_and_begin_another(name: str) -> None:
    for value in ("two\nlines", "1\n#SBATCH --uid=0"):
        with pytest.raises(BadInput, match="ends at a line break"):
            sbatch_script(Launch(), Job(**{name: value}))


def test_what_slurm_would_not_do_is_refused() -> None:
    with pytest.raises(BadInput, match="remove min_nodes=1"):
        sbatch_script(Launch(nnodes=2, min_nodes=1))
    with pytest.raises(BadInput, match="cpus_per_proc=0 is not possible"):
        Job(cpus_per_proc=0)


def test_a_script_without_groups_leaves_none() -> None:
    assert script(["%%ddp\nprint(1)"]).endswith("# cell 1: %%ddp\nprint(1)\n")


# -- the explorer ----------------------------------------------------------------------------


def test_lines_are_told_once_for_all_nodes_that_they_are_for() -> None:
    assert [nodes for nodes, _ in plan_launch(3, 2, NCCL, C10D).lines()] == [(0, 1, 2)]
    assert [nodes for nodes, _ in plan_launch(3, 2, NCCL, STATIC).lines()] == [(0,), (1,), (2,)]
    assert [line for _, line in plan_launch(2, 4, NCCL, SRUN).lines()] == [
        "SLURM_NODEID=0  SLURM_PROCID=0…3  SLURM_LOCALID=0…3  SLURM_NTASKS=8",
        "SLURM_NODEID=1  SLURM_PROCID=4…7  SLURM_LOCALID=0…3  SLURM_NTASKS=8",
    ]
    assert "--standalone" in plan_launch(1, 2, NCCL, STATIC).lines()[0][1]


@given(st.integers(1, 4), st.integers(1, 8), st.sampled_from((NCCL, GLOO)), st.sampled_from((C10D, STATIC, SRUN)))
def test_layout_and_commands_agree(nodes: int, processes: int, backend: str, rendezvous: str) -> None:
    made = plan_launch(nodes, processes, backend, rendezvous)
    assert made.placed.world_size == nodes * processes
    asked = directives(made.sbatch())
    assert asked["nodes"] == str(nodes)
    assert asked.get("gres") == (f"gpu:{processes}" if backend == NCCL else None)
    assert any(f'"{backend}"' in line for line in made.program())
    assert sum(len(on) for on, _ in made.lines()) == nodes


def test_the_backend_changes_the_batch_script_and_the_program_but_not_the_torchrun_lines() -> None:
    for rendezvous in (C10D, STATIC):
        gpus, cpus = (plan_launch(2, 4, backend, rendezvous) for backend in (NCCL, GLOO))
        assert gpus.lines() == cpus.lines()
        assert gpus.sbatch() != cpus.sbatch()
        assert gpus.program() != cpus.program()


# -- the exercises ---------------------------------------------------------------------------


def test_hosts_are_spelled_out() -> None:
    assert hosts_of("gpu[01-03,07],login") == ["gpu01", "gpu02", "gpu03", "gpu07", "login"]
    assert hosts_of("a7,b[09-10]-ib,c") == ["a7", "b09-ib", "b10-ib", "c"]
    assert hosts_of("n[098-101]") == ["n098", "n099", "n100", "n101"]
