"""What the agent is asked to start: plain requests for a worker and for the controller."""

from __future__ import annotations

import os
import sys
import uuid as uuids
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbddp.agent import home as homes
from nbddp.agent.hardware import loopback_name
from nbddp.plan import environment
from nbddp.plan.machine import Node, node_of
from nbddp.plan.topology import Topology, Worker


def worker(
    place: Worker,
    topology: Topology,
    *,
    env: Mapping[str, str],
    visible: str,
    home: Path,
    profile_dir: str,
    url_file: str,
) -> dict[str, Any]:
    """A start request for one worker; `uuid` is what it will register under."""
    base = dict(env)
    base.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would not capture what C and subprocesses write
    base = {**homes.private_caches(), **base}
    base.update(environment.of_worker(place, topology, env, visible=visible, loopback=loopback_name()))
    return {
        "kind": "worker",
        "rank": place.rank,
        "uuid": str(uuids.uuid4()),
        "env": base,
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "log": str(home / f"worker-{place.rank}.log"),
        "kept": str(homes.bulk(home) / f"worker-{place.rank}"),
        "profile_dir": profile_dir,
        "url_file": url_file,
    }


def controller(*, env: Mapping[str, str], home: Path, profile_dir: str, cluster_id: str) -> dict[str, Any]:
    """A start request for the ipyparallel controller."""
    return {
        "kind": "controller",
        "env": dict(env),
        "cwd": str(home),
        "path": list(sys.path),
        "log": str(home / "controller.log"),
        "state": str(home / "engines.json"),
        "profile_dir": profile_dir,
        "cluster_id": cluster_id,
    }


def description(placed: Topology | None) -> dict[str, Any]:
    """What the agent tells those who ask for a pool's status."""
    return {
        "cwd": os.getcwd(),
        "owner": os.getpid(),
        "workers": [
            {"rank": w.rank, "node": w.node, "local_rank": w.local_rank, "device": w.device_words()}
            for w in (placed.workers if placed else ())
        ],
        "simulated": bool(placed and placed.simulated),
        "topology": asdict(placed) if placed else None,
    }


def host(warm: Mapping[str, Any]) -> Node:
    """This machine as a node, from what its agent said when it was warm. Its processes meet over the loopback."""
    joining = next((i for i in warm["interfaces"] if i["loopback"]), None)
    return node_of(
        {
            "index": 0,
            "interface": joining,
            **{field: warm[field] for field in ("host", "devices", "links", "untold", "cores", "numa")},
        }
    )
