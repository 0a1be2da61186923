"""Mistakes of files: who writes them, and what is in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbddp.capabilities.lint.flow import keyword
from nbddp.capabilities.lint.meaning import DDP, Meaning
from nbddp.capabilities.lint.rule import Hit


def save_on_all_ranks(p: Meaning) -> Iterator[Hit]:
    for call in p.named("torch.save") if p.distributed and "chdir" not in p.words else ():
        path = keyword(call, "f", 1)
        if path is not None and p.on_all_ranks(call) and p.same_everywhere(path):
            yield Hit(call, {"path": ast.unparse(path)})


def prefix_in_checkpoint(p: Meaning) -> Iterator[Hit]:
    if any(text.startswith("module") for text in p.texts):
        return
    if any(p.may(model, DDP) for _, model in p.methods("load_state_dict")):
        return
    for call in p.named("torch.save"):
        saved = keyword(call, "obj", 0)
        for node in ast.walk(saved) if saved is not None else ():
            if isinstance(node, ast.Call) and _is_state_of_ddp(p, node.func):
                yield Hit(node, {"call": ast.unparse(node)})


def _is_state_of_ddp(p: Meaning, called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and called.attr == "state_dict" and p.must(called.value, DDP)


def download_on_all_ranks(p: Meaning) -> Iterator[Hit]:
    if not p.distributed or p.cells or {"barrier", "makedirs", "monitored_barrier"} & p.words:
        return
    for call in p.calls:
        download = keyword(call, "download")
        root = keyword(call, "root", 0)
        if root is None or not p.same_everywhere(root):
            continue
        known = p.name_of(call).startswith(("torchvision.datasets.", "torchaudio.datasets."))
        if known and isinstance(download, ast.Constant) and download.value is True and p.on_all_ranks(call):
            yield Hit(call, {"dataset": ast.unparse(call.func)})
