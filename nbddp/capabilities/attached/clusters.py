"""Running ipyparallel clusters: which one a line means, and the contents of its connection file.

`--cluster` names one as ipyparallel does: by its id, as PROFILE/ID, or by a file, that of the cluster or that for
clients. ipyparallel keeps the files of both in the security folders of IPython's profiles.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec

CLIENT_FILE = re.compile(r"ipcontroller(?:-(?P<id>.+))?-client\.json")
OUR_OWN = "nbddp-"  # ids of pools' clusters begin so
DEFAULT = "default"
ANYWHERE = ("0.0.0.0", "*", "[::]")


@dataclass(frozen=True)
class Cluster:
    """A cluster as its connection file for clients has it. name: as typed."""

    name: str
    file: Path
    info: dict[str, Any]

    @property
    def encrypted(self) -> bool:
        return bool(self.info.get("curve_serverkey"))

    def open_words(self, has_key: bool) -> str:
        """That others can read its messages, and where; empty where nobody else can. has_key: whether the key of the
        ranks' store is in one of them."""
        address = str(self.info.get("interface", "")).partition("://")[2]
        if self.encrypted or address.startswith("127.") or address in ("localhost", "[::1]") or self.info.get("ssh"):
            return ""
        where = "all interfaces" if address in ANYWHERE else address
        read = "cells, output, values and the key to the ranks' store" if has_key else "cells, output and values"
        return (
            f"messages of cluster {self.name} are signed but not encrypted, and its controller listens on {where}: "
            f"anyone who can read that network's traffic can read {read}; start it with "
            "c.IPController.enable_curve = True to encrypt them"
        )


def find(name: str, ipython: Path) -> Cluster:
    """The cluster of this name. ipython: IPython's folder. Raises BadInput."""
    path = Path(name).expanduser()
    if name.endswith(".json"):
        if not path.is_file():
            raise BadInput(f"--cluster {name}: there is no such file; {_others(ipython)}")
        return _read(name, path)
    profile, slash, cluster_id = name.rpartition("/")
    files = _client_files(ipython)
    if slash:
        found = [f for f in files if _id_of(f) == cluster_id and _profile_of(f) == (profile or DEFAULT)]
    else:
        same = [f for f in files if _id_of(f) == name]
        in_default = [f for f in same if _profile_of(f) == DEFAULT]
        found = in_default or same or [f for f in files if _profile_of(f) == name and not _id_of(f)]
    if len(found) > 1:
        where = " or ".join(_named(f) for f in found)
        raise BadInput(f"--cluster {name} is the id of several clusters; use {where}")
    if not found:
        raise BadInput(f"--cluster {name}: no IPython profile has a cluster of this name; {_others(ipython)}")
    return _read(name, found[0])


def _read(name: str, path: Path) -> Cluster:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise BadInput(f"--cluster {name}: {path} cannot be read ({e}); name its cluster as PROFILE/ID") from None
    if isinstance(info, dict) and "interface" in info and "mux" in info:
        return Cluster(name, path, info)
    cluster = info.get("cluster", {}) if isinstance(info, dict) else {}
    if "profile_dir" in cluster and "cluster_id" in cluster:
        part = f"-{cluster['cluster_id']}" if cluster["cluster_id"] else ""
        found = Path(cluster["profile_dir"]) / "security" / f"ipcontroller{part}-client.json"
        if found.is_file():
            return _read(name, found)
    raise BadInput(
        f"--cluster {name}: that is not an ipyparallel client file; use ipcontroller-…-client.json or PROFILE/ID"
    )


def _client_files(ipython: Path) -> list[Path]:
    found = sorted(ipython.glob("profile_*/security/ipcontroller*-client.json"))
    return [f for f in found if CLIENT_FILE.fullmatch(f.name) and not _id_of(f).startswith(OUR_OWN)]


def _id_of(file: Path) -> str:
    match = CLIENT_FILE.fullmatch(file.name)
    return (match and match["id"]) or ""


def _profile_of(file: Path) -> str:
    return file.parent.parent.name.removeprefix("profile_")


def _named(file: Path) -> str:
    return f"{_profile_of(file)}/{_id_of(file)}"


def _others(ipython: Path) -> str:
    """Which there are instead, and what to type."""
    names = [_named(f) for f in _client_files(ipython)]
    if names:
        return f"there {'are' if len(names) > 1 else 'is'} {', '.join(names)}"
    return "no cluster is running; start one with ipcluster start -n 4"


# -- how it goes on in a pool that runs ------------------------------------------------------------


def merged(spec: LaunchSpec, running: LaunchSpec) -> str | None:
    """The cluster of the pool that runs, unless the line names another place."""
    return spec.cluster or (None if spec.on_hosts else running.cluster)
