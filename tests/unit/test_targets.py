"""One job as text for seven engines: what each would read is what was asked, for values with every sort of quote.

The texts are read back by what reads them: a shell, a YAML parser with the fields of each kind (`tests/data`), Python.
What the engines themselves say of them is in `test_job_engines.py`.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbddp.capabilities.export import targets
from nbddp.capabilities.export.command import code_of, write
from nbddp.capabilities.export.program import ExportedCell
from nbddp.capabilities.export.targets import LONGEST_COMMAND, LONGEST_FUNCTION, NONE, TARGETS, Files, seconds
from nbddp.capabilities.terminal import main as terminal
from nbddp.errors import BadInput
from nbddp.export import SRUN, STATIC, Job, Launch

HARD = ("--lr", "$HOME 'it\" #", "a\\b", "", "ü: - {x}")
ENV = (("A", "x 'y\" $z: #"), ("y", "no"), ("EMPTY", ""))
SCRIPT = "it's train.py"
LAUNCHES = {
    "one": Launch(SCRIPT, HARD, nproc=2, gpus_per_proc=0, env=ENV),
    "two": Launch(SCRIPT, HARD, nnodes=2, nproc=2, gpus_per_proc=0, env=ENV),
    "static": Launch(SCRIPT, HARD, nnodes=2, nproc=2, gpus_per_proc=1, rendezvous=STATIC, env=ENV),
    "elastic": Launch(SCRIPT, HARD, nnodes=4, min_nodes=1, nproc=2, max_restarts=3, env=ENV),
}
FIXED = {name: launch for name, launch in LAUNCHES.items() if launch.min_nodes is None}
JOB = Job(name="my-job", cpus_per_proc=2, time="02:30:00", setup=("true 'it'",), packages=("einops>=0.7",), gpu="A100")


@pytest.mark.parametrize("name", [*FIXED])
def test_kubeflows_function_stands_alone_and_runs_the_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, out = LAUNCHES[name], tmp_path / "said.json"
    source = f"import json, sys\nwith open({str(out)!r}, 'w') as f: json.dump([__name__, sys.argv[1:]], f)\n"
    text = targets.kubeflow(launch, JOB, Files(source))
    tree = ast.parse(text)
    [train] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    monkeypatch.setattr(sys, "argv", ["x"])
    names: dict[str, Any] = {}
    exec(compile(ast.Module([train], []), "train", "exec"), names)  # its text alone goes to the cluster
    names["train"]()
    assert json.loads(out.read_text()) == ["__main__", [*HARD]]
    [call] = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "CustomTrainer"]
    said = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg != "func"}
    limits = {"cpu": 4, **({"nvidia.com/gpu": 2} if launch.gpus_per_proc else {})}
    assert said == {"num_nodes": launch.nnodes, "resources_per_node": limits, "packages_to_install": ["einops>=0.7"],
                    "env": dict(ENV)}  # fmt: skip


def exported(folder: Path, more: str) -> Path:
    """A script with a pushed array `data`, as `%ddp export` writes it."""
    code, saved = code_of({"data": np.arange(3)}, "In[1]", "train-values.pkl")
    script = folder / "train.py"
    write(script, [ExportedCell("In[1]", None, code), ExportedCell("In[2]", "", more)], saved, "torchrun", False)
    return script


@pytest.mark.parametrize(("target", "most"), [("kubeflow", LONGEST_COMMAND), ("ray", LONGEST_FUNCTION)])
def test_values_that_are_too_large_to_go_along_are_refused(target: str, most: int) -> None:
    with pytest.raises(BadInput, match=rf"which can have {most // 1000} kB, .* read them from storage that the nodes"):
        TARGETS[target](Launch(), Job(), Files("1", "v.pkl", b"1" * most))


def test_what_a_script_reads_and_nothing_carries_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exported(tmp_path, "print(data)").rename("go.py")
    said = {}
    for target in TARGETS:
        assert terminal.main(["export", "go.py", "--to", target, "--gpus-per-proc", "0"]) == 0
        said[target] = capsys.readouterr().out
    needs = "its image needs go.py and train-values.pkl in the working directory"
    assert {target for target, text in said.items() if needs in text} == {"pytorchjob"}
    assert 'workdir: "."' in said["sky"]
    Path("train-values.pkl").unlink()
    assert terminal.main(["export", "go.py", "--to", "ray"]) == 0
    assert "go.py reads train-values.pkl, which is missing; %ddp export go.py --force" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*LAUNCHES])
def test_rays_program_asks_for_what_was_meant(name: str) -> None:
    launch = LAUNCHES[name]
    tree = ast.parse(targets.ray(launch, JOB))
    calls = {getattr(n.func, "id", getattr(n.func, "attr", "")): n for n in ast.walk(tree) if isinstance(n, ast.Call)}

    def said(function: str) -> dict[str, Any]:
        return {
            str(k.arg): ast.literal_eval(k.value) for k in calls[function].keywords if not isinstance(k.value, ast.Call)
        }

    workers = (2, 8) if name == "elastic" else launch.nnodes * 2
    each = {"CPU": 2, **({"GPU": 1} if launch.gpus_per_proc else {})}
    kind = {"accelerator_type": "A100"} if launch.gpus_per_proc else {}
    assert said("ScalingConfig") == {
        "num_workers": workers, "use_gpu": bool(launch.gpus_per_proc), "resources_per_worker": each, **kind
    }  # fmt: skip
    assert said("TorchConfig") == {"backend": launch.backend}
    assert said("init") == {"runtime_env": {"env_vars": dict(ENV), "pip": ["einops>=0.7"], "working_dir": "."}}
    assert ("FailureConfig" in calls) == (name == "elastic")
    [argv] = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "sys.argv"]
    assert isinstance(argv, ast.List)
    assert [ast.literal_eval(word) for word in argv.elts[1:]] == [*HARD]


@pytest.mark.parametrize(
    ("target", "launch", "words"),
    [
        ("slurm", LAUNCHES["elastic"], "Slurm stops a job that loses a node"),
        ("sky", LAUNCHES["elastic"], "SkyPilot starts a fixed number of nodes; use --nnodes 4"),
        ("kubeflow", LAUNCHES["elastic"], "Kubeflow's Trainer starts a fixed number of nodes"),
        ("torchrun", Launch(nnodes=2, rendezvous=SRUN), "use --to slurm"),
        ("sky", Launch(), "add --gpu, such as --gpu A100"),
        ("torchx", Launch(env=(("A", "1,2"),)), "no value can have a comma"),
    ],
)
def test_what_a_target_does_not_have_is_refused(target: str, launch: Launch, words: str) -> None:
    with pytest.raises(BadInput) as e:
        TARGETS[target](launch, Job(), NONE)
    assert words in str(e.value)


def test_a_bad_name_or_variable_is_refused() -> None:
    with pytest.raises(BadInput, match="'My Job' is not a Kubernetes object name"):
        targets.pytorchjob(Launch(), Job(name="My Job"))
    with pytest.raises(BadInput, match="'A B' is not a variable's name"):
        Launch(env=(("A B", "1"),))


@pytest.mark.parametrize(
    ("time", "found"), [("01:30:00", 5400), ("30", 1800), ("5:30", 330), ("2-01:00:00", 176400), ("1-2", 93600)]
)
def test_a_time_is_read_as_slurm_reads_it(time: str, found: int) -> None:
    assert seconds(time) == found
