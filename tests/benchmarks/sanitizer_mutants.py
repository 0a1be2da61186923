"""Mutants of healthy programs under `--sanitize`: each has one small change, and what the change did is measured.

Run by hand: `python tests/benchmarks/sanitizer_mutants.py [--only NAME] [--show]`; it takes three minutes.
The programs are healthy twins of `tests/data/silent.txt`. Nobody labels a mutant. If its replicas differ in the end, it
must be found. If every bit is as in the twin, and so is what each rank was fed, the change is harmless, and nothing may
be said. One that fails or hangs is loud. The others compute equal replicas that are not the twin's: some are mistakes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from nbddp.errors import RunFailed
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests.pool.silent import PROGRAMS, define

TWINS = (
    "module_forward", "no_sync_last_forward_inside", "scheduler_on_local_metric", "step_on_rank0",
    "clip_value_of_rank", "load_on_rank0_after_wrap", "unequal_batches", "loss_logged", "same_dropout_mask",
    "ema_copied_back_on_rank0", "accumulation_remainder", "weighted_unequal", "amp_scaler", "labels_ignored",
    "optimizer_state_on_rank0", "several_optimizers", "swa_on_rank0", "bn_buffers_not_broadcast", "warmup_of_rank",
    "weights_noised", "masked_mean", "two_backwards_through_one_forward", "clipped_before_the_exchange",
    "other_numbers_of_micro_batches", "class_weights_of_each_rank",
)  # fmt: skip
RUN = """
import hashlib
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
fed = hashlib.sha1()
def feed(module, given): [fed.update(each.detach().numpy().tobytes()) for each in given if torch.is_tensor(each)]
try: left = {name}(rank, world, feed)
finally: dist.destroy_process_group()
bits = hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in left.parameters())).hexdigest()
(bits, fed.hexdigest())
"""
LOUD, MUST, HARMLESS, OTHER = "loud", "must be found", "harmless", "other"
State = list[tuple[str, str]]


class Healthy(ast.NodeTransformer):
    """The healthy half of a twin, without the other one."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(False) if node.id == "bad" else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        known = truth(node.test)
        return node if known is None else node.body if known else node.orelse

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        known = truth(node.test)
        return node if known is None else node.body if known else node.orelse


def truth(test: ast.expr) -> bool | None:
    """What a condition is; None if it is not known."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return None if (of := truth(test.operand)) is None else not of
    if isinstance(test, ast.BoolOp):
        known = [truth(each) for each in test.values]
        decides = isinstance(test.op, ast.Or)
        return decides if decides in known else None if None in known else not decides
    return None


def healthy(name: str) -> ast.Module:
    tree = ast.parse(f"def {name}(r, w, bad, feed=None):\n{PROGRAMS[name].body}\n")
    return ast.fix_missing_locations(Healthy().visit(tree))


def blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements in a program, in a fixed order."""
    found = []
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            some = getattr(node, field, None)
            if isinstance(some, list) and some and not isinstance(node, (ast.Module, ast.ClassDef)):
                found.append(some)
    return found


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords]


def mutants(tree: ast.Module) -> Iterator[tuple[str, str, ast.Module]]:
    """The kind of a change, its words, and the program with it."""
    for b, block in enumerate(blocks(tree)):
        for i, statement in enumerate(block):
            if not isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign)):
                continue
            words = ast.unparse(statement)
            made = copy.deepcopy(tree)
            into = blocks(made)[b]
            into[i] = ast.If(ast.parse("r == 0", mode="eval").body, [into[i]], [])
            yield "a condition by rank", f"if r == 0: {words}", made
            if len(block) > 1:
                made = copy.deepcopy(tree)
                del blocks(made)[b][i]
                yield "a line dropped", f"without {words}", made
            if i + 1 < len(block):
                made = copy.deepcopy(tree)
                into = blocks(made)[b]
                into[i], into[i + 1] = into[i + 1], into[i]
                yield "a line moved", f"{words}, after the next line", made
    for c, call in enumerate(calls(tree)):
        for k, keyword in enumerate(call.keywords):
            made = copy.deepcopy(tree)
            del calls(made)[c].keywords[k]
            yield "an argument dropped", f"without {keyword.arg}= in {ast.unparse(call)}", made


def run(pool: WorkerPool, name: str, tree: ast.Module) -> State | None:
    """What each rank has in the end; None if the program fails or hangs."""
    tree = copy.deepcopy(tree)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    hook = "(d.module if hasattr(d, 'module') else d).register_forward_pre_hook(bad)"
    made = (i for i, each in enumerate(function.body) if f"{ast.unparse(each).split('=')[0].strip()},".startswith("d,"))
    after = next(made, None)
    if after is None:  # it lacks its model
        return None
    function.body.insert(after + 1, ast.parse(hook).body[0])
    function.body.append(ast.Return(ast.Name("d", ast.Load())))
    try:
        pool.run_cell(ast.unparse(ast.fix_missing_locations(tree)), cell=2, screen=NullScreen())
        code = RUN.format(name=name)
        found = pool.run_cell(
            code, cell=3, sanitize=True, want_value=True, hang_after=0.3, timeout=15, screen=NullScreen()
        )
        return list(found)
    except RunFailed:
        return None


def judged(before: State, after: State | None) -> str:
    if after is None:
        return LOUD
    if len({bits for bits, _ in after}) > 1:
        return MUST
    return HARMLESS if after == before else OTHER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the name of one program")
    parser.add_argument("--show", action="store_true", help="show every mutant")
    asked = parser.parse_args()
    table: dict[str, Counter[tuple[str, bool]]] = defaultdict(Counter)
    with WorkerPool(nproc=2) as pool:
        define(pool)
        for name in [asked.only] if asked.only else TWINS:
            tree = healthy(name)
            before = run(pool, name, tree)
            assert before is not None, name
            assert not pool.findings(), name
            for kind, words, made in mutants(tree):
                after = run(pool, name, made)
                if after is None:
                    table[kind][LOUD, False] += 1
                    define(pool)
                    continue
                found, what = pool.findings(), judged(before, after)
                table[kind][what, bool(found)] += 1
                wrong = bool(found) != (what == MUST) and what != OTHER
                if wrong or asked.show:
                    kinds = ", ".join(each.kind for each in found) or "nothing"
                    print(f"{'WRONG ' if wrong else ''}{what}: {name}, {kind}: {words}: {kinds}", flush=True)
    print("| change | mutants | loud | must be found | found | harmless | flagged | other | found |")
    print("|---|---|---|---|---|---|---|---|---|")
    total: Counter[tuple[str, bool]] = Counter()
    for kind, row in [*table.items(), ("all", total)]:
        total += row if kind != "all" else Counter()
        shown = [sum(row.values()), row[LOUD, False]]
        for what in (MUST, HARMLESS, OTHER):
            shown += [row[what, True] + row[what, False], row[what, True]]
        print(f"| {kind} | {' | '.join(map(str, shown))} |")


if __name__ == "__main__":
    main()
