"""What Slurm's `scontrol show node -o` and `scontrol show job -d -o` print: one line per node or job, words `Name=value`.

Written against Slurm 22.05. What a line does not say is 0 or empty; a line that is of another kind is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import FormatError
from ..gres import gpus_in

__all__ = ["SlurmJob", "SlurmNode", "SlurmPart", "expanded", "parse_jobs", "parse_nodes", "parse_version"]

MAX_LINES = 200_000
MAX_HOSTS = 65_536  # of one list
MAX_HOST_TEXT = 1024  # characters of one host's name, or of the numbers in one bracket
MAX_PARTS = 1_000_000  # nodes of all jobs of one output
MAX_GPUS = 1024  # numbers of one server
_WORD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=")
_HOSTS_PIECE = re.compile(r"[^,\[\]]++|\[([\d,-]+)\]|,")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_DOWN = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "UNKNOWN", "INVAL")


@dataclass(frozen=True)
class SlurmNode:
    """`up`: it takes jobs. `address`: where it is reached. `type`: of its GPUs, "" where they are of several or it is not said."""

    name: str
    address: str
    gpus: int
    type: str
    cores: int
    memory_bytes: int
    up: bool
    state: str


class SlurmPart(NamedTuple):
    """What a job has on one node; numbers of GPUs."""

    node: str
    cores: int
    memory_bytes: int
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class SlurmJob:
    """`code`: exit code, 128 + signal for a signal."""

    id: str
    name: str
    state: str
    reason: str
    code: int
    parts: tuple[SlurmPart, ...]


def _fields(line: str) -> Iterator[tuple[str, str]]:
    found = list(_WORD.finditer(line))
    for here, following in zip(found, [*found[1:], None], strict=True):
        yield here[1], line[here.end() : following.start() if following else len(line)].strip()


def _lines(text: str, first: str, where: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > MAX_LINES:
        raise FormatError(f"{len(lines)} lines, more than {MAX_LINES}", where=where)
    for n, line in enumerate(lines, 1):
        if not line.startswith(f"{first}="):
            if line.startswith("No "):  # "No jobs in the system"
                continue
            raise FormatError(f"does not begin with {first}=", where=f"{where}: line {n}", hint="`scontrol show ... -o` of Slurm 22.05 or later")
        here = f"{where}: line {n}"
        words = list(_fields(line))
        if not words[0][1]:
            raise FormatError(f"{first} is empty", where=here)
        yield here, words


def _whole(text: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise FormatError(f"{text[:32]!r} is no whole number", where=where)
    return int(text)


def _bytes(text: str, where: str) -> int:
    """MiB, or with a unit."""
    match = re.fullmatch(r"(\d{1,12})(?:\.\d+)?([KMGT]?)", text)
    if not match:
        raise FormatError(f"{text[:32]!r} is no size", where=where)
    return int(match[1]) << {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match[2]]


def _numbers(text: str, where: str) -> tuple[int, ...]:
    """`0-2,5`."""
    found: list[int] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if not match or int(match[2] or match[1]) - int(match[1]) not in range(MAX_GPUS):
            raise FormatError(f"{text[:32]!r} are no numbers", where=where)
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(found) > MAX_GPUS:
            raise FormatError(f"more than {MAX_GPUS} numbers", where=where)
    return tuple(found)


def expanded(hosts: str, where: str = "hosts") -> tuple[str, ...]:
    """Names of a list of hosts: `a,n[1-3,07]-[0-1]`. Raises: FormatError."""
    found: list[str] = []
    open_: list[str] = [""]  # names of the piece that is being read
    at = 0
    while at < len(hosts):
        piece = _HOSTS_PIECE.match(hosts, at)
        if piece is None or len(open_[0]) + len(piece[0]) > MAX_HOST_TEXT:
            raise FormatError(f"{hosts[:64]!r} is no list of hosts", where=where)
        if piece[0] == ",":
            found += filter(None, open_)
            open_ = [""]
        else:
            numbers = (piece[0],) if piece[1] is None else _host_numbers(piece[1], MAX_HOSTS // len(open_), where)
            open_ = [before + number for before in open_ for number in numbers]
        if len(found) + len(open_) > MAX_HOSTS:
            raise FormatError(f"more than {MAX_HOSTS} hosts", where=where)
        at = piece.end()
    return (*found, *filter(None, open_))


def _host_numbers(text: str, most: int, where: str) -> list[str]:
    """`1-3,07`: 1, 2, 3, 07."""
    found: list[str] = []
    for piece in text.split(","):
        r = _RANGE.fullmatch(piece)
        if not r or int(r[2] or r[1]) - int(r[1]) not in range(MAX_HOSTS):
            raise FormatError(f"{text[:64]!r} are no numbers of hosts", where=where)
        found += [f"{n:0{len(r[1])}d}" for n in range(int(r[1]), int(r[2] or r[1]) + 1)]
        if len(found) > most:
            raise FormatError(f"more than {MAX_HOSTS} hosts", where=where)
    return found


def parse_nodes(text: str, where: str = "scontrol show node") -> list[SlurmNode]:
    """Raises: FormatError with the line."""
    found = []
    for here, words in _lines(text, "NodeName", where):
        say = dict(words)
        gpus = gpus_in(say.get("Gres", ""))
        types = {x.type for x in gpus if x.gpus}
        state = say.get("State", "UNKNOWN")
        found.append(SlurmNode(
            name=say["NodeName"], address=say.get("NodeAddr", "") or say["NodeName"], gpus=sum(x.gpus for x in gpus),
            type=types.pop() if len(types) == 1 else "",
            cores=_whole(say.get("CPUTot", "0"), f"{here}: CPUTot"), memory_bytes=_whole(say.get("RealMemory", "0"), f"{here}: RealMemory") << 20,
            up="*" not in state and not any(word in state for word in _DOWN), state=state,  # `IDLE*` does not answer
        ))  # fmt: skip
    return found


def parse_jobs(text: str, where: str = "scontrol show job") -> list[SlurmJob]:
    """Raises: FormatError with the line."""
    found, left = [], MAX_PARTS
    for here, words in _lines(text, "JobId", where):
        say: dict[str, str] = {}
        parts: list[SlurmPart] = []
        nodes: tuple[str, ...] = ()
        cores = memory = 0
        for name, value in words:
            if name == "Nodes":
                nodes, cores, memory = expanded(value, here), 0, 0
            elif name == "CPU_IDs" and nodes:
                cores = len(_numbers(value, here)) if value else 0
            elif name == "Mem" and nodes:
                memory = _bytes(value, here)
            elif name == "GRES" and nodes:  # the last word of a node's line
                numbers = tuple(n for x in gpus_in(value) if x.numbers for n in _numbers(x.numbers, here))
                left -= len(nodes)
                if left < 0:
                    raise FormatError(f"more than {MAX_PARTS} nodes of all jobs", where=here)
                parts += [SlurmPart(node, cores, memory, numbers) for node in nodes]
                nodes = ()
            else:
                say.setdefault(name, value)
        code, _, signal = say.get("ExitCode", "0:0").partition(":")
        number = 128 + _whole(signal, here) if signal not in ("", "0") else _whole(code, here)
        found.append(SlurmJob(
            id=say["JobId"].split()[0], name=say.get("JobName", ""), state=say.get("JobState", ""), reason=say.get("Reason", ""), code=number,
            parts=tuple(parts),
        ))  # fmt: skip
    return found


def parse_version(text: str, where: str = "sinfo --version") -> tuple[int, int]:
    """Of `sinfo --version`: `slurm-wlm 22.05.8` -> (22, 5). Raises: FormatError."""
    match = re.search(r"\bslurm(?:-wlm)? (\d{1,3})\.(\d{1,3})", text)
    if not match:
        raise FormatError(f"{text[:64]!r} names no version of Slurm", where=where)
    return int(match[1]), int(match[2])
