"""What a line leaves open, from the pool that runs: two specs → one. Pure."""

from __future__ import annotations

from dataclasses import replace

from nbddp.capabilities.slurm.commands import Slurm
from nbddp.launch import env_options
from nbddp.launch.options import LaunchSpec


def merged(spec: LaunchSpec, running: LaunchSpec | None) -> LaunchSpec:
    """`spec`, with what it does not say as in the spec of the pool that runs, if one does (nnodes only if nproc is not
    said either)."""
    old = running or LaunchSpec()
    keep_shape = spec.nproc is None and spec.nnodes is None
    return replace(
        spec,
        nproc=spec.nproc if spec.nproc is not None else old.nproc if spec.nnodes is None else None,
        nnodes=spec.nnodes or (old.nnodes if keep_shape else None),
        elastic=spec.elastic or (None if spec.nnodes else old.elastic),
        gpus_per_proc=spec.gpus_per_proc or old.gpus_per_proc,
        visible=spec.visible or old.visible,
        oversubscribe=spec.oversubscribe or old.oversubscribe,
        device=spec.device or old.device,
        keep_warm=old.keep_warm if spec.keep_warm is None else spec.keep_warm,
        hosts=spec.hosts or old.hosts,
        ssh_config=spec.ssh_config or old.ssh_config,
        python=spec.python or old.python,
        setup=spec.setup or old.setup,
        via=spec.via or old.via,
        slurm=old.slurm if spec.slurm in (None, Slurm()) and old.slurm else spec.slurm,
        keep_alive=old.keep_alive if spec.keep_alive is None else spec.keep_alive,
        interface=spec.interface or old.interface,
        debug=spec.debug or old.debug,
        env=env_options.merged(old.env, spec.env),
        cluster=spec.cluster or (None if spec.hosts or spec.slurm else old.cluster),
    )


def visible(spec: LaunchSpec) -> str:
    """Which GPUs each worker sees, also where neither line nor pool has said so: with more workers than GPUs its
    own."""
    return spec.visible or ("own" if spec.oversubscribe else "all")
