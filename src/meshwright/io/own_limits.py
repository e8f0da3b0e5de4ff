"""What this process may use of the machine, as the system's own files say: its control groups, and how much memory it can still take."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["CgroupPlace", "free_bytes", "lines_of", "memory_limit_bytes", "memory_room_bytes", "places_of"]

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


@dataclass(frozen=True)
class _Memory:
    """Of a group with a limit. `idle_bytes`: pages of files that nobody uses, given back when asked for; `held_bytes`: processes' own memory, the
    kernel's, and files that processes have mapped (their code), so what other files cannot have."""

    limit_bytes: int
    used_bytes: int
    idle_bytes: int
    held_bytes: int


def _memory(place: CgroupPlace) -> _Memory | None:
    """None without a limit."""
    names = ("memory.max", "memory.current") if place.version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, said = ("".join(lines_of(place.folder / name)[:1]).strip() for name in names)
    if not limit.isdigit() or int(limit) >= MAX_LIMIT_BYTES:  # the root group of v2 has none
        return None
    rows = [line.split() for line in lines_of(place.folder / "memory.stat")]
    stat = {row[0].removeprefix("total_"): int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}  # v1: of its groups too, said last
    used, idle = int(said) if said.isdigit() else 0, stat.get("inactive_file", 0)
    mapped = stat.get("file_mapped", stat.get("mapped_file", 0)) - stat.get("shmem", 0)
    held = used - idle - stat.get("active_file", 0) + max(0, mapped)
    return _Memory(int(limit), used, idle, min(used, max(0, held)))


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The smallest memory limit of this process's control groups and their ancestors (v1 and v2), or the machine's memory if none is smaller."""
    limits = [found.limit_bytes for place in places_of(root, "memory") if (found := _memory(place)) is not None]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def memory_room_bytes(root: Path = Path("/")) -> int | None:
    """What pages of files can fill below the limits of this process's groups, beside what is held there now. None: no group has a limit."""
    rooms = [found.limit_bytes - found.held_bytes for place in places_of(root, "memory") if (found := _memory(place)) is not None]
    return min(rooms, default=None)


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take: of the machine, below its groups' limits, and below its own limit of addresses (`ulimit -v`)."""
    said = next((line.split()[1] for line in lines_of(root / "proc/meminfo") if line.startswith("MemAvailable:")), "")
    found = [int(said) << 10 if said.isdigit() else UNKNOWN_FREE_BYTES]
    found += [x.limit_bytes - x.used_bytes + x.idle_bytes for place in places_of(root, "memory") if (x := _memory(place)) is not None]
    addresses, taken = resource.getrlimit(resource.RLIMIT_AS)[0], " ".join(lines_of(root / "proc/self/statm")).split()
    if addresses != resource.RLIM_INFINITY and taken:
        found.append(addresses - int(taken[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found))
