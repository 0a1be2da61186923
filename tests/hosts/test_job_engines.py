"""Texts of jobs as the engines themselves take them: their own validators, and runs on this machine where they can run
on one. Each test is skipped where its engine is not installed; `.ci/engines` installs them and runs all."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nbddp.capabilities.export import targets
from nbddp.capabilities.export.command import files_of
from nbddp.export import Job, Launch
from tests.contract.test_targets import FIELDS, FIXED, HARD, JOB, LAUNCHES, exported
from tests.unit.published import disagreements, schema_of

CRD = os.environ.get("NBDDP_PYTORCHJOB_CRD", "")
SAYS = """\
import json, os, pathlib, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
where = pathlib.Path(os.environ["OUT"], "rank" + os.environ["RANK"])
where.write_text(json.dumps([t.item(), dist.get_world_size(), data.tolist(), sys.argv[1:]]))
"""


def said(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*"))]


def expected(ranks: int, words: tuple[str, ...] = HARD) -> list[Any]:
    return [[float(ranks), ranks, [0, 1, 2], [*words]]] * ranks


# -- Kubeflow --------------------------------------------------------------------------------------


@functools.cache
def published() -> dict[str, Any]:
    return schema_of(Path(CRD), "v1")


needs_crd = pytest.mark.skipif(
    not CRD, reason="NBDDP_PYTORCHJOB_CRD does not name the published definition of PyTorchJob"
)


@needs_crd
@pytest.mark.parametrize("name", [*LAUNCHES])
def test_the_published_definition_accepts_a_pytorchjob(name: str) -> None:
    jsonschema.validate(yaml.safe_load(targets.pytorchjob(LAUNCHES[name], JOB)), published())
    jsonschema.validate(yaml.safe_load(targets.pytorchjob(LAUNCHES[name], Job(image="a/b:c"))), published())


def test_a_definition_is_read_strictly(tmp_path: Path) -> None:
    """Unknown fields are refused but where the definition keeps them; quantities are numbers or texts."""
    quantity = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    inner = {
        "kept": {"type": "object", "properties": {"a": {}}, "x-kubernetes-preserve-unknown-fields": True},
        "free": {"type": "object", "additionalProperties": {"type": "object", "properties": {"n": quantity}}},
        "some": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": inner}}
    crd = tmp_path / "crd.yaml"
    crd.write_text(yaml.safe_dump({"spec": {"versions": [{"name": "v1", "schema": schema}]}}))
    found = schema_of(crd, "v1")
    for good in ({"kept": {"b": 1}}, {"free": {"any": {"n": 1}, "other": {"n": "1Gi"}}}, {"some": [{"a": "x"}]}):
        jsonschema.validate(good, found)
    for bad in ({"other": 1}, {"free": {"any": {"m": 1}}}, {"free": {"any": {"n": 1.5}}}, {"some": [{"b": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, found)


def nested(found: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of an object."""
    if isinstance(found, dict):
        yield found
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from nested(inner)


@needs_crd
def test_the_published_definition_refuses_a_field_that_it_does_not_have_wherever_it_is() -> None:
    text, refused = targets.pytorchjob(LAUNCHES["elastic"], JOB), 0
    for i, _ in enumerate(nested(yaml.safe_load(text))):
        job = yaml.safe_load(text)
        place = [*nested(job)][i]
        place["nosuchfield"] = {}
        if place in (job["metadata"], job["spec"]["pytorchReplicaSpecs"]) or "cpu" in place:
            continue  # Kubernetes' own, a map of any names, and resources
        with pytest.raises(jsonschema.ValidationError, match="nosuchfield"):
            jsonschema.validate(job, published())
        refused += 1
    assert refused >= 8


@needs_crd
def test_the_table_of_fields_says_what_the_published_definition_says() -> None:
    table = FIELDS["pytorchjob"]
    assert disagreements(table, published(), table) == []
    wrong = {"properties": {"spec": {"type": "string"}, "specs": {}}}
    assert disagreements(wrong, published(), wrong) == [
        ".spec is of type object",
        ".spec: pytorchReplicaSpecs is required",
        ".specs is not there",
    ]


