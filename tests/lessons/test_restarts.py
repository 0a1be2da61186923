"""Lesson 10: attempts on paper against closed forms, and checkpoints judged by what a resumed training does."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import nbddp
from nbddp.lessons.l10_restarts.figure import draw_restarts
from nbddp.lessons.l10_restarts.simulation import LOST, simulate_restarts, training
from nbddp.output.screens import NullScreen
from nbddp.teach import check, predict
from tests.lessons.answers import Mutant, cells, defined, exercise, solution

NPROC = 4  # of the module's pool


def test_what_came_of_the_lessons_questions_is_what_happens() -> None:
    four, eight = simulate_restarts(4, 7, 4), simulate_restarts(8, 7, 4)
    assert (four.finished, eight.finished) == (True, False)
    assert predict.better_interval.question.came == "four steps"
    (first, second) = training(12, 5, [7, 12]).attempts
    assert [s for s in range(12) if first.kind(s) == LOST] == [5, 6]
    assert predict.steps_done_twice.question.came == "5 and 6"
    assert str(second.start) == predict.second_attempt_starts.question.came


def test_the_figure_counts_as_the_words_do() -> None:
    made = simulate_restarts(4, 7, 4)
    shown = draw_restarts(made)
    texts = [t.get_text() for t in shown.figure.axes[0].texts]
    assert texts.count("×") == 4
    assert texts.count("7 done, 3 lost") == 4
    assert "4 done" in texts
    assert shown.words == made.words()
    assert all(t.get_fontsize() >= 6.5 for t in shown.figure.axes[0].texts)


# -- the check -------------------------------------------------------------------------------


ANSWER = """
import os
class Checkpoint:
    def __init__(self, path):
        self.path = path
    def save(self, model, optimizer, batches, step):
        import torch, torch.distributed as dist
        dice = [None] * dist.get_world_size()
        dist.all_gather_object(dice, torch.get_rng_state())
        if dist.get_rank() == 0:
            state = dict(model=model.module.state_dict(), optimizer=optimizer.state_dict(),
                         batches=batches.state_dict(), step=step, dice=dice)
            torch.save(state, self.path + ".new")
            os.replace(self.path + ".new", self.path)
    def load(self, model, optimizer, batches):
        import torch, torch.distributed as dist
        if not os.path.exists(self.path):
            return 0
        state = torch.load(self.path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["dice"][dist.get_rank()])
        return state["step"]
