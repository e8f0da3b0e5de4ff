"""One process per device (or several): who runs where, what they are told, their output, and the end of all when one fails."""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import Interrupted, RankFailed, RunTimeout, UsageError
from ..run.machine.cpu_use import MachineUse, MachineUseRecorder
from .aggregators import AGGREGATORS_VARIABLE, aggregators_of
from .handle import StandingLab
from .process import LabProcess

__all__ = ["Place", "RunResult", "places", "rank_environment", "run_ranks"]

GRACE_S = 3.0  # between the polite end and the other
MAX_LINE_BYTES = 1 << 16  # a longer line is passed on in parts


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place. `local_rank` counts the ranks of one device."""

    rank: int
    device: int
    local_rank: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """`returncodes[rank]` (of torchrun's agents: one per device); `first_failure` is the rank that failed first, or None.

    `machine` says how much of the processors other programs used meanwhile: above a tenth (`machine.disturbed`), times prove little.
    """

    returncodes: list[int]
    first_failure: int | None
    wall_s: float
    outputs: list[bytes] = field(default_factory=list)
    machine: MachineUse | None = None

    @property
    def exit_code(self) -> int:
        """0, or the code of the first failure as a shell shows it (128 + signal)."""
        if self.first_failure is None:
            return 0
        code = self.returncodes[self.first_failure]
        return code if code >= 0 else 128 - code


def places(devices: int, *, ranks: Sequence[int] | None = None, order: Sequence[int] | None = None, per_device: int = 1) -> list[Place]:
    """`ranks`: the devices that take part (default all); `order`: of those, which device each rank (or block of `per_device` ranks) gets.

    Raises: UsageError.
    """
    chosen = list(range(devices)) if ranks is None else list(ranks)
    for what, numbers in (("--ranks", chosen), ("--order", list(order) if order is not None else chosen)):
        wrong = next((x for x in numbers if not 0 <= x < devices), None)
        if wrong is not None:
            raise UsageError(f"there is no device {wrong}", where=what, hint=f"devices are 0-{devices - 1}")
        if len(set(numbers)) < len(numbers):
            raise UsageError("a device is named twice", where=what, hint="several ranks per device: --per-device")
    if order is not None and sorted(order) != sorted(chosen):
        raise UsageError("must name each device that takes part once", where="--order", hint=f"they are {','.join(map(str, chosen))}")
    if not chosen:
        raise UsageError("no device takes part", where="--ranks")
    if per_device < 1:
        raise UsageError(f"must be at least 1, got {per_device}", where="--per-device")
    at = list(order) if order is not None else chosen
    return [Place(rank=i * per_device + k, device=device, local_rank=k) for i, device in enumerate(at) for k in range(per_device)]


def rank_environment(lab: StandingLab, taken: Sequence[Place], place: Place, port: int) -> dict[str, str]:
    """What a rank finds in its environment beside what it inherits."""
    local = sum(p.device == place.device for p in taken)
    found = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(len(taken)),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(sorted({p.rank - p.local_rank for p in taken}).index(place.rank - place.local_rank)),
        "MASTER_ADDR": lab.address(taken[0].device),
        "MASTER_PORT": str(port),
    }
    return found | device_environment(lab, place.device)


def device_environment(lab: StandingLab, device: int) -> dict[str, str]:
    """What any process on a device finds in its environment."""
    state = lab.state
    found = {
        "GLOO_SOCKET_IFNAME": state.interface,
        "OMP_NUM_THREADS": "1",
        "MESHWRIGHT_LAB": state.name,
        "MESHWRIGHT_FABRIC": str(lab.folder / "fabric.toml"),
        "MESHWRIGHT_DEVICE": state.devices[device],
    }
    if adding := aggregators_of(lab.wiring, device):
        found[AGGREGATORS_VARIABLE] = ",".join(f"{switch}={address}" for switch, address in adding.items())
    share = state.shares[device] if state.shares else 0.0
    if share:
        found |= {"MESHWRIGHT_CPU_SHARE": f"{share:g}", "MESHWRIGHT_CPU_PACING": state.pacing}
    return found


def torchrun_argv(lab: StandingLab, taken: Sequence[Place], place: Place, port: int, argv: Sequence[str]) -> list[str]:
    """One agent per device, as on several nodes."""
    nodes = sorted({p.rank - p.local_rank for p in taken})
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--nproc-per-node", str(len(taken) // len(nodes)),
        "--node-rank", str(nodes.index(place.rank)), "--master-addr", lab.address(taken[0].device), "--master-port", str(port), *argv,
    ]  # fmt: skip


def run_ranks(
    lab: StandingLab, argv: Sequence[str], taken: Sequence[Place], *, env: Mapping[str, str] | None = None, torchrun: bool = False,
    timeout_s: float | None = None, sink: Callable[[int, bytes], None] | None = None, folder: Path | None = None, port: int | None = None,
) -> RunResult:  # fmt: skip
    """Start all ranks, pass their output on by lines (`sink(rank, line)`; None keeps it), wait, and leave no process.

    When a rank fails the others get SIGTERM, and SIGKILL three seconds later. Raises: RunTimeout, Interrupted, UsageError, RunError.
    """
    run = secrets.token_hex(8)
    port = lab.control.free_port(taken[0].device) if port is None else port
    started: dict[int, LabProcess] = {}
    began = time.monotonic()
    use = MachineUseRecorder(lab.state.holder).start()
    with ExitStack() as stack:
        stack.callback(_end, lab, run, started)
        try:
            for place in taken:
                if torchrun and place.local_rank:
                    continue
                environment = {**os.environ, **rank_environment(lab, taken, place, port), **(env or {})}
                command = list(argv)
                if torchrun:
                    command = torchrun_argv(lab, taken, place, port, argv)
                    environment = {**os.environ, **device_environment(lab, place.device), **(env or {})}
                started[place.rank] = lab.control.start(
                    run, place.device, command, environment, stdout=-1, stderr=-2, folder=folder, groups=lab.groups_of(place.device)
                )
            result = replace(_watch(started, timeout_s, sink, began), machine=use.stop())
        except KeyboardInterrupt:
            _ask_to_end(started.values())
            raise Interrupted("interrupted; all ranks have been ended", where=lab.state.name) from None
    return result


def _end(lab: StandingLab, run: str, started: Mapping[int, LabProcess]) -> None:
    try:
        if started:
            lab.control.end(run)
    finally:
        for process in started.values():
            process.close()


def _ask_to_end(processes: Iterable[LabProcess]) -> None:
    left = [p for p in processes if p.poll() is None]
    for process in left:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in left:
        while process.poll() is None and time.monotonic() < deadline:
            select.select([process.fileno()], [], [], 0.05)


class _Lines:
    """Bytes of one rank cut into lines."""

    def __init__(self, rank: int, sink: Callable[[int, bytes], None]) -> None:
        self.rank, self.sink, self.rest = rank, sink, b""

    def take(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.sink(self.rank, line)
        if self.rest and (not data or len(self.rest) > MAX_LINE_BYTES):
            self.sink(self.rank, self.rest)
            self.rest = b""


def _watch(started: Mapping[int, LabProcess], timeout_s: float | None, sink: Callable[[int, bytes], None] | None, began: float) -> RunResult:
    kept: dict[int, list[bytes]] = {rank: [] for rank in started}
    lines = {rank: _Lines(rank, sink or (lambda r, line: kept[r].append(line + b"\n"))) for rank in started}
    poll = select.poll()
    reads: dict[int, int] = {}
    waits: dict[int, int] = {}
    for rank, process in started.items():
        assert process.stdout is not None
        reads[process.stdout.fileno()] = rank
        waits[process.fileno()] = rank
    for fd in (*reads, *waits):
        poll.register(fd, select.POLLIN)
    first: int | None = None
    deadline = None if timeout_s is None else began + timeout_s
    stop_at: float | None = None  # when what still runs after a failure is no longer waited for
    while waits or (reads and stop_at is None):
        ends = [x for x in (deadline if first is None else None, stop_at) if x is not None]
        left = max(0.0, min(ends) - time.monotonic()) if ends else None
        for fd, _ in poll.poll(None if left is None else left * 1000 + 1):
            if fd in reads:
                data = os.read(fd, 1 << 16)
                lines[reads[fd]].take(data)
                if not data:
                    poll.unregister(fd)
                    del reads[fd]
            elif fd in waits:
                rank = waits.pop(fd)
                poll.unregister(fd)
                code = started[rank].poll()
                if code and first is None:
                    first = rank
                    for process in started.values():
                        process.terminate()
                    stop_at = time.monotonic() + GRACE_S
                elif not waits and stop_at is None:
                    stop_at = time.monotonic() + GRACE_S  # a child that left the run may hold the output open
        now = time.monotonic()
        if first is None and deadline is not None and now > deadline and waits:
            slow = sorted(waits.values())
            raise RunTimeout(
                f"rank{'s' if len(slow) > 1 else ''} {', '.join(map(str, slow))} still ran after {timeout_s:g} s",
                where="--timeout", hint="all ranks have been ended", data={"ranks": slow, "timeout_s": timeout_s},
            )  # fmt: skip
        if stop_at is not None and now > stop_at:
            break
    _drain(reads, lines)
    codes = [p.poll() for _, p in sorted(started.items())]
    return RunResult(
        returncodes=[-signal.SIGKILL if c is None else c for c in codes],
        first_failure=None if first is None else sorted(started).index(first),
        wall_s=time.monotonic() - began,
        outputs=[b"".join(kept[rank]) for rank in sorted(kept)],
    )


def _drain(reads: Mapping[int, int], lines: Mapping[int, _Lines]) -> None:
    for fd, rank in reads.items():
        while select.select([fd], [], [], 0)[0]:
            data = os.read(fd, 1 << 16)
            if not data:
                break
            lines[rank].take(data)
        lines[rank].take(b"")


def require_success(result: RunResult) -> RunResult:
    """Raises: RankFailed with the last words of the rank that failed first."""
    if result.first_failure is not None:
        rank = result.first_failure
        words = result.outputs[rank].decode(errors="replace").strip().splitlines() if result.outputs else []
        raise RankFailed(
            f"rank {rank} ended with {result.returncodes[rank]}", where=f"rank {rank}",
            hint=f"its last line of output: {words[-1][:300]}" if words else "",
            data={"rank": rank, "returncodes": result.returncodes},
        )  # fmt: skip
    return result