@pytest.mark.parametrize("name", [*FIXED])
def test_kubeflows_trainer_takes_the_function_and_its_command_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is what a pod of the cluster would run; here a shell runs it, with torchrun on CPU."""
    pytest.importorskip("kubeflow.trainer", reason="Kubeflow's SDK is not installed (pip install kubeflow)")
    from kubeflow.trainer.backends.kubernetes import utils
    from kubeflow.trainer.constants import constants
    from kubeflow.trainer.types import types

    launch, job = LAUNCHES[name], Job(name="my-job", cpus_per_proc=2, time="02:30:00")
    files, _ = files_of(exported(tmp_path, SAYS))
    text = targets.kubeflow(launch, job, files)
    (tmp_path / f"{name}_job.py").write_text(text.partition("client = ")[0])
    for path in (tmp_path / "train.py", tmp_path / files.values_name):
        path.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    made = types.RuntimeTrainer(types.TrainerType.CUSTOM_TRAINER, "torch", "image", launch.nnodes)
    made.set_command(constants.TORCH_COMMAND)
    kind = next(iter(types.RuntimeKind))
    trainer = utils.get_trainer_cr_from_custom_trainer(
        types.Runtime("torch-distributed", made, kind), importlib.import_module(f"{name}_job").trainer
    )
    assert trainer.num_nodes == launch.nnodes
    assert {v.name: v.value for v in trainer.env} == dict(launch.env)
    limits = trainer.resources_per_node.to_dict()["limits"]
    gpus = {"nvidia.com/gpu": 2.0} if name == "static" else {}
    assert {k: float(v) for k, v in limits.items()} == {"cpu": 4.0, **gpus}
    env = {**os.environ, "OUT": str(tmp_path), "PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    subprocess.run(trainer.command, cwd=tmp_path, env=env, check=True, timeout=120)
    assert said(tmp_path) == expected(2)


# -- SkyPilot, TorchX ------------------------------------------------------------------------------


def test_skypilot_accepts_its_tasks() -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed (pip install skypilot)")
    for launch in FIXED.values():
        task = sky.Task.from_yaml_config(yaml.safe_load(targets.sky(launch, JOB)))
        assert task.num_nodes == launch.nnodes
        [resources] = task.resources
        assert resources.accelerators == ({"A100": 2} if launch.gpus_per_proc else None)


def torchx(line: str, folder: Path) -> str:
    if shutil.which("torchx", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("TorchX is not installed (pip install torchx)")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OUT": str(folder)}
    return subprocess.run(line, shell=True, cwd=folder, env=env, check=True, timeout=120, text=True,
                          stdout=subprocess.PIPE).stdout  # fmt: skip


def test_torchx_runs_its_line(tmp_path: Path) -> None:
    exported(tmp_path, f"{SAYS}assert os.environ['A'] == 'x y'\n")
    env = (("A", "x y"), ("OUT", str(tmp_path)))
    line = targets.torchx(Launch("train.py", HARD, nproc=2, gpus_per_proc=0, env=env), Job(cpus_per_proc=1))
    torchx(line.replace("dist.ddp", "--wait dist.ddp"), tmp_path)
    assert said(tmp_path) == expected(2)


@pytest.mark.parametrize(("name", "nodes"), [("static", "2"), ("elastic", "1:4")])
def test_torchx_makes_a_batch_script_of_forms_that_cannot_run_here(name: str, nodes: str, tmp_path: Path) -> None:
    """Slurm's scheduler of TorchX, which only prints what it would submit."""
    launch = LAUNCHES[name]
    text = torchx(targets.torchx(launch, JOB).replace("-s local_cwd", "--dryrun -s slurm"), tmp_path)
    assert "--gpus-per-task=2" in text
    assert f"--nnodes {nodes} --nproc_per_node 2" in text


# -- Ray -------------------------------------------------------------------------------------------


def ray_runs(launch: Launch, job: Job, folder: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="Ray is not installed (pip install 'ray[train]')")
    files, _ = files_of(exported(folder, SAYS))
    (folder / "job.py").write_text(targets.ray(launch, job, files))
    (folder / files.values_name).rename(folder / "elsewhere.pkl")
    env = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
    subprocess.run([sys.executable, "job.py"], cwd=folder, env=env, check=True, timeout=400)


@pytest.mark.timeout(420)
def test_ray_trains_with_values_that_were_pushed(tmp_path: Path) -> None:
    env = (("OUT", str(tmp_path)),)
    ray_runs(Launch("train.py", HARD, nproc=2, gpus_per_proc=0, env=env), Job(cpus_per_proc=1), tmp_path)
    assert said(tmp_path) == expected(2)


@pytest.mark.timeout(420)
def test_ray_begins_with_the_workers_that_there_are_room_for(tmp_path: Path) -> None:
    """A worker that takes all cores of this machine: one of up to four can start."""
    env, cores = (("OUT", str(tmp_path)),), os.cpu_count() or 1
    launch = Launch("train.py", HARD, nnodes=4, min_nodes=1, nproc=1, gpus_per_proc=0, env=env)
    ray_runs(launch, Job(cpus_per_proc=cores), tmp_path)
    assert said(tmp_path) == expected(1)


@pytest.mark.parametrize("name", [*LAUNCHES])
def test_ray_accepts_what_a_trainer_is_made_of(name: str) -> None:
    """With GPUs too: the program is run up to the trainer, which checks its settings, and not started."""
    pytest.importorskip("ray.train.torch", reason="Ray is not installed (pip install 'ray[train]')")
    launch = LAUNCHES[name]
    text = targets.ray(launch, JOB).replace("trainer.fit()\n", "")
    names: dict[str, Any] = {}
    exec("\n".join(line for line in text.splitlines() if not line.startswith("ray.init(")), names)
    scaling = names["trainer"].scaling_config
    assert scaling.use_gpu is bool(launch.gpus_per_proc)
    assert scaling.num_workers == ((2, 8) if name == "elastic" else launch.nnodes * 2)
    assert scaling.num_gpus_per_worker == launch.gpus_per_proc
