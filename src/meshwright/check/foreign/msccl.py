"""Is an MSCCL algorithm right? The executor's rules, then form, deadlock, races and values of its program, in every mode it is enabled for.

The program has one step per message, with messages as small as the file's biggest call makes them, and channels of the stated depth: the
hardest case that the executor can produce. Who asks for a verdict says how a file is read as a program (`drive.handover.verdicts`): the reader is
no part of the checker. Findings speak of the file: GPU, block and step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...errors import FormatError, Unsupported
from ...interop.msccl import ExecutorLimits, ImportedMsccl, MscclAlgo
from ...program.program import Program
from ..program.deadlock import check_deadlock, find_cycle
from ..verdict import Finding, Verdict, guarded
from ..whole import check_program
from .executor import check_executor, check_usage, step_words

__all__ = ["MscclReader", "judge_msccl", "smallest_fifo"]

_STEP = re.compile(r"rank (\d+) lane (\d+) step (\d+)")
_RANK = re.compile(r"\brank (\d+)")
_OURS = ("lane", "rank", "iteration", "other_lane", "other_iteration", "buffer")  # numbers of the program, not of the file
_KEYS = ("other_step", "sender", "waits_for", "last_step")


class MscclReader(Protocol):
    """The program of an algorithm that keeps the executor's rules, in one mode. Raises: FormatError, Unsupported."""

    def __call__(self, algo: MscclAlgo, *, in_place: bool, batch: int, run_copies: bool, depth: int) -> ImportedMsccl: ...


def judge_msccl(algo: MscclAlgo, read: MscclReader, *, limits: ExecutorLimits | None = None, run_copies: bool) -> Verdict:
    """All checks of a file. `facts`: steps, blocks, channels, modes judged, and the smallest FIFO depth with which it cannot deadlock.

    run_copies: judge it as run by a runtime that makes the local copies of `<copy>` elements; the executor ignores them.
    """
    caps = limits or ExecutorLimits()
    facts: dict[str, Any] = {
        "gpus": algo.ranks, "blocks": sum(len(g.blocks) for g in algo.gpus), "steps": sum(len(b.steps) for g in algo.gpus for b in g.blocks),
        "channels": algo.channels, "modes": ["in place" if mode else "out of place" for mode in algo.modes],
    }  # fmt: skip
    found = guarded("executor", lambda: check_executor(algo, caps))
    notes: list[str] = []
    copies = sum(len(g.copies) for g in algo.gpus)
    if copies:
        notes.append(f"{copies} <copy> elements: " + ("made before the first step" if run_copies else "the executor ignores them"))
    by_mode: dict[str, list[Finding]] = {}
    for in_place in algo.modes if not found else ():
        mode = guarded("executor", lambda: check_usage(algo, in_place))  # noqa: B023 called at once
        if not mode:
            for batch in _batches(algo, caps):
                program = partial(read, algo, in_place=in_place, batch=batch, run_copies=run_copies, depth=caps.depth)
                mode, depth = _judge(algo, program, caps.depth, notes)
                facts.setdefault("batch", batch)
                facts["smallest_fifo"] = max(facts.get("smallest_fifo") or 0, depth) or None
                if mode:
                    break
        by_mode["in place" if in_place else "out of place"] = mode
    found += _together(by_mode)
    facts["fifo"] = caps.depth
    return Verdict(findings=tuple(found), facts=facts, notes=tuple(dict.fromkeys(notes)))


def _together(by_mode: dict[str, list[Finding]]) -> list[Finding]:
    """The findings of all modes; those of one mode only say which."""
    out: list[Finding] = []
    for word, found in by_mode.items():
        others = [f.message for other, more in by_mode.items() if other != word for f in more]
        for f in found:
            if f.message not in others:
                text = f"{word}: {f.message}" if len(by_mode) > 1 else f.message
                out.append(replace(f, message=text, witness={**f.witness, "mode": word}))
            elif f.message not in [x.message for x in out]:
                out.append(f)
    return out


def _batches(algo: MscclAlgo, caps: ExecutorLimits) -> list[int]:
    """Batches that have to be judged: the smallest; if that is more than one chunk, races also with every other that cuts some step."""
    smallest = caps.batch(algo)
    longest = max((s.chunks for _, _, s in algo.steps()), default=1)
    return [smallest] if smallest == 1 else [smallest, *range(smallest + 1, longest)]


