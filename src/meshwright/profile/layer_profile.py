"""Measured layer tables of a model: seconds and sizes of every layer by (device, micro-batch, tensor degree), as planners exchange them.

Source: the public profile formats of Metis (USENIX ATC 2024) and Sailor (SOSP 2025); read by `meshwright.io.costs.profile_layers`.
What an entry is: `forward_s`, `backward_s` and `update_s` of one layer on one rank for one micro-batch. Layer 0 is the embedding, the last the
head. Whether the times of a tensor degree > 1 contain its collectives is the profiler's choice; both public formats contain them.
Nothing is made up: a missing entry is named (`ProfileEntryMissing`'s `data`), interpolated only by `completed`, which marks it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from ..errors import Infeasible, UnknownName, UsageError
from .layer_messages import LayerMessages, pass_s

__all__ = ["Entry", "LayerProfile", "LayerSize", "LayerTime", "LayerPhase", "ProfileEntryMissing", "ProfileFinding"]

LayerPhase = Literal["forward", "backward", "update"]
MIN_TIME_SHARE = 0.9  # a larger micro-batch that takes less than this share of a smaller one's time is reported
MAX_NAMED_ENTRIES = 64  # entries listed in an error's data


class Entry(NamedTuple):
    """What one row of a profile was measured with. `microbatch` in samples."""

    device: str
    microbatch: int
    tensor: int

    def __str__(self) -> str:
        return f"{self.device}, micro-batch {self.microbatch}, tensor degree {self.tensor}"


class LayerTime(NamedTuple):
    """`weights_s`: part of the backward that only the weights' gradients need."""

    forward_s: float
    backward_s: float
    update_s: float
    weights_s: float = 0.0


class LayerSize(NamedTuple):
    """Numbers (not bytes) of one rank: parameters; values kept from forward to backward and values handed on, both per sample.

    `state_bytes`: of weights, gradients and optimizer where they are not a fixed number per parameter (sharded states); -1: they are.
    `working_bytes`: beside what is kept, while this layer's backward runs (recomputed values); of one layer at a time.
    `left_values`: left by the input's gradient for that of the weights, where a schedule parts them, per sample.
    """

    parameters: float
    saved_values: float
    output_values: float
    state_bytes: float = -1.0
    working_bytes: float = 0.0
    left_values: float = 0.0


class ProfileEntryMissing(Infeasible):
    """The profile lacks entries that a layout needs; `data["missing"]` names them."""

    code = "profile-entry-missing"


