"""Lesson 10: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table

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
ATOMIC = 'torch.save(state, self.path + ".new")\n            os.replace(self.path + ".new", self.path)'


def changed(old: str, new: str, source: str = ANSWER) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


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
UNWRITTEN = "save wrote no file: you have not written it yet"
CHECKPOINT = Table("Checkpoint", unwritten=UNWRITTEN, every=12, marker="mutants", nproc=4, wrong={
    changed(LOADS["model"], ""): "rank 0, 0.weight: the weights are not those of the checkpoint",
    changed(LOADS["optimizer"], ""): "ranks 0–3: the optimizer's momentum is lost",
    changed(LOADS["optimizer"], GROUPS + LOADS["optimizer"]): "ranks 0–3: the learning rate is the initial one",
    changed(LOADS["batches"], ""): "ranks 0–3: the sampler restarts its epoch",
    changed(DICE, ""): "ranks 0–3: the random state is not restored",
    changed("[dist.get_rank()]", "[0]"): "ranks 1–3: the random state is rank 0's",
    changed('state["step"]', "0"): "rank 0 continues with step 0",
    changed('state["step"]', 'state["step"] + 1'): "step to continue with: expected 4, got 5",
    changed('        return state["step"]\n', ""): "load returns None",
    changed('return state["step"]', 'return torch.tensor(state["step"])'): "a whole number",
    changed("if dist.get_rank() == 0:", "if True:").replace('".new"', 'f".{dist.get_rank()}"'):
        "ranks 0–3 write the same file",
    changed(ATOMIC, "torch.save(state, self.path)"): "written over the last good one",
    changed("model.module.state_dict()", "model.state_dict()"): "save model.module.state_dict()",
    changed("torch.load(self.path)", "torch.load(self.path + '.old')"):
        "load: a rank raised FileNotFoundError: [Errno 2] No such file or directory: 'checkpoint.pt.old'",
    changed("        if not os.path.exists(self.path):\n            return 0\n", ""):
        "rank 0: load raises FileNotFoundError at the first start, when there is no checkpoint yet; return 0 if",
    changed("return 0", "return 1"): "rank 0: load returns 1 at the first start",
    changed("step=step", "step=steps"): "save: rank 0 raised NameError",
    changed("        dist.all_gather_object(dice, torch.get_rng_state())\n",
            "        if dist.get_rank() == 0: dist.all_gather_object(dice, torch.get_rng_state())\n"):
        "save: ",
    'class Checkpoint:\n    kept = {}\n    def __init__(self, path): pass\n'
    '    def save(self, model, optimizer, batches, step): self.kept["step"] = step\n'
    '    def load(self, model, optimizer, batches): return self.kept["step"]':
        "save wrote no file",
    changed("        dice = [None]", HALVE + "        dice = [None]"):
        "rank 0, step 2: a run that only saves has another learning rate",
    changed("os.replace(self.path", "if os.path.exists(self.path): os.remove(self.path)\n"
            "            os.rename(self.path"):
        "removed before the new one has its name",
    changed("        model.load", "        model.module.load"): "there is no model.module yet",
    changed("batches=batches.state_dict()", "batches=batches"): "not other objects",
    changed("            os.replace(self", "        os.replace(self"):
        "No such file or directory: 'checkpoint.pt.new' -> 'checkpoint.pt'",
    ANSWER + "\nCheckpoint = Checkpoint('x').save": "pass the class itself",
    changed("[None] * dist.get_world_size()", "[None] * 4"):
        "save, on 3 ranks: the list for all_gather_object has 4 places on 3 ranks; its length must be dist",
    changed("all_gather_object(dice, torch.get_rng_state())", "gather_object(torch.get_rng_state(), dice if "
    "dist.get_rank() == 0 else None)", changed("[None] * dist.get_world_size()", "[None] * 8")):
        "save: the list for gather_object has 8 places on 4 ranks",
}, right=[FILE_EACH, ANSWER, THE_LAST_TWO, PICKLED])  # fmt: skip
