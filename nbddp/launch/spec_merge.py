"""Defaults of a line, taken from the running pool: two specs → one. Pure."""

from __future__ import annotations

from dataclasses import replace

from nbddp.launch.options import LaunchSpec, fields_of
from nbddp.protocol.capability import load


def merged(spec: LaunchSpec, running: LaunchSpec | None) -> LaunchSpec:
    """`spec`, completed from the spec of the running pool, if there is one; nnodes only if nproc is not said either."""
    old = running or LaunchSpec()
    kept = {}
    for option in fields_of("pool"):
        says = spec.says(option)
        if option.merge and (says or old.says(option)):
            kept[option.name] = load(option.merge)(spec, old)
        elif option.keeps and not says:
            kept[option.name] = getattr(old, option.name)
    keep_shape = spec.nproc is None and spec.nnodes is None
    kept |= {
        "nproc": spec.nproc if spec.nproc is not None else old.nproc if spec.nnodes is None else None,
        "nnodes": spec.nnodes or (old.nnodes if keep_shape else None),
        "elastic": spec.elastic or (None if spec.nnodes else old.elastic),
    }
    return replace(spec, **kept)


def visible(spec: LaunchSpec) -> str:
    """Which GPUs each worker sees, also where neither line nor pool has said so: with more workers than GPUs its
    own."""
    return spec.visible or ("own" if spec.oversubscribe else "all")