@dataclass(frozen=True)
class ProfileFinding:
    """Something odd in imported data. Nothing is changed because of it: `entries` are the rows to look at."""

    kind: Literal["duplicate", "below-bound", "falling", "no-time", "interpolated"]
    entries: tuple[Entry, ...]
    detail: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "entries": [list(e) for e in self.entries], "detail": self.detail}


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Times by entry and layer, sizes by tensor degree and layer, whole layer memory where that is all a profiler gives.

    `split_assumed`: forward and backward were measured together and divided by a stated share. `memory_bytes`: of every layer on one rank with
    one micro-batch in flight, weights and optimizer included. `messages`: where weights are gathered, or gradients scattered, for every micro-batch.
    """

    model: str
    layers: int
    times: Mapping[Entry, tuple[LayerTime, ...]]
    sizes: Mapping[int, tuple[LayerSize, ...]] = field(default_factory=dict)
    memory_bytes: Mapping[Entry, tuple[int, ...]] = field(default_factory=dict)
    interpolated: frozenset[Entry] = frozenset()
    split_assumed: float = 0.0
    source: str = ""
    messages: Mapping[Entry, tuple[LayerMessages, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, table in (("times", self.times), ("messages", self.messages), ("sizes", self.sizes), ("memory_bytes", self.memory_bytes)):
            for key, row in table.items():
                if len(row) != self.layers:
                    raise UsageError(f"{len(row)} layers where the profile has {self.layers}", where=f"{self.model}: {name}[{key}]")

    # ---- what there is ---------------------------------------------------------------------------------------------
    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({e.device for e in self.times}))

    @property
    def microbatches(self) -> tuple[int, ...]:
        return tuple(sorted({e.microbatch for e in self.times}))

    @property
    def tensors(self) -> tuple[int, ...]:
        return tuple(sorted({e.tensor for e in self.times}))

    def gaps(self) -> tuple[Entry, ...]:
        """Entries of the full grid (every device x micro-batch x degree that occurs) that were not measured."""
        grid = (Entry(d, m, t) for d in self.devices for m in self.microbatches for t in self.tensors)
        return tuple(e for e in grid if e not in self.times)

    def require(self, entries: Iterable[Entry]) -> None:
        """Raise ProfileEntryMissing naming every entry that is not there; UnknownName for a device nobody measured."""
        wanted = list(dict.fromkeys(entries))
        for e in wanted:
            if e.device not in self.devices:
                raise UnknownName(f"the profile of {self.model!r} has no device {e.device!r}", hint=f"it has: {', '.join(self.devices)}")
        missing = [e for e in wanted if e not in self.times]
        if missing:
            measured = sorted(e for e in self.times if e.device == missing[0].device)
            have = "; ".join(f"micro-batch {e.microbatch} x tensor {e.tensor}" for e in measured[:12])
            raise ProfileEntryMissing(
                f"the profile of {self.model!r} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint=f"measure it, or ask for interpolation; {missing[0].device} has {have}",
                data={"missing": [list(e) for e in missing[:MAX_NAMED_ENTRIES]], "count": len(missing)},
            )

    # ---- look-ups --------------------------------------------------------------------------------------------------
    def time_s(self, device: str, microbatch: int, tensor: int, layer: int, phase: LayerPhase) -> float:
        """Seconds of one phase of one layer. Raises: ProfileEntryMissing, UnknownName, UsageError."""
        entry = Entry(device, microbatch, tensor)
        self.require([entry])
        row = self.times[entry]
        if not 0 <= layer < self.layers:
            raise UsageError(f"there is no layer {layer}", where=self.model, hint=f"layers are 0-{self.layers - 1}")
        return {"forward": row[layer].forward_s, "backward": row[layer].backward_s, "update": row[layer].update_s}[phase]

    def span(self, entry: Entry, first: int, count: int) -> LayerTime:
        """Sums over `count` layers from `first`; where layers send messages, no less than their flow takes. Raises as `time_s`."""
        self.require([entry])
        if count < 1 or not 0 <= first <= self.layers - count:
            raise UsageError(f"layers {first} to {first + count - 1} do not exist", where=self.model, hint=f"layers are 0-{self.layers - 1}")
        rows = self.times[entry][first : first + count]
        found = LayerTime(*(math.fsum(column) for column in zip(*rows, strict=True)))
        if sent := self.messages.get(entry, ())[first : first + count]:
            forward_s, backward_s = (pass_s(sent, backward=way) for way in (False, True))
            found = found._replace(forward_s=max(found.forward_s, forward_s), backward_s=max(found.backward_s, backward_s))
        return found

    def size(self, tensor: int, layer: int) -> LayerSize:
        """Sizes of one layer on one rank; where only other degrees are known, parameters and kept values are divided by the ratio of degrees.

        Raises: ProfileEntryMissing when the profile came without sizes.
        """
        known = self.sizes.get(tensor)
        if known is not None:
            return known[layer]
        if not self.sizes:
            raise ProfileEntryMissing(f"the profile of {self.model!r} has no layer sizes", hint="read the memory table too")
        near = min(self.sizes, key=lambda t: (abs(math.log(t / tensor)), t))
        s, part = self.sizes[near][layer], near / tensor
        state_bytes = s.state_bytes if s.state_bytes < 0 else s.state_bytes * part
        return LayerSize(s.parameters * part, s.saved_values * part, s.output_values, state_bytes, s.working_bytes * part)

    # ---- interpolation, only when asked ----------------------------------------------------------------------------
    def completed(self, entries: Iterable[Entry]) -> LayerProfile:
        """This profile with those entries filled in and marked: time against micro-batch linear between (and beyond) the two nearest measured.

        Only along the micro-batch, with device and degree fixed: time over samples is close to a line with an offset, over degrees and devices it
        is not. One measured micro-batch gives proportion. Raises: ProfileEntryMissing when that device and degree were never measured.
        """
        times, marked = dict(self.times), set(self.interpolated)
        for e in dict.fromkeys(entries):
            if e in times:
                continue
            known = sorted(x for x in self.times if (x.device, x.tensor) == (e.device, e.tensor) and x not in self.interpolated)
            if not known:
                self.require([e])
            near = sorted(sorted(known, key=lambda x: (abs(math.log(x.microbatch / e.microbatch)), x))[:2])
            times[e] = tuple(_between(e.microbatch, [(x.microbatch, self.times[x][layer]) for x in near]) for layer in range(self.layers))
            marked.add(e)
        return replace(self, times=times, interpolated=frozenset(marked))

    # ---- what looks wrong ------------------------------------------------------------------------------------------
    def findings(self, *, peak_flops: Mapping[str, float] | None = None, values_per_sample: float = 0.0) -> tuple[ProfileFinding, ...]:
        """Copied rows, layers without time, times that fall as the micro-batch grows, and, given peaks, forward times below the compute bound.

        The bound of a layer is 2 x parameters x tokens / peak; `values_per_sample` is tokens per sample. The embedding (a look-up) has none.
        """
        found = [*self._duplicates(), *self._without_time(), *self._falling()]
        if peak_flops and values_per_sample and self.sizes:
            found += self._below_bound(peak_flops, values_per_sample)
        if self.interpolated:
            found.append(ProfileFinding("interpolated", tuple(sorted(self.interpolated)), "interpolated along the micro-batch, not measured"))
        return tuple(found)

    def _duplicates(self) -> list[ProfileFinding]:
        seen: dict[tuple[tuple[float, float], ...], list[Entry]] = {}
        for e in sorted(self.times):
            if e not in self.interpolated:
                seen.setdefault(tuple((r.forward_s, r.backward_s) for r in self.times[e]), []).append(e)
        detail = "equal forward and backward times in every layer: copied, or measured once"
        return [ProfileFinding("duplicate", tuple(es), detail) for es in seen.values() if len(es) > 1]

    def _without_time(self) -> list[ProfileFinding]:
        empty = {e: [i for i, r in enumerate(self.times[e]) if r.forward_s + r.backward_s <= 0] for e in sorted(self.times)}
        return [ProfileFinding("no-time", (e,), f"layers {', '.join(map(str, layers[:8]))} take no time") for e, layers in empty.items() if layers]

    def _falling(self) -> list[ProfileFinding]:
        found = []
        measured = sorted((e for e in self.times if e not in self.interpolated), key=lambda e: (e.device, e.tensor, e.microbatch))
        for a, b in pairwise(measured):
            if (a.device, a.tensor) != (b.device, b.tensor):
                continue
            small, large = (math.fsum(r.forward_s + r.backward_s for r in self.times[e]) for e in (a, b))
            if large < MIN_TIME_SHARE * small:
                found.append(ProfileFinding("falling", (a, b), f"micro-batch {b.microbatch} takes {large:.6g} s, {a.microbatch} takes {small:.6g} s"))
        return found

    def _below_bound(self, peak_flops: Mapping[str, float], tokens: float) -> list[ProfileFinding]:
        found = []
        for e in sorted(self.times):
            peak = peak_flops.get(e.device)
            if not peak:
                continue
            bounds = [2 * self.size(e.tensor, i).parameters * tokens * e.microbatch / peak for i in range(1, self.layers)]
            fast = [i for i, bound in enumerate(bounds, 1) if self.times[e][i].forward_s < bound]
            if fast:
                ratio = min(self.times[e][i].forward_s / bounds[i - 1] for i in fast)
                found.append(ProfileFinding("below-bound", (e,), f"{len(fast)} layers take as little as {ratio:.2f} of their floating-point bound"))
        return found


def _between(microbatch: int, known: list[tuple[int, LayerTime]]) -> LayerTime:
    if len(known) == 1:
        m, row = known[0]
        forward_s, backward_s, weights_s = (x * microbatch / m for x in (row.forward_s, row.backward_s, row.weights_s))
        return LayerTime(forward_s, backward_s, row.update_s, weights_s)
    (a, ra), (b, rb) = known
    part = (microbatch - a) / (b - a)

    def at(x: float, y: float) -> float:
        low = min(x, y) * min(1.0, microbatch / b if microbatch > b else microbatch / a)  # a falling line never reaches zero
        return max(x + part * (y - x), low if part < 0 else min(x, y) if part > 1 else 0.0)

    return LayerTime(*map(at, ra, rb))
