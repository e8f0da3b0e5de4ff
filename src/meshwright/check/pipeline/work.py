"""What the steps of a pipeline plan must compute, from what the plan says of its schedule: actions per device, their ops, buffers and bytes.

The contract of a program with compute. A step is named by (stage, micro-batch, phase) and so is everything that it consumes and produces:
  F(k, m)  reads weights:k and the output of F(k - 1, m); makes saved:k:m and the output out:k:m (none at the last stage)
  B(k, m)  reads weights:k, saved:k:m, the input that its F read, and the gradient of its output (none at the last stage); makes the gradient of
           its input gradout:k:m (none at stage 0) and adds to gradients:k
  I and W  do what B does, I but for gradients:k, W but for gradout:k:m, of one micro-batch in this order
  O and R  of what the schedule lets wait in the host's memory: copy saved:k:m to kept:k:m there, and that to again:k:m, which the backward reads
What arrives from another device lies in in:k:m and gradin:k:m, what comes from the same device where its maker left it (docs/formats.md). Nothing
here is taken from planners or lowering: names, orders, copies and sizes are derived from the document again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...plan.plan import Plan

__all__ = ["Act", "NoWork", "PipelineWork", "pipeline_work"]

PHASES = "FBIW"


class NoWork(Exception):
    """The plan's schedule is none, or contradicts itself."""


