"""Requests to the agent to start a worker or the controller."""

from __future__ import annotations

import os
import sys
import uuid as uuids
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nbddp.agent import runtime_dir
from nbddp.agent.hardware import loopback_name
from nbddp.compat import system
from nbddp.launch import torchrun_env
from nbddp.launch.machine import Node, node_of
from nbddp.launch.topology import Topology, Worker
from nbddp.protocol.agent import StartController, StartWorker, Warm
from nbddp.protocol.codec import Json


def worker(
    place: Worker,
    topology: Topology,
    *,
    env: Mapping[str, str],
    visible: str,
    home: Path,
    profile_dir: str,
    url_file: str,
    options: Json | None = None,
) -> StartWorker:
    """A start request for one worker. home: the pool's folder there; env: what is added to the environment there, or
    all of it; options: of the pool, that its parts get."""
    base = dict(env)
    base.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would not capture what C and subprocesses write
    joining = topology.joining(place) or loopback_name()
    base.update(torchrun_env.of_worker(place, topology, env, visible=visible, joining=joining))
    return StartWorker(
        rank=place.rank,
        uuid=str(uuids.uuid4()),
        env=base,
        cwd=system.existing_working_dir(),
        path=tuple(sys.path),
        log=str(home / f"worker-{place.rank}.log"),
        profile_dir=profile_dir,
        url_file=url_file,
        options=options or {},
    )


def here() -> dict[str, str]:
    """The environment of workers on this machine."""
    return {**runtime_dir.private_caches(), **os.environ}


def controller(
    *, env: Mapping[str, str], home: Path, profile_dir: str, cluster_id: str, ip: str, args: Sequence[str] = ()
) -> StartController:
    """A start request for the ipyparallel controller, which is to listen at `ip`."""
    return StartController(
        env=dict(env),
        cwd=str(home),
        path=tuple(sys.path),
        log=str(home / "controller.log"),
        state=str(home / "engines.json"),
        profile_dir=profile_dir,
        cluster_id=cluster_id,
        ip=ip,
        args=tuple(args),
    )


def description(placed: Topology | None) -> Json:
    """The agent's answer to a request for a pool's status."""
    hosts = {n.index: n.host for n in placed.nodes if not n.simulated} if placed and placed.nnodes > 1 else {}
    return {
        "cwd": system.working_dir(),
        "owner": os.getpid(),
        "workers": [
            {
                "rank": w.rank,
                "node": w.node,
                "host": hosts.get(w.node, ""),
                "local_rank": w.local_rank,
                "device": w.device_words(),
            }
            for w in (placed.workers if placed else ())
        ],
        "simulated": bool(placed and placed.simulated),
        "topology": asdict(placed) if placed else None,
    }


def host(warm: Warm, index: int = 0, address: str = "", name: str = "") -> Node:
    """A machine as a node, from what its agent said when it was warm; name: under which it is known, if that is
    another. Its processes meet others over the interface that has `address`, or those of the same machine over the
    loopback."""
    found = warm.interfaces
    joins = next((i for i in found if address in i.get("addresses", ())), None) or next(
        (i for i in found if i["loopback"]), None
    )
    return node_of(
        {
            "index": index,
            "host": name or warm.host,
            "interface": joins and {name: joins[name] for name in ("name", "speed", "loopback")},
            **{field: getattr(warm, field) for field in ("devices", "links", "untold", "cores", "numa")},
        }
    )
