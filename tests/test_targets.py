"""One job as text for seven engines: what each would read is what was asked, for values with every sort of quote.

The texts are read back by what reads them: a shell, a YAML parser with the fields of each kind (`tests/data`), Python.
What the engines themselves say of them is in `test_job_engines.py`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from nbddp.errors import BadInput
from nbddp.export import SRUN, STATIC, Job, Launch, targets
from nbddp.export.program import Cell
from nbddp.export.targets import LONGEST_COMMAND, LONGEST_FUNCTION, NONE, TARGETS, Files, seconds
from nbddp.export.values import code_of
from nbddp.front import cli
from nbddp.front.exporting import files_of, write

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


def train_of(text: str) -> str:
    """The source of the function that goes to the cluster; nothing else of the program does."""
    [train] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    return "\n".join(text.splitlines()[train.lineno - 1 : train.end_lineno])


def test_kubeflows_function_is_the_same_behind_the_shell_that_it_is_sent_through() -> None:
    """Kubeflow's Trainer writes the function with a here-document whose mark is not quoted, where a shell expands $,
    backquotes and backslashes."""
    source = "print('a\\n$HOME `date` $(date)', r'\\d\\\\')\n"
    sent = train_of(targets.kubeflow(Launch(SCRIPT, HARD), Job(), Files(source, "v.pkl", b"\x00")))
    line = f"read -r -d '' SCRIPT << EOM\n\n{sent}\n\nEOM\nprintf '%s' \"$SCRIPT\""
    came = subprocess.run(["bash", "-c", line], text=True, capture_output=True, check=True).stdout
    assert came.strip() == sent.strip()
    texts = [n.value for n in ast.walk(ast.parse(came)) if isinstance(n, ast.Constant)]
    assert {source, *HARD} <= {*texts}


@pytest.mark.parametrize("target", ["kubeflow", "ray"])
def test_pushed_values_go_along_with_the_script(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "init_process_group", dist.init_process_group)  # put back: Ray's function replaces it
    monkeypatch.setattr(sys, "argv", ["x"])
    out = tmp_path / "said.json"
    script = exported(
        tmp_path, f"import json, pathlib\npathlib.Path({str(out)!r}).write_text(json.dumps(data.tolist()))\n"
    )
    files, notes = files_of(script)
    assert (files.values_name, notes) == ("train-values.pkl", [])
    text = TARGETS[target](Launch(script.name), Job(), files)
    for path in (script, script.with_name(files.values_name)):
        path.unlink()
    names: dict[str, Any] = {}
    exec(train_of(text), names)
    names["train"]()
    assert json.loads(out.read_text()) == [0, 1, 2]


def exported(folder: Path, more: str) -> Path:
    """A script with a pushed array `data`, as `%ddp export` writes it."""
    code, saved = code_of({"data": np.arange(3)}, "In[1]", "train-values.pkl")
    script = folder / "train.py"
    write(script, [Cell("In[1]", None, code), Cell("In[2]", "", more)], saved, "torchrun", False)
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
        assert cli.main(["export", "go.py", "--to", target, "--gpus-per-proc", "0"]) == 0
        said[target] = capsys.readouterr().out
    needs = "its image needs go.py and train-values.pkl in the working directory"
    assert {target for target, text in said.items() if needs in text} == {"pytorchjob"}
    assert 'workdir: "."' in said["sky"]
    Path("train-values.pkl").unlink()
    assert cli.main(["export", "go.py", "--to", "ray"]) == 0
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
    assert said("ScalingConfig") == {
        "num_workers": workers, "use_gpu": bool(launch.gpus_per_proc), "resources_per_worker": each
    }  # fmt: skip
    assert said("TorchConfig") == {"backend": launch.backend}
    assert said("init") == {"runtime_env": {"env_vars": dict(ENV), "pip": ["einops>=0.7"], "working_dir": "."}}
    assert ("FailureConfig" in calls) == (name == "elastic")
    [argv] = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "sys.argv"]
    assert isinstance(argv, ast.List)
    assert [ast.literal_eval(word) for word in argv.elts[1:]] == [*HARD]


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


def test_a_terminal_prints_a_job_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "go.py", "--to", "torchrun", "--nnodes", "2", "-n", "4", "--", "--lr", "a b"]) == 0
    said = capsys.readouterr().out
    assert "--nproc-per-node 4 go.py --lr 'a b'" in said
    assert "go.py does not exist yet" in said
    assert cli.main(["export", "go.py", "--to", "sky", "--gpus-per-proc", "0", "-o", "task.yaml"]) == 0
    assert "task.yaml written" in capsys.readouterr().out
    jsonschema.validate(yaml.safe_load((tmp_path / "task.yaml").read_text()), FIELDS["sky"])
