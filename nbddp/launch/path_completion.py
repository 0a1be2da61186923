"""Files and folders that may be meant by what is typed so far, for Tab."""

from __future__ import annotations

from pathlib import Path

BATCH = (".sbatch", ".slurm", ".sh")  # how the names of batch scripts end


def files(current: str, ends: tuple[str, ...] = (".py",)) -> list[str]:
    """Files that end so, and folders, whose path begins so."""
    folder, _, begun = current.rpartition("/")
    place = Path(folder or ("/" if current.startswith("/") else "."))
    if not place.is_dir():
        return []
    head = f"{folder}/" if "/" in current else ""
    found = [p for p in sorted(place.iterdir()) if p.name.startswith(begun) and (begun or not p.name.startswith("."))]
    named = [f"{head}{p.name}/" if p.is_dir() else f"{head}{p.name}" for p in found if p.is_dir() or p.suffix in ends]
    return [name.replace(" ", "\\ ") for name in named]