"""
LOADS = {part: f'        {part}.load_state_dict(state["{part}"])\n' for part in ("model", "optimizer", "batches")}
DICE = '        torch.set_rng_state(state["dice"][dist.get_rank()])\n'
GROUPS = "        state['optimizer']['param_groups'] = optimizer.state_dict()['param_groups']\n"
HALVE = "        optimizer.param_groups[0]['lr'] *= 0.5\n"
LAX = 'load_state_dict(state["model"], strict=False)'
ATOMIC = 'torch.save(state, self.path + ".new")\n            os.replace(self.path + ".new", self.path)'


def changed(old: str, new: str, source: str = ANSWER) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


WRONG = [
    Mutant("no weights", changed(LOADS["model"], ""), "rank 0, 0.weight: the weights are not those of the checkpoint"),
    Mutant("no optimizer", changed(LOADS["optimizer"], ""), "ranks 0–3: the optimizer's momentum is lost"),
    Mutant(
        "no param_groups",
        changed(LOADS["optimizer"], GROUPS + LOADS["optimizer"]),
        "ranks 0–3: the learning rate is the initial one",
    ),
    Mutant("no sampler", changed(LOADS["batches"], ""), "ranks 0–3: the sampler restarts its epoch"),
    Mutant("no dice", changed(DICE, ""), "ranks 0–3: the random state is not restored"),
    Mutant("one die", changed("[dist.get_rank()]", "[0]"), "ranks 1–3: the random state is rank 0's"),
    Mutant("no step", changed('state["step"]', "0"), "rank 0 continues with step 0"),
    Mutant("step before", changed('state["step"]', 'state["step"] - 1'), "step to continue with: expected 4, got 3"),
    Mutant("step after", changed('state["step"]', 'state["step"] + 1'), "step to continue with: expected 4, got 5"),
    Mutant("nothing returned", changed('        return state["step"]\n', ""), "load returns None"),
    Mutant("a tensor", changed('return state["step"]', 'return torch.tensor(state["step"])'), "a whole number"),
    Mutant("all write", changed("if dist.get_rank() == 0:", "if True:").replace('".new"', 'f".{dist.get_rank()}"'),
           "ranks 0–3 write the same file"),
    Mutant("in place", changed(ATOMIC, "torch.save(state, self.path)"), "written over the last good one"),
    Mutant("in place by open", changed(ATOMIC, "with open(self.path, 'wb') as f: torch.save(state, f)"),
           "written over the last good one"),
    Mutant("DDP's names", changed("model.module.state_dict()", "model.state_dict()"), "save model.module.state_dict()"),
    Mutant("DDP's names, not strict",
           changed("model.module", "model").replace('load_state_dict(state["model"])', LAX),
           "the weights are not those of the checkpoint"),
    Mutant("wrong place", changed("torch.load(self.path)", "torch.load(self.path + '.old')"),
           "load: a rank raised FileNotFoundError: [Errno 2] No such file or directory: 'checkpoint.pt.old'"),
    Mutant("no first start", changed("        if not os.path.exists(self.path):\n            return 0\n", ""),
           "rank 0: load raises FileNotFoundError at the first start, when there is no checkpoint yet; return 0 if"),
    Mutant("begins at 1", changed("return 0", "return 1"), "rank 0: load returns 1 at the first start"),
    Mutant("save raises", changed("step=step", "step=steps"), "save: rank 0 raised NameError"),
    Mutant("only rank 0 gathers", changed("        dist.all_gather_object(dice, torch.get_rng_state())\n",
           "        if dist.get_rank() == 0: dist.all_gather_object(dice, torch.get_rng_state())\n"), "save: "),
    Mutant("in memory", """
class Checkpoint:
    kept = {}
    def __init__(self, path): pass
    def save(self, model, optimizer, batches, step): self.kept["step"] = step
    def load(self, model, optimizer, batches): return self.kept["step"]
""", "save wrote no file"),
    Mutant("save changes", changed("        dice = [None]", HALVE + "        dice = [None]"),
           "rank 0, step 2: a run that only saves has another learning rate"),
    Mutant("removes first", changed("os.replace(self.path", "if os.path.exists(self.path): os.remove(self.path)\n"
           "            os.rename(self.path"), "removed before the new one has its name"),
    Mutant("loads DDP's", changed("        model.load", "        model.module.load"),
           "there is no model.module yet"),
    Mutant("an object in it", changed("batches=batches.state_dict()", "batches=batches"), "not other objects"),
    Mutant("renamed by all", changed("            os.replace(self", "        os.replace(self"),
           "No such file or directory: 'checkpoint.pt.new' -> 'checkpoint.pt'"),
    Mutant("an object", ANSWER + "\nCheckpoint = Checkpoint('x').save", "pass the class itself"),
    Mutant("four places", changed("[None] * dist.get_world_size()", "[None] * 4"),
           "save, on 3 ranks: the list for all_gather_object has 4 places on 3 ranks; its length must be dist"),
    Mutant("eight places", changed("[None] * dist.get_world_size()", "[None] * 8"),
           "save: the list for all_gather_object has 8 places on 4 ranks"),
    Mutant("eight places on one rank",
           changed("all_gather_object(dice, torch.get_rng_state())",
                   "gather_object(torch.get_rng_state(), dice if dist.get_rank() == 0 else None)",
                   changed("[None] * dist.get_world_size()", "[None] * 8")),
           "save: the list for gather_object has 8 places on 4 ranks"),
]  # fmt: skip
FILE_EACH = """
import os
class Checkpoint:
    def __init__(self, path):
        self.path = path
    def own(self):
        return f"{self.path}-{os.environ['RANK']}"
    def save(self, model, optimizer, batches, step):
        import torch
        state = [model.module.state_dict(), optimizer.state_dict(), batches.state_dict(), torch.get_rng_state(), step]
        with open(self.own() + "~", "wb") as file:
            torch.save(state, file)
        os.rename(self.own() + "~", self.own())
    def load(self, model, optimizer, batches):
        import torch
        if not os.path.exists(self.own()): return 0
        *states, dice, step = torch.load(self.own())
        for part, state in zip((model, optimizer, batches), states):
            part.load_state_dict(state)
        torch.set_rng_state(dice)
        return step