def _judge(algo: MscclAlgo, read: Callable[[], ImportedMsccl], fifo: int, notes: list[str]) -> tuple[list[Finding], int]:
    """Findings of one mode and the smallest FIFO depth (0: none helps, or not decided)."""
    try:
        made = read()
    except (FormatError, Unsupported) as error:
        return [Finding(check="executor", message=str(error), witness={"where": error.where})], 0
    verdict = check_program(made.program)
    notes += verdict.notes
    depth, stuck = 0, list(verdict.findings)
    if not any(f.check in ("wellformed", "format") for f in verdict.findings):
        if not any(f.check == "deadlock" for f in verdict.findings):  # what our fused steps survive, the executor's may not
            stuck = check_deadlock(made.program, at_once=True) or stuck
        depth = smallest_fifo(made.program, at_least_works=None if any(f.check == "deadlock" for f in stuck) else fifo)
    found = [_in_words_of_the_file(algo, made, f) for f in stuck]
    if depth and any(f.check == "deadlock" for f in found):
        found = [replace(f, message=f"{f.message}; it needs channels of depth {depth}", witness={**f.witness, "smallest_fifo": depth}) for f in found]
    return found, depth


def smallest_fifo(p: Program, *, at_least_works: int | None = None) -> int:
    """The smallest depth that, given to all channels, leaves the executor no deadlock; 0 if none does. `at_least_works`: known to be enough."""

    def live(depth: int) -> bool:
        return not find_cycle(replace(p, channels=replace(p.channels, depth=np.full(len(p.channels), depth, np.int32))), at_once=True)

    high = at_least_works if at_least_works is not None else max(1, len(p.steps))  # deeper than all messages of a channel
    if at_least_works is None and not live(high):
        return 0
    low = 0  # does not work, or is no depth
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if live(middle) else (middle, high)
    return high


# ---- findings in words of the file -------------------------------------------------------------------------------------
def _place(made: ImportedMsccl, step: int) -> dict[str, int]:
    place = {"gpu": int(made.gpu[step]), "tb": int(made.block[step]), "step": int(made.position[step])}
    if int(made.message[step]):
        place["message"] = int(made.message[step])
    return place


def _words(algo: MscclAlgo, made: ImportedMsccl, step: int) -> str:
    gpu, tb, position = int(made.gpu[step]), int(made.block[step]), int(made.position[step])
    if tb < 0:
        return f"gpu {gpu} copy {position}"
    block = next(b for g in algo.gpus if g.id == gpu for b in g.blocks if b.id == tb)
    s = block.steps[position]
    return step_words(gpu, tb, position) + (f" [after step {s.deps} of tb {s.depid}]" if s.depid >= 0 else "")


def _in_words_of_the_file(algo: MscclAlgo, made: ImportedMsccl, f: Finding) -> Finding:
    message = _STEP.sub(lambda m: _words(algo, made, int(m[3])), f.message)
    message = _RANK.sub(lambda m: f"gpu {m[1]}", message).replace(" (iteration 0)", "").replace(" (iterations 0 and 0)", "")
    witness: dict[str, Any] = {k: v for k, v in f.witness.items() if k not in _OURS}
    steps = len(made.program.steps)
    if _is_step(f.witness, "step", steps):
        witness = {**witness, **_place(made, int(f.witness["step"]))}
    else:
        witness.pop("step", None)
        if isinstance(f.witness.get("rank"), int):
            witness["gpu"] = f.witness["rank"]
    for key in _KEYS:
        if _is_step(f.witness, key, steps):
            witness[key] = _place(made, int(f.witness[key]))
    if isinstance(f.witness.get("cycle"), list):
        witness["cycle"] = [{**_place(made, int(x["step"])), "waits": x["waits"]} for x in f.witness["cycle"]]
    return replace(f, message=message, witness=witness)


def _is_step(witness: Mapping[str, Any], key: str, steps: int) -> bool:
    return isinstance(witness.get(key), int) and 0 <= witness[key] < steps
