"""One job as text for seven engines: what each would read is what was asked, for values with every sort of quote.

The texts are read back by what reads them: a shell, a YAML parser with the fields of each kind (`tests/data`), Python.
Where an engine's own package is installed, it checks the text too.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nbddp.errors import BadInput
from nbddp.export import SRUN, STATIC, Job, Launch, targets
from nbddp.export.targets import TARGETS, seconds
from nbddp.front import cli

FIELDS = json.loads((Path(__file__).parent / "data" / "job_fields.json").read_text())
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
SHOW = 'import json, os, sys; print(json.dumps([sys.argv[1:], [os.environ.get(n) for n in ("A", "y", "EMPTY")]]))'


def words_of(line: str, folder: Path, **variables: str) -> list[tuple[list[str], list[str | None]]]:
    """What a shell that reads these lines gives to each torchrun: its words, and the variables of ENV."""
    stub = folder / "torchrun"
    stub.write_text(f"#!{sys.executable}\n{SHOW}\n")
    stub.chmod(0o755)
    (folder / "pip").write_text("#!/bin/sh\n")
    (folder / "pip").chmod(0o755)
    done = subprocess.run(["bash", "-c", line], env={"PATH": f"{folder}:/usr/bin:/bin", **variables}, text=True,
                          capture_output=True, check=True)  # fmt: skip
    return [tuple(json.loads(row)) for row in done.stdout.splitlines()]


@pytest.mark.parametrize("name", [*LAUNCHES])
def test_a_shell_reads_torchruns_lines_as_they_were_meant(name: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    found = words_of(targets.torchrun(launch, JOB), tmp_path)
    assert len(found) == (2 if name == "static" else 1)
    for words, variables in found:
        assert words[-6:] == [SCRIPT, *HARD]
        assert variables == [value for _, value in ENV]
    if name == "elastic":
        assert found[0][0][:2] == ["--nnodes", "1:4"]
        assert "--max-restarts" in found[0][0]


@pytest.mark.parametrize("name", [*FIXED])
def test_a_task_of_skypilot_has_its_fields_and_runs_what_was_meant(name: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    task = yaml.safe_load(targets.sky(launch, JOB))
    jsonschema.validate(task, FIELDS["sky"])
    assert (task["num_nodes"], task["envs"]) == (launch.nnodes, dict(ENV))
    assert task["resources"] == ({"accelerators": "A100:2"} if launch.gpus_per_proc else {"cpus": "4+"})
    places = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "t 1"}
    [(words, variables)] = words_of(task["run"], tmp_path, **places, **task["envs"])
    assert words[-6:] == [SCRIPT, *HARD]
    assert variables == [value for _, value in ENV]
    if name == "two":
        assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:29400"
    if name == "static":
        assert words[words.index("--node-rank") + 1] == "1"


@pytest.mark.parametrize("name", [*LAUNCHES])
def test_a_pytorchjob_has_its_fields_and_runs_what_was_meant(name: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    job = yaml.safe_load(targets.pytorchjob(launch, JOB))
    jsonschema.validate(job, FIELDS["pytorchjob"])
    spec = job["spec"]
    assert spec["nprocPerNode"] == "2"
    assert spec["runPolicy"] == {"activeDeadlineSeconds": 9000}
    assert sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values()) == launch.nnodes
    elastic = {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": 4, "maxRestarts": 3}
    assert spec.get("elasticPolicy") == (elastic if name == "elastic" else None)
    [container] = next(iter(spec["pytorchReplicaSpecs"].values()))["template"]["spec"]["containers"]
    assert {one["name"]: one["value"] for one in container["env"]} == dict(ENV)
    program, dash_c, text = container["command"]
    assert (program, dash_c) == ("bash", "-c")
    [(words, _)] = words_of(text, tmp_path)
    assert words == [SCRIPT, *HARD]
    assert yaml.safe_load(targets.pytorchjob(launch, Job()))["spec"][
        "pytorchReplicaSpecs"
    ]  # without lines to run first


@pytest.mark.parametrize("name", [*FIXED])
def test_kubeflows_function_stands_alone_and_runs_the_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, out = LAUNCHES[name], tmp_path / "said.json"
    source = f"import json, sys\nwith open({str(out)!r}, 'w') as f: json.dump([__name__, sys.argv[1:]], f)\n"
    text = targets.kubeflow(launch, JOB, source)
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
    assert said("ScalingConfig") == {
        "num_workers": workers, "use_gpu": bool(launch.gpus_per_proc), "resources_per_worker": each
    }  # fmt: skip
    assert said("TorchConfig") == {"backend": launch.backend}
    assert said("init") == {"runtime_env": {"env_vars": dict(ENV), "pip": ["einops>=0.7"], "working_dir": "."}}
    assert ("FailureConfig" in calls) == (name == "elastic")
    assert any(isinstance(n, ast.Assign) and ast.unparse(n.value) == f"[path, *{[*HARD]!r}]" for n in ast.walk(tree))


@pytest.mark.parametrize("name", [*LAUNCHES])
def test_torchx_gets_its_words(name: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    (tmp_path / "torchx").write_text(f"#!{sys.executable}\n{SHOW}\n")
    (tmp_path / "torchx").chmod(0o755)
    [(words, _)] = words_of(targets.torchx(launch, JOB), tmp_path)
    assert words[words.index("-j") + 1] == {"one": "1x2", "elastic": "1:4x2"}.get(name, "2x2")
    assert words[words.index("--script") + 1] == SCRIPT
    assert words[words.index("--env") + 1] == "A=x 'y\" $z: #,y=no,EMPTY="
    assert words[words.index("--") + 1 :] == [*HARD]


def test_a_batch_script_exports_variables_before_all_else() -> None:
    text = targets.slurm(LAUNCHES["two"], JOB)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "\nset -e\nexport A='x '\"'\"'y\" $z: #'\nexport y=no\nexport EMPTY=''\ntrue 'it'\npip install" in text


@pytest.mark.parametrize(
    ("target", "launch", "words"),
    [
        ("slurm", LAUNCHES["elastic"], "Slurm ends a job that loses a node"),
        ("sky", LAUNCHES["elastic"], "SkyPilot starts a fixed number of nodes; use --nnodes 4"),
        ("kubeflow", LAUNCHES["elastic"], "Kubeflow's Trainer starts a fixed number of nodes"),
        ("torchrun", Launch(nnodes=2, rendezvous=SRUN), "use --to slurm"),
        ("sky", Launch(), "add --gpu, such as --gpu A100"),
        ("torchx", Launch(env=(("A", "1,2"),)), "no value can have a comma"),
    ],
)
def test_what_a_target_does_not_have_is_refused(target: str, launch: Launch, words: str) -> None:
    with pytest.raises(BadInput) as e:
        TARGETS[target](launch, Job(), "")
    assert words in str(e.value)


def test_a_bad_name_or_variable_is_refused() -> None:
    with pytest.raises(BadInput, match="'My Job' is no name of a Kubernetes object"):
        targets.pytorchjob(Launch(), Job(name="My Job"))
    with pytest.raises(BadInput, match="'A B' is not a variable's name"):
        Launch(env=(("A B", "1"),))


@pytest.mark.parametrize(
    ("time", "found"), [("01:30:00", 5400), ("30", 1800), ("5:30", 330), ("2-01:00:00", 176400), ("1-2", 93600)]
)
def test_a_time_is_read_as_slurm_reads_it(time: str, found: int) -> None:
    assert seconds(time) == found


def test_a_terminal_prints_a_job_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "go.py", "--to", "torchrun", "--nnodes", "2", "-n", "4", "--", "--lr", "a b"]) == 0
    said = capsys.readouterr().out
    assert "--nproc-per-node 4 go.py --lr 'a b'" in said
    assert "there is no go.py yet" in said
    assert cli.main(["export", "go.py", "--to", "sky", "--gpus-per-proc", "0", "-o", "task.yaml"]) == 0
    assert "task.yaml written" in capsys.readouterr().out
    jsonschema.validate(yaml.safe_load((tmp_path / "task.yaml").read_text()), FIELDS["sky"])


# -- the engines' own word, where they are installed ------------------------------------------------


def test_skypilot_accepts_its_tasks() -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed (pip install skypilot)")
    for launch in FIXED.values():
        assert sky.Task.from_yaml_config(yaml.safe_load(targets.sky(launch, JOB))).num_nodes == launch.nnodes


def test_torchx_runs_its_line(tmp_path: Path) -> None:
    if shutil.which("torchx") is None:
        pytest.skip("TorchX is not installed (pip install torchx)")
    (tmp_path / "train.py").write_text(
        "import json, os, sys\njson.dump([sys.argv[1:], os.environ['A']], open('out' + os.environ['RANK'], 'w'))\n"
    )
    line = targets.torchx(Launch("train.py", HARD, nproc=2, gpus_per_proc=0, env=(("A", "x y"),)), Job(cpus_per_proc=1))
    subprocess.run(line.replace("dist.ddp", "--wait dist.ddp"), shell=True, cwd=tmp_path, check=True, timeout=120)
    assert [json.loads((tmp_path / f"out{r}").read_text()) for r in range(2)] == [[[*HARD], "x y"]] * 2
