"""From what is known after a failure to ONE typed error that names the first cause.

Under gloo a broken connection names an address, and survivors blame whoever left before them. So addresses are ignored: the culprit is the
rank that died, else the rank that reports an exception of its own, else the rank that others wait for and that waits for nobody.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import MeshwrightError, RankDied, RankFailed, RunError, RunTimeout
from ..machine.process import CALIBRATING, TRAINING, FailureReport

__all__ = ["first_cause", "limit_error", "timeout_error", "typed"]

_NOTICE = re.compile(r"(\[rank\d+\]:)?\[[WI]\d+ |USDT:")  # torch's own log lines
Describe = Callable[[int, int], str]  # (rank, position in its walk) -> the step in words
Place = tuple[int, int, int, int]  # (training step, position, peer + 1, state)


def first_cause(
    exits: Mapping[int, int], reports: Mapping[int, FailureReport], places: Sequence[Place], describe: Describe, outputs: Mapping[int, str]
) -> RunError:
    """`exits`: return codes of ranks that ended badly by themselves, in the order in which they were seen; `outputs`: their last lines."""
    killed = [r for r, code in exits.items() if code < 0 and r not in reports]
    if killed:
        return _died(killed[0], exits[killed[0]], places, describe, outputs)
    own = [r for r in reports.values() if r.kind == "exception"]
    if own:
        return _failed(min(own, key=lambda r: r.time_s), places, describe)
    silent = [r for r in exits if r not in reports]
    if silent:
        return _died(silent[0], exits[silent[0]], places, describe, outputs)
    first = min(reports.values(), key=lambda r: r.time_s)
    missing = [r for r in range(len(places)) if r not in reports]
    culprit = _waited_for(reports, missing)
    message = f"rank {first.rank} lost rank {first.peer}: {first.message}"
    if culprit is not None and culprit != first.peer:
        message += f"; rank {culprit} waits for nobody and may be the cause"
    kind: type[RunError] = RunTimeout if "timed out" in first.message.lower() else RankFailed
    return kind(
        message, where=_where(first.rank, places, describe), hint="see the reports of all ranks in the error's data", data=_data(first.rank, reports)
    )


def timeout_error(places: Sequence[Place], describe: Describe, timeout_s: float, stopped: Sequence[int]) -> RunTimeout:
    """No rank has moved for `timeout_s`. Names a stopped rank, else those that wait for nobody, else a circle of waiting."""
    waits = {r: p[2] - 1 for r, p in enumerate(places) if p[2]}
    idle = [r for r in range(len(places)) if r not in waits]
    culprits = list(stopped) or idle or list(waits)
    rank = culprits[0]
    waiting = [r for r, peer in waits.items() if peer == rank]
    what = "is stopped" if stopped else "does not move" if idle else "and the others wait for each other"
    message = f"rank {rank} {what}; nothing has happened for {timeout_s:g} s"
    if waiting:
        message += f", rank {waiting[0]} waits for it"
    data = {"rank": rank, "peer": waiting[0] if waiting else -1, "waits": {str(r): p for r, p in waits.items()}, "stopped": list(stopped)}
    return RunTimeout(message, where=_where(rank, places, describe), hint="raise --timeout if the machine is only slow", data=data)


def limit_error(late: Sequence[int], stopped: Sequence[int], limit_s: float, hint: str) -> RunTimeout:
    """The ranks `late` had not ended when `limit_s` were over."""
    rank = (*stopped, *late)[0]
    what = f"rank {rank} is stopped" if stopped else f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} had not ended"
    message = f"the ranks were not done after {limit_s:g} s and were ended: {what}"
    return RunTimeout(message, where=f"rank {rank}", hint=hint, data={"rank": rank, "ranks": list(late), "stopped": list(stopped)})


def _died(rank: int, code: int, places: Sequence[Place], describe: Describe, outputs: Mapping[int, str]) -> RankDied:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        how = f"was killed by {name}"
        hint = "the kernel kills when memory runs out: see `dmesg`" if -code == signal.SIGKILL else ""
    else:
        how, hint = f"ended with exit code {code}", ""
        last = [x for x in outputs.get(rank, "").strip().splitlines() if not _NOTICE.match(x)]
        if last:
            hint = f"its last line of output: {last[-1][:300]}"
    waiting = [r for r, p in enumerate(places) if p[2] - 1 == rank]
    peer = places[rank][2] - 1 if places[rank][2] else (waiting[0] if waiting else -1)
    message = f"rank {rank} {how}{_when(places[rank])}"
    if waiting:
        message += f"; rank {waiting[0]} was waiting for it"
    elif peer >= 0:
        message += f" while it waited for rank {peer}"
    return RankDied(
        message, where=_where(rank, places, describe), hint=hint, data={"rank": rank, "exit": code, "peer": peer, "step": places[rank][0]}
    )


def _when(place: Place) -> str:
    step, _, _, state = place
    return f" in training step {step}" if state >= TRAINING else " while measuring" if state == CALIBRATING else " while starting"


def _failed(report: FailureReport, places: Sequence[Place], describe: Describe) -> RunError:
    rank = report.rank
    waiting = [r for r, p in enumerate(places) if p[2] - 1 == rank and r != rank]
    place = f" in training step {report.training_step}" if report.training_step >= 0 else _when(places[rank])
    what = report.message if report.code else f"{report.error}: {report.message}"  # a typed error speaks for itself
    message = f"rank {rank} failed{place}: {what}"
    data = {"rank": rank, "step": report.training_step, "peer": waiting[0] if waiting else -1, "traceback": report.traceback, "code": report.code}
    where = report.where or _where(rank, places, describe)
    return RankFailed(message, where=where, hint=report.hint or "run with --debug for the traceback", data=data)


def _waited_for(reports: Mapping[int, FailureReport], missing: Sequence[int]) -> int | None:
    peers = {r.peer for r in reports.values()}
    for rank in missing:
        if rank in peers:
            return rank
    return None


def _where(rank: int, places: Sequence[Place], describe: Describe) -> str:
    return describe(rank, places[rank][1]) if places[rank][3] >= 3 else f"rank {rank}"


def _data(rank: int, reports: Mapping[int, FailureReport]) -> dict[str, Any]:
    views = {str(r): {"peer": v.peer, "step": v.training_step, "message": v.message} for r, v in reports.items()}
    return {"rank": rank, "peer": reports[rank].peer, "step": reports[rank].training_step, "views": views}


def typed(report: FailureReport) -> MeshwrightError | None:
    """The error itself, if the rank raised one of ours before training began (wrong data, wrong plan): it is not the rank's fault."""
    kinds: dict[str, type[MeshwrightError]] = {c.code: c for c in _subclasses(MeshwrightError)}
    if report.training_step >= 0 or report.code not in kinds or report.code in ("missing-extra",):
        return None
    return kinds[report.code](report.message, where=report.where, hint=report.hint)


def _subclasses(cls: type[MeshwrightError]) -> list[type[MeshwrightError]]:
    return [cls, *(x for s in cls.__subclasses__() for x in _subclasses(s))]