class Act(NamedTuple):
    """One action: `last` > `first` where several micro-batches run at once."""

    phase: str
    stage: int
    first: int
    last: int
    beside: int = -1  # in a pair of a forward and a backward that run at once: the stage of the other half

    @property
    def microbatches(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """`placement[copy][stage]`: device; `copy_of[m]`; `orders[device]`; `reduced[copy, stage]`: how gradients are summed ("reduce" | "all-reduce");
    `gathered`: stages whose weights every rank holds a part of. `sizes`: figures of the problem per stage of the model."""

    devices: int
    stages: int
    data: int
    split: bool
    parts: int
    placement: tuple[tuple[int, ...], ...]
    copy_of: tuple[int, ...]
    orders: tuple[tuple[Act, ...], ...]
    reduced: Mapping[tuple[int, int], str]
    gathered: frozenset[int]
    sizes: Mapping[str, tuple[int, ...]]
    away: tuple[frozenset[tuple[int, int]], ...] = ()  # per device: (stage, micro-batch) whose activations wait in the host's memory

    @property
    def ranks(self) -> int:
        return self.devices * self.data

    def hosted(self, device: int) -> list[tuple[int, int]]:
        """(copy, stage) of what the device holds."""
        return [(c, k) for c, where in enumerate(self.placement) for k, d in enumerate(where) if d == device]

    def holders(self, stage: int) -> list[int]:
        """Ranks that hold a copy of the stage, in order."""
        devices = sorted({where[stage] for where in self.placement})
        return [d * self.data + r for d in devices for r in range(self.data)]

    def suffix(self, copy: int) -> str:
        return f":c{copy}" if len(self.placement) > 1 else ""

    def share(self, name: str, stage: int, parts: int) -> int:
        """Bytes of a piece of the model's stage that this stage is one of."""
        return -(-self.sizes[name][stage * self.devices // self.stages] // parts)

    # ---- what an action is called, reads and makes ------------------------------------------------------------
    def op(self, a: Act) -> dict[str, Any]:
        """The columns of its op."""
        copy, count = self.copy_of[a.first], a.last - a.first + 1
        graph = f"stage{a.stage}{self.suffix(copy)}" + (f":x{count}" if count > 1 else "") + (f"&{a.beside}" if a.beside >= 0 else "")
        return {
            "name": a.phase, "graph": graph, "module": f"{a.first}-{a.last}" if count > 1 else "", "copy": copy, "stage": a.stage,
            "microbatch": a.first, "accumulate": int(a.phase in "BW"),
        }  # fmt: skip

    def held(self, kind: str, stage: int, copy: int) -> str:
        return f"{kind}:{stage}{self.suffix(copy)}"

    def given(self, stage: int, m: int) -> str:
        """The buffer with the input of F; "" at the first stage, whose input are samples."""
        where = self.placement[self.copy_of[m]]
        return "" if not stage else f"in:{stage}:{m}" if where[stage - 1] != where[stage] else f"out:{stage - 1}:{m}"

    def returned(self, stage: int, m: int) -> str:
        """The buffer with the gradient of the output; "" at the last stage, which has the loss."""
        where = self.placement[self.copy_of[m]]
        if stage == self.stages - 1:
            return ""
        return f"gradin:{stage}:{m}" if where[stage + 1] != where[stage] else f"gradout:{stage + 1}:{m}"

    def waits(self, stage: int, m: int) -> bool:
        """Whether what the stage saves of a micro-batch waits in the host's memory."""
        return any((stage, m) in row for row in self.away)

    def reads(self, a: Act) -> set[str]:
        found = {self.held("weights", a.stage, self.copy_of[a.first])}
        for m in a.microbatches:
            kept = f"{'again' if self.waits(a.stage, m) else 'saved'}:{a.stage}:{m}"
            found |= {self.given(a.stage, m)} if a.phase == "F" else {self.given(a.stage, m), self.returned(a.stage, m), kept}
        return found - {""}

    def makes(self, a: Act) -> set[str]:
        found = {self.held("gradients", a.stage, self.copy_of[a.first])} if a.phase in "BW" else set()
        for m in a.microbatches:
            if a.phase == "F":
                found |= {f"saved:{a.stage}:{m}"} | ({f"out:{a.stage}:{m}"} if a.stage < self.stages - 1 else set())
            elif a.phase in "BI" and a.stage:
                found.add(f"gradout:{a.stage}:{m}")
        return found

    def bytes_of(self, device: int) -> Iterator[tuple[str, int, bool]]:
        """(name, bytes, whether exactly so many) of the buffers of a rank of the device whose size the problem states."""
        message, chunks = "message_bytes", self.stages // self.devices
        for copy, k in self.hosted(device):
            gradient = self.share("gradient_bytes", k, chunks)
            yield self.held("gradients", k, copy), gradient, False
            for m, on in enumerate(self.copy_of):
                if on != copy:
                    continue
                before, after = self.given(k, m), self.returned(k, m)
                arrives = self.share(message, k - 1, self.parts) if before.startswith("in:") else 0
                saved = max(0, self.share("activation_bytes", k, chunks * self.parts) - arrives)
                for name in ("saved", "kept", "again") if self.waits(k, m) else ("saved",):
                    yield f"{name}:{k}:{m}", saved, True
                if before.startswith("in:"):
                    yield before, arrives, True
                if k < self.stages - 1:
                    yield f"out:{k}:{m}", self.share(message, k, self.parts), True
                if after.startswith("gradin:"):
                    yield after, self.share(message, k, self.parts), True
                if k:
                    yield f"gradout:{k}:{m}", self.share(message, k - 1, self.parts), True


def pipeline_work(plan: Plan) -> PipelineWork:
    """What the plan says its steps compute. Raises: NoWork."""
    try:
        return _read(plan.job["schedule"], plan.job["problem"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise NoWork(f"job.schedule and job.problem say no work that can be followed: {type(error).__name__}: {str(error)[:120]}") from None


def _read(doc: Mapping[str, Any], problem: Mapping[str, Any]) -> PipelineWork:
    devices, stages, parts, data = int(doc["devices"]), int(doc["stages"]), int(doc["parts"]), int(problem["data"])
    placement = tuple(tuple(int(d) for d in row) for row in doc["placement"])
    copy_of = tuple(int(c) for c in doc["copy_of"])
    rows = [[(str(kind), int(stage), int(copy)) for kind, stage, copy, _, _ in row] for row in doc["collectives"]]
    moved = {(copy, stage): kind for row in rows for kind, stage, copy in row if kind != "gather"}
    sizes = {n: tuple(int(x) for x in problem[n]) for n in ("activation_bytes", "message_bytes", "gradient_bytes")}
    work = PipelineWork(
        devices=devices, stages=stages, data=data, split=bool(doc["split"]), parts=parts, placement=placement, copy_of=copy_of,
        orders=tuple(tuple(_act(text) for text in row.split()) for row in doc["orders"]),
        reduced=moved if any(sizes["gradient_bytes"]) else {}, sizes=sizes,
        away=tuple(frozenset((int(stage), int(m)) for stage, m, _, _ in row) for row in doc.get("offloads", ())),
        gathered=frozenset(stage for row in rows for kind, stage, _ in row if kind == "gather") if any(sizes["gradient_bytes"]) else frozenset(),
    )  # fmt: skip
    for wrong, text in (
        (devices != int(problem["devices"]) or len(work.orders) != devices, f"the schedule is for {devices} devices"),
        (data < 1 or parts < 1 or stages < 1 or devices < 1 or stages % devices, f"{stages} stages on {devices} devices"),
        (not placement or any(len(row) != stages or not all(0 <= d < devices for d in row) for row in placement), "placement"),
        (len(copy_of) != parts * int(problem["microbatches"]), f"{len(copy_of)} micro-batches in {parts} parts"),
        (not all(0 <= c < len(placement) for c in copy_of), "a micro-batch runs through a copy that there is not"),
        (any(len(x) != devices for x in sizes.values()), "sizes"),
        (len(work.away) not in (0, devices), f"{len(work.away)} devices move activations"),
    ):
        if wrong:
            raise ValueError(text)
    _whole(work)
    return work


def _act(text: str) -> Act:
    at = next(i for i, c in enumerate(text) if c in PHASES)
    name, _, beside = text.partition("&")
    first, _, last = name[at + 1 :].partition("-")
    return Act(text[at], int(text[:at]), int(first), int(last or first), int(beside or -1))


def _whole(work: PipelineWork) -> None:
    """Every device runs every phase of every micro-batch of what it holds once."""
    for device, order in enumerate(work.orders):
        held = work.hosted(device)
        want = {(p, k, m) for c, k in held for m, on in enumerate(work.copy_of) if on == c for p in ("FIW" if work.split else "FB")}
        runs = [(a.phase, a.stage, m) for a in order for m in a.microbatches]
        if len(set(runs)) < len(runs) or set(runs) != want:
            odd = sorted(set(runs) ^ want) or sorted(x for x in set(runs) if runs.count(x) > 1)
            raise ValueError(f"device {device} {'lacks' if odd[0] in want else 'should not run'} {odd[0][1]}{odd[0][0]}{odd[0][2]}")
        if any(len({work.copy_of[m] for m in a.microbatches}) > 1 for a in order):
            raise ValueError(f"device {device} runs micro-batches of several copies at once")
        if device < len(work.away) and (odd_ones := sorted(work.away[device] - {(k, m) for _, k, m in want})):
            raise ValueError(f"device {device} moves what stage {odd_ones[0][0]} saves of micro-batch {odd_ones[0][1]}, which it does not hold")
        if (lone := _lone_half(order, "IW" if work.split else "B")) is not None:
            raise ValueError(f"device {device} runs {lone.stage}{lone.phase}{lone.first} without the other half of its pair")


def _lone_half(order: tuple[Act, ...], phases: str) -> Act | None:
    """The first half of a pair beside which the other half does not stand: F, and behind it the phases of one backward."""
    inside: Act | None = None  # the forward of the pair whose phases are still to come
    left = ""
    for k, a in enumerate(order):
        if left:
            same = k > 0 and (order[k - 1].phase == "F" or (a.stage, a.first) == (order[k - 1].stage, order[k - 1].first))
            if inside is None or a.phase != left[0] or (a.stage, a.beside) != (inside.beside, inside.stage) or not same:
                return inside
            left = left[1:]
        elif a.beside >= 0:
            if a.phase != "F":
                return a
            inside, left = a, phases
    return inside if left else None
