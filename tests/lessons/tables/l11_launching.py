"""Lesson 11: answers to its exercises, wrong and right."""

from __future__ import annotations

from tests.lessons.tables import Table, within

VARIABLES = """
def variables_of(slurm, hosts):
    port = str(20000 + int(slurm["SLURM_JOB_ID"]) % 10000)
    found = dict(RANK=slurm["SLURM_PROCID"], LOCAL_RANK=slurm["SLURM_LOCALID"], WORLD_SIZE=slurm["SLURM_NTASKS"],
                 MASTER_ADDR=hosts[0], MASTER_PORT=port)
    {}
    return found
"""
VARIABLES_OF = Table("variables_of", VARIABLES.format, wrong={
    "found['RANK'] = slurm['SLURM_LOCALID']": "expected '4', got '0'; that is the task's number",
    "found['RANK'] = slurm['SLURM_NODEID']": "it is torchrun's --node-rank",
    "found['RANK'] = str(int(slurm['SLURM_PROCID']) + 1)": "counted from 0",
    "found['LOCAL_RANK'] = slurm['SLURM_PROCID']": "the second node has no such GPU",
    "found['LOCAL_RANK'] = slurm['SLURM_NODEID']": "would take the same GPU",
    "found['WORLD_SIZE'] = slurm['SLURM_NNODES']": "number of nodes; ranks are processes",
    "found['WORLD_SIZE'] = str(int(slurm['SLURM_NTASKS']) // len(hosts))": "the local world size",
    "found['WORLD_SIZE'] = str(int(slurm['SLURM_NTASKS']) - 1)": "one more",
    "found['MASTER_ADDR'] = slurm['SLURMD_NODENAME']": "would wait at itself for all ranks",
    "found['MASTER_ADDR'] = hosts[-1]": "runs on the first node",
    "found['MASTER_ADDR'] = slurm['SLURM_JOB_NODELIST']": "return one host's name",
    "found['MASTER_ADDR'] = 'localhost'": "its own localhost",
    "import random; found['MASTER_PORT'] = str(random.randint(2000, 60000))": "differs from",
    "found['MASTER_PORT'] = slurm['SLURM_JOB_ID'][:3]": "from 1024 to 65535",
    "found['RANK'] = int(found['RANK'])": "RANK is 0; an environment variable is a string, here '0'",
    "del found['MASTER_PORT']": "MASTER_PORT is missing in the dict",
    "found = list(found.items())": "return a dict of",
    "import os; found['RANK'] = os.environ['SLURM_PROCID']": "task 0 of 8 on gpu01: it",
    "import os; found['MASTER_PORT'] = '1' + os.environ['RANK'] * 4": "use only the arguments",
    "import os; found['RANK'] = os.environ['RANK']": "different answers for RANK",
    "import torch.distributed as d; found['RANK'] = str(d.get_rank())": "contain everything",
    "found['MASTER_ADDR'] = ','.join(hosts)": "the name of the one with",
    "found['MASTER_ADDR'] = hosts": "an environment variable is one string",
    "found['MASTER_ADDR'] += ':29500'": "the port belongs in MASTER_PORT",
    "found['WORLD_SIZE'] = '8'": "the same for every task of every job",
    "found['WORLD_SIZE'] = str(int(slurm['SLURM_NTASKS']) * len(hosts))": "all nodes already",
    "found['RANK'] = str(int(slurm['SLURM_NODEID']) * int(slurm['SLURM_NTASKS']) + int(slurm['SLURM_LOCALID']))":
        "SLURM_NTASKS counts the tasks of all nodes; a node has",
}, right=[
    VARIABLES.format("import os\n    found = {**os.environ, **found}"),
    VARIABLES.format("found['MASTER_PORT'] = '23456'"),
    VARIABLES.format("each = int(slurm['SLURM_NTASKS']) // len(hosts)\n"
    "    found['RANK'] = str(int(slurm['SLURM_NODEID']) * each + int(slurm['SLURM_LOCALID']))" ),
])  # fmt: skip

SPELL = """
def nodes_of(text):
    name, bracket, rest = text.partition("[")
    if not bracket:
        return {alone}
    found = []
    for part in rest.rstrip("]").split(","):
        a, _, b = part.partition("-")
        found += [{each} for n in range(int(a), int(b or a) + 1)]
    return {whole}
"""


def spelled(alone: str = "[text]", each: str = "f'{name}{n:0{len(a)}d}'", whole: str = "found") -> str:
    return SPELL.replace("{alone}", alone).replace("{each}", each).replace("{whole}", whole)


NODES_OF = Table("nodes_of", within("def nodes_of(text):\n    ..."), wrong={
    "return [text]": "that is the list as Slurm writes it",
    spelled(each="f'{name}{n}'"): "there is a gpu01 and no gpu1",
    spelled().replace("int(b or a) + 1", "int(b or int(a) + 1)"): "the range ends with its",
    "return text.split(',')": "separates numbers, not hosts",
    spelled(each="f'{n:0{len(a)}d}'"): "each needs the name in front",
    spelled(whole="found[:1]"): "the first host alone",
    spelled(alone="text"): "return a list of names",
    spelled().replace("int(b or a)", "int(b)"): "nodes_of('gpu[01-03,07]') raised ValueError",
    spelled(each="n").replace("[n for n in range(int(a), int(b or a) + 1)]", "name + part"):
        "adds its letters one by one",
    spelled(each="f'{name}{n:02d}'"): "keep the leading zeros",
    spelled().replace("    return found", "        return found"): "a return inside the loop",
    spelled().replace("for n in range(int(a), int(b or a) + 1)", "for n in map(int, part.split('-'))"):
        "the numbers between its ends",
    spelled(whole="set(found)"): "got {'gpu1', 'gpu2', 'gpu3'}",
    spelled(alone="[text]", whole="print(found)"): "without a value to return",
}, right=[
    spelled(each="name + str(n).zfill(len(a))"),
    """
    import re
    def nodes_of(text):
        found = re.fullmatch(r"(.*?)(?:\\[(.*)\\])?", text)
        if found[2] is None:
            return (text,)
        spans = [(p.split("-") * 2)[:2] for p in found[2].split(",")]
        return [found[1] + str(n).rjust(len(a), "0") for a, b in spans for n in range(int(a), 1 + int(b))]
    """,
])  # fmt: skip
