"""Versions on several machines, and which of them differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping

CUDA, DRIVER = "CUDA of torch", "NVIDIA driver"
OF_GPUS = (CUDA, DRIVER)  # the notebook's machine need not have them
NONE = "none"

Versions = Mapping[str, str]  # name → version


def otherwise(theirs: Versions, ours: Versions) -> dict[str, str]:
    """Of what matters between a host and the notebook's machine: name → what the host has, where that is another."""
    return {
        name: theirs.get(name, NONE) for name, here in ours.items() if name not in OF_GPUS and theirs.get(name) != here
    }


def differing(hosts: Mapping[str, Versions], names: tuple[str, ...] = OF_GPUS) -> list[str]:
    """What differs between hosts, a line each: `NVIDIA driver: 550.54 on nodea, none on nodeb`."""
    lines = []
    for name in names:
        groups: dict[str, list[str]] = {}
        for host, found in hosts.items():
            groups.setdefault(found.get(name, NONE), []).append(host)
        if len(groups) > 1:
            said = "; ".join(f"{version} on {', '.join(which)}" for version, which in groups.items())
            lines.append(f"the hosts differ in {name}: {said}")
    return lines
