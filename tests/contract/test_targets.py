"""One job as text for seven engines: what each would read is what was asked, for values with every sort of quote.

The texts are read back by what reads them: a shell, a YAML parser with the fields of each kind (`tests/data`), Python.
What the engines themselves say of them is in `test_job_engines.py`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nbddp.capabilities.export import target_support, targets
from nbddp.capabilities.export.command import files_of
from nbddp.capabilities.export.options import Shape, job_of, launch_of, said_of
from nbddp.capabilities.export.targets import NONE, TARGETS, Files
from nbddp.capabilities.terminal import main as terminal
from nbddp.errors import BadInput
from nbddp.export import Job, Launch
from nbddp.launch.options import parse_cell
from nbddp.notebook.commands import parse_command
from tests import places
from tests.unit.test_targets import ENV, FIXED, HARD, JOB, LAUNCHES, SCRIPT, exported

FIELDS = json.loads((places.ROOT / "tests" / "data" / "job_fields.json").read_text())
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
    assert task["resources"] == {**({"accelerators": "A100:2"} if launch.gpus_per_proc else {}), "cpus": "4+"}
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


def test_a_terminal_prints_a_job_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert terminal.main(["export", "go.py", "--to", "torchrun", "--nnodes", "2", "-n", "4", "--", "--lr", "a b"]) == 0
    said = capsys.readouterr().out
    assert "--nproc-per-node 4 go.py --lr 'a b'" in said
    assert "go.py does not exist yet" in said
    assert terminal.main(["export", "go.py", "--to", "sky", "--gpus-per-proc", "0", "-o", "task.yaml"]) == 0
    assert "task.yaml written" in capsys.readouterr().out
    jsonschema.validate(yaml.safe_load((tmp_path / "task.yaml").read_text()), FIELDS["sky"])


# -- each option and each target ---------------------------------------------------------------------

TOGGLED = {
    "nnodes": "--nnodes 3", "nproc": "--nproc 5", "gpus_per_proc": "--gpus-per-proc 3", "gpu": "--gpu H100",
    "max_restarts": "--max-restarts 7", "static": "--rendezvous static", "srun": "--rendezvous srun",
    "host": "--host other", "port": "--port 1234", "name": "--name other", "time": "--time 00:07:00",
    "partition": "--partition p", "cpus_per_proc": "--cpus-per-proc 7", "memory": "--memory 3G", "image": "--image i",
    "package": "--package einops", "setup": "--setup 'module load x'", "env": "--env A=1", "taken back": "--env POOLS",
}  # fmt: skip
SHAPE = Shape(gpus_per_proc=1, env={"POOLS": "1"})


def job(target: str, options: str, shape: Shape = SHAPE) -> tuple[str, list[str]]:
    """The text of a job, and notes."""
    needed = "--gpu A100 " * (target == "sky")
    line = f"export --to {target} {needed}{options}" if target else f"export {options}"
    args = parse_command(line).args
    launch = launch_of(args, shape, ())
    notes = target_support.notes(target, said_of(args, launch), launch)
    return TARGETS[target or "torchrun"](launch, job_of(args), NONE), [n for n in notes if "--gpu A100" not in n]


@pytest.mark.parametrize("nodes", ["", "--nnodes 2 "])
@pytest.mark.parametrize("target", [*TARGETS, target_support.SCRIPT])
@pytest.mark.parametrize("option", [*TOGGLED])
def test_no_option_is_dropped_in_silence(option: str, target: str, nodes: str) -> None:
    """The text differs, or the option is answered."""
    plain, said = job(target, nodes)
    assert said == []
    refusal = ""
    try:
        text, said = job(target, f"{nodes}{TOGGLED[option]}")
    except BadInput as e:
        refusal = str(e)
    if refusal:
        assert ";" in refusal, "a refusal says what to use"
        return
    assert (text != plain) != bool(said), said
    assert all(note.startswith(TOGGLED[option].split()[0]) for note in said)


@pytest.mark.parametrize(
    ("target", "options", "has"),
    [
        ("sky", "--memory 2G -n 2", 'memory: "16+"'),
        ("sky", "--memory 100M -n 2", 'memory: "1+"'),
        ("pytorchjob", "--memory 2G -n 2", 'memory: "16384Mi"'),
        ("kubeflow", "--memory 2G -n 2", "'memory': '16384Mi'"),
        ("torchx", "--memory 2G -n 2", "--memMB 16384"),
        ("ray", "--memory 2G -n 2", f"'memory': {8 << 30}"),
        ("ray", "--gpu H100", "accelerator_type='H100'"),
        ("pytorchjob", "--max-restarts 3", "backoffLimit: 3"),
        ("kubeflow", "--max-restarts 3", "env={'POOLS': '1', 'PET_MAX_RESTARTS': '3'}"),
    ],
)
def test_an_option_is_written_as_the_target_has_it(target: str, options: str, has: str) -> None:
    assert has in job(target, options)[0]


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("ray", "--rendezvous srun", "--rendezvous srun: with it Slurm starts every process; use --to slurm"),
        (
            "torchx",
            "--rendezvous static",
            "--rendezvous static: --to torchx has its own rendezvous; remove --rendezvous",
        ),
        ("torchx", "--package a", "--package: dist.ddp installs nothing; use an --image that has the package"),
        ("slurm", "--gpu A100 --gpus-per-proc 0", "--gpu A100 needs GPUs; add --gpus-per-proc 1"),
        ("", "--setup x", "--setup: it describes a job; add --to"),
        ("sky", "--memory 2X", "--memory '2X' is not an amount of memory; write it as 512M or 2G"),
    ],
)
def test_an_option_that_would_make_another_job_is_refused(target: str, options: str, words: str) -> None:
    with pytest.raises(BadInput) as e:
        job(target, options)
    assert words in str(e.value)


AGENT = "--virtual-local-rank --log-dir logs --redirects 0:1,1:3 --tee 3 --local-ranks-filter 0,2"
PET = {"PET_VIRTUAL_LOCAL_RANK": "1", "PET_LOG_DIR": "logs", "PET_REDIRECTS": "0:1,1:3", "PET_TEE": "3",
       "PET_LOCAL_RANKS_FILTER": "0,2"}  # fmt: skip


@pytest.mark.parametrize("target", [*TARGETS, target_support.SCRIPT])
def test_what_cells_say_of_torchruns_agent_is_written_or_answered(target: str) -> None:
    cell = parse_cell("--visible own --log-dir logs --redirects 0:1,1:3 --tee 3 --local-ranks-filter 0,2")
    text, notes = job(target, "", replace(SHAPE, visible=cell.visible, logs=cell.logs))
    text = re.sub(r'"\n *- "', " ", text)  # YAML's list of words
    has = AGENT in text or all(f"{name!r}: {value!r}" in text for name, value in PET.items())
    assert has == (target not in ("torchx", "ray"))
    assert len(notes) == (0 if has else 2)


def test_without_torchrun_its_options_are_answered() -> None:
    cell = parse_cell("--visible own --tee 3")
    _, notes = job("slurm", "--rendezvous srun", replace(SHAPE, visible=cell.visible, logs=cell.logs))
    assert [note.partition(" has no effect here: ")[2] for note in notes] == [
        "with --rendezvous srun torchrun does not run; use static or c10d"
    ] * 2


def told_by_the_page() -> dict[str, tuple[set[str], str]]:
    """Option → the targets for which docs/export.md says that it is written, and what it says of the others."""
    page = (places.ROOT / "docs" / "export.md").read_text()
    _, _, below = page.partition("| option | written for | otherwise |")
    told = {}
    for line in below.splitlines()[2:]:
        if not line.startswith("|"):
            break
        option, written, other = (cell.strip() for cell in line.strip("|").split("|"))
        named = {name for name in TARGETS if re.search(rf"\b{name}\b", written)}
        whole = re.match(r"all( but \w+| with torchrun)?", written)
        if whole:
            named = {*TARGETS} - (named if "but" in whole[0] else set())
        if "note: " in other:
            named -= {name for name in TARGETS if name in other}
        for one in re.findall(r"`([^`]+)`", option):
            told[one] = named, other
    return told


def test_the_page_on_export_says_of_each_option_what_the_table_does() -> None:
    told = told_by_the_page()
    assert len(told) > 20
    for name, row in target_support.TABLE.items():
        typed = {"visible": "--visible own", "logs": "--log-dir"}.get(name, f"--{name.replace('_', '-')}")
        written, other = told[typed]
        assert written == {*TARGETS} - row.keys(), typed
        answers = {
            "refused" if isinstance(why, target_support.Unsupported) else "note"
            for target, why in row.items()
            if target
        }
        assert re.match("note|refused", other)[0] in answers, typed  # type: ignore[index]
        assert len(answers) == 1, typed
    for name in ("rendezvous static", "rendezvous srun"):
        assert told[f"--{name}"][1] == "refused"
    assert told["--rendezvous static"][0] == {*TARGETS} - {*target_support.MEETS}