"""
REPLACE = 'os.replace(self.path + ".new", self.path)'
NUMBERED = """os.replace(self.path + ".new", f"{self.path}.{step}")
            old = f"{self.path}.{step - 4}"
            if os.path.exists(old):
                os.remove(old)"""
THE_LAST_TWO = changed("import os", "import os, glob", changed(
    "torch.load(self.path)", "torch.load(max(glob.glob(self.path + '.?')))", changed(
        "os.path.exists(self.path)", "glob.glob(self.path + '.?')", changed(REPLACE, NUMBERED))
))  # fmt: skip
PICKLED = changed("torch.load(self.path)", "pickle.load(open(self.path, 'rb'))", changed(
    'torch.save(state, self.path + ".new")', "pathlib.Path(self.path + '.new').write_bytes(pickle.dumps(state))",
    changed("import os", "import os, pathlib, pickle"),
))  # fmt: skip


@pytest.mark.every(12, "mutants")
@pytest.mark.parametrize("mutant", WRONG, ids=str)
def test_wrong_checkpoints_are_told_why(pool: nbddp.Pool, mutant: Mutant) -> None:
    mutant.meets(check.Checkpoint)


@pytest.mark.every(4, "mutants")
@pytest.mark.parametrize("source", [FILE_EACH, ANSWER, THE_LAST_TWO, PICKLED])
def test_right_checkpoints_pass(pool: nbddp.Pool, source: str) -> None:
    assert check.Checkpoint(defined(source, "Checkpoint")), source


def test_the_lessons_own_checkpoint_passes_and_an_unwritten_one_is_told(pool: nbddp.Pool) -> None:
    assert check.Checkpoint(solution("10", "Checkpoint"))
    assert check.Checkpoint(exercise("10", "Checkpoint")).line.startswith(
        "save wrote no file: it is still to be written"
    )


def test_names_on_the_ranks_outlive_the_check(pool: nbddp.Pool) -> None:
    pool.push({"held": 3})
    assert check.Checkpoint(defined(ANSWER, "Checkpoint"))
    assert list(pool.pull(["held"])["held"]) == [3] * 4


def test_torchrun_reads_the_lessons_elastic_line() -> None:
    from torch.distributed.run import get_args_parser

    (text,) = [c.text for c in cells("10") if "--nnodes=1:4" in c.text]
    line = text.split("```")[1].replace("\\\n", " ")
    found = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("1:4", "8", 3)
    assert (found.rdzv_id, found.rdzv_backend, found.rdzv_endpoint) == ("run7", "c10d", "node0:29400")


# -- the lesson's claim ----------------------------------------------------------------------


@pytest.mark.more
def test_a_killed_run_equals_the_undisturbed_one(tmp_path: Path) -> None:
    """The lesson's own program, with a real SIGKILL; without the optimizer in the checkpoint it does not."""
    (program,) = [c.text for c in cells("10") if "killed_at=7" in c.text]
    program = program.partition("\n")[2].replace("dist.destroy_process_group()", "dist.destroy_process_group()\nsame")
    forgetful = program.replace('        optimizer.load_state_dict(state["optimizer"])\n', "")
    assert forgetful != program
    with nbddp.Pool(nproc=4) as pool:
        for name, source, wanted in (("whole", program, True), ("forgetful", forgetful, False)):
            (tmp_path / name).mkdir()
            found = pool.run_cell(
                source, argv=[str(tmp_path / name)], max_restarts=1, want_value=True, screen=NullScreen()
            )
            assert list(found) == [wanted] * 4
            assert (tmp_path / name / "checkpoint.pt").exists()
