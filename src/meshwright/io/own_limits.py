"""What this process may use of the machine, as the system's own files say: its control groups, and how much memory it can still take."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["CgroupPlace", "free_bytes", "lines_of", "memory_limit_bytes", "places_of"]

MAX_LIMIT_BYTES = 1 << 60  # what control groups say for "no limit" is larger (v1: 2^63 less a page)
UNKNOWN_FREE_BYTES = 4 << 30  # where the system does not say what is free


@dataclass(frozen=True)
class CgroupPlace:
    """A folder of the cgroup file system in which quota groups can be made."""

    version: Literal[1, 2]
    folder: Path


def places_of(root: Path = Path("/"), controller: str = "cpu") -> list[CgroupPlace]:
    """Own group and its ancestors on every hierarchy that has the controller (v1's name), deepest first, v2 before v1."""
    proc = root / "proc/self"
    paths: dict[str, str] = {}
    for line in lines_of(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") or [""]:
            paths[name] = path
    found: list[CgroupPlace] = []
    for line in lines_of(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        inner, mount = fields[3], root / fields[4].lstrip("/")
        if kind == "cgroup2" and "" in paths:
            version: Literal[1, 2] = 2
            path = paths[""]
        elif kind == "cgroup" and controller in options.split(","):
            version, path = 1, paths.get(controller, "/")
        else:
            continue
        relative = path.removeprefix(inner.rstrip("/")).strip("/")
        folder = mount / relative if ".." not in relative.split("/") else mount
        for candidate in (folder, *folder.parents):
            if candidate.is_dir():
                found.append(CgroupPlace(version, candidate))
            if candidate == mount:
                break
    return sorted(found, key=lambda place: -place.version)


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _memory(place: CgroupPlace) -> tuple[int, int] | None:
    """(limit, what could still be taken below it) of a group; None without a limit. Pages of files that nobody uses are given back when asked for."""
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    names = ("memory.max", "memory.current", "inactive_file") if place.version == 2 else v1
    limit, used = ("".join(lines_of(place.folder / name)[:1]).strip() for name in names[:2])
    if not limit.isdigit() or int(limit) >= MAX_LIMIT_BYTES:  # the root group of v2 has none
        return None
    idle = next((line.split()[1] for line in lines_of(place.folder / "memory.stat") if line.startswith(f"{names[2]} ")), "0")
    return int(limit), int(limit) - (int(used) if used.isdigit() else 0) + int(idle)


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The smallest memory limit of this process's control groups and their ancestors (v1 and v2), or the machine's memory if none is smaller."""
    limits = [found[0] for place in places_of(root, "memory") if (found := _memory(place)) is not None]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take: of the machine, below its groups' limits, and below its own limit of addresses (`ulimit -v`)."""
    said = next((line.split()[1] for line in lines_of(root / "proc/meminfo") if line.startswith("MemAvailable:")), "")
    found = [int(said) << 10 if said.isdigit() else UNKNOWN_FREE_BYTES]
    found += [x[1] for place in places_of(root, "memory") if (x := _memory(place)) is not None]
    addresses, taken = resource.getrlimit(resource.RLIMIT_AS)[0], " ".join(lines_of(root / "proc/self/statm")).split()
    if addresses != resource.RLIM_INFINITY and taken:
        found.append(addresses - int(taken[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found))
