"""What every layer of a model costs on every kind of device, by micro-batch and tensor degree, with what a planner may choose per layer.

A `LayerTable` is a layer profile with its choices still open: how much of a layer is computed again (none, selective, full) and how far its
state is sharded over the data-parallel replicas (ZeRO 0-3). `priced` closes them, for every layer at once, and everything that a search over
layers counts with comes from there: closed forms and bounds, and the `LayerProfile` that `predict` simulates (`profile`).
Sizes are bytes; times are seconds of one rank for one micro-batch and contain the layer's tensor-parallel collectives (`tensor_s`).

Sharding levels (Rajbhandari et al., SC 2020): 1 shards optimizer state, 2 gradients too, 3 weights too. Levels 0 and 1 send gradients once a
step (all-reduce; reduce-scatter, then all-gather of weights: the ring of `predict`). Level 2 scatters gradients after every micro-batch, level 3
gathers weights before forward and backward as well; those bytes run beside computation (`sharding_messages` "overlapped"), or are waited for
("blocking"), at the group's share of a server's links. Overlapped, a layer costs what is longer of its messages and its own computation: searches
and bounds count with that. The profile that is simulated holds the messages: a stage's passes are flows (`layer_messages`), no less than that sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .layer_messages import MAX_WHOLE, LayerMessages
from .layer_profile import Entry, LayerProfile, LayerSize, LayerTime, ProfileEntryMissing
from .state_bytes import StateBytes

__all__ = ["COLUMNS", "LayerChoice", "LayerRow", "LayerTable", "RECOMPUTE", "Recompute"]

F64 = NDArray[np.float64]
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
# of a row: what no choice of recomputation changes
PLAIN = ("forward_s", "backward_s", "update_s", "weights_s", "parameters", "output_bytes", "left_bytes")
# of a layer on a rank; wire: what its gradient ring counts, working: beside what is kept, while its backward runs; weights: part of the backward
# that only gradients of weights need, left: what waits for it where a schedule parts the two; gather, scatter, own: `layer_messages.LayerMessages`
COLUMNS = (
    "forward_s", "backward_s", "update_s", "weights_s", "wire_bytes", "state_bytes", "kept_bytes", "working_bytes", "output_bytes", "left_bytes",
    "gather_s", "scatter_s", "own_forward_s", "own_backward_s",
)  # fmt: skip


class LayerChoice(NamedTuple):
    """`tensor`: degree of this layer inside its group of ranks, 0 = the group's; the rest of the group then shares the micro-batch's samples.
    `context`: replicas that share samples and divide their positions, the same for all layers."""

    recompute: Recompute = "none"
    sharding: int = 0
    tensor: int = 0
    context: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer on one rank. `kept_bytes`: from forward to backward under none, selective, full; `again_s`: computed again under each.

    `tensor_s`: part of forward, of backward, that is collectives. `output_bytes`: handed to the next layer. `flops`: forward, backward, this rank's.
    `parameters` are those of the rank; `update_s` is a full optimizer step over them. `weights_s`: part of the backward that only gradients of
    weights need; `left_bytes`: gradients that wait for it where a schedule parts the two.
    """

    forward_s: float
    backward_s: float
    update_s: float
    parameters: float
    output_bytes: float
    kept_bytes: tuple[float, float, float]
    again_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tensor_s: tuple[float, float] = (0.0, 0.0)
    flops: tuple[float, float] = (0.0, 0.0)
    weights_s: float = 0.0
    left_bytes: float = 0.0
    expert_parameters: float = 0.0  # among `parameters`: of experts, which some of the replicas hold


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """`rows[entry]`: all layers. Rates and hops are those of the messages of sharding levels 2 and 3, per rank.

    `contexts[degree][entry]`: of one of `degree` ranks that divide the positions of an entry's samples; times contain their exchanges.
    """

    model: str
    names: tuple[str, ...]
    rows: Mapping[Entry, tuple[LayerRow, ...]]
    state: StateBytes
    contexts: Mapping[int, Mapping[Entry, tuple[LayerRow, ...]]] = field(default_factory=dict)
    inside_Bps: Mapping[str, float] = field(default_factory=dict)  # per device kind: rank to rank in a server
    outside_Bps: Mapping[str, float] = field(default_factory=dict)  # per device kind: its share of the server's NICs
    inside_hop_s: Mapping[str, float] = field(default_factory=dict)  # one message, in a server
    outside_hop_s: Mapping[str, float] = field(default_factory=dict)  # one message, between servers
    gpus_per_server: Mapping[str, int] = field(default_factory=dict)
    sharding_messages: Literal["overlapped", "blocking"] = "overlapped"  # those of levels 2 and 3, with the layer's own computation
    stolen: float = 0.0  # share of a device's processors that messages of levels 2 and 3 take from what they run beside
    sample_flops: float = 0.0  # forward and backward of one sample, whole model
    experts: int = 1  # neighbouring replicas that divide experts: of so many, one holds an expert's state, and one of its copies sums gradients
    heads: tuple[str, ...] = ()  # the first operator of every layer, where the table was made from a graph
    notes: tuple[str, ...] = ()
    source: str = ""
    _priced: dict[tuple[Entry, LayerChoice, int], Mapping[str, F64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for entry, row in self.rows.items():
            if len(row) != len(self.names):
                raise UsageError(f"{len(row)} layers where the table has {len(self.names)}", where=f"{self.model}: rows[{entry}]")

    @property
    def layers(self) -> int:
        return len(self.names)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({e.device for e in self.rows}))

    def every(self) -> Iterator[tuple[Entry, int, tuple[LayerRow, ...]]]:
        """(entry, context degree, its layers) of the whole table."""
        for context, rows in ((1, self.rows), *self.contexts.items()):
            yield from ((entry, context, found) for entry, found in rows.items())

    def row(self, entry: Entry, context: int = 1) -> tuple[LayerRow, ...]:
        """Raises: ProfileEntryMissing."""
        found = (self.rows if context == 1 else self.contexts.get(context, {})).get(entry)
        if found is None and context > 1:
            raise ProfileEntryMissing(
                f"the table of {self.model!r} lacks {entry}, context degree {context}", hint=f"degrees are {[1, *self.contexts]}",
                data={"missing": [list(entry)], "context": context},
            )  # fmt: skip
        if found is None:
            have = "; ".join(str(e) for e in sorted(self.rows)[:6])
            raise ProfileEntryMissing(f"the table of {self.model!r} lacks {entry}", hint=f"it has {have}", data={"missing": [list(entry)]})
        return found

    def priced(self, entry: Entry, choice: LayerChoice, replicas: int) -> Mapping[str, F64]:
        """`COLUMNS` of all layers under one choice, on one rank of `entry`'s group, with `replicas` data-parallel copies of the group.

        Raises: ProfileEntryMissing; UsageError when the group's samples do not divide.
        """
        key = (entry, choice, replicas)
        if key not in self._priced:
            self._priced[key] = dict(zip(COLUMNS, self._price(entry, choice, replicas), strict=True))
        return self._priced[key]

    def priced_each(self, entry: Entry, choices: Sequence[LayerChoice], replicas: int) -> Mapping[str, F64]:
        """As `priced`, every layer under its own choice."""
        distinct = list(dict.fromkeys(choices))
        found = [self.priced(entry, c, replicas) for c in distinct]
        if len(distinct) == 1:
            return found[0]
        index = np.array([distinct.index(c) for c in choices])
        return {name: np.stack([f[name] for f in found])[index, np.arange(len(choices))] for name in COLUMNS}

    def _price(self, entry: Entry, choice: LayerChoice, replicas: int) -> tuple[F64, ...]:
        tensor = choice.tensor or entry.tensor
        inner, rest = divmod(entry.tensor, tensor)
        if rest or entry.microbatch % inner:
            raise UsageError(f"{entry} cannot be shared {inner} x tensor {tensor}", where=self.model, hint="degrees and samples must divide")
        rows = self.row(Entry(entry.device, entry.microbatch // inner, tensor), choice.context)
        plain = (np.array([getattr(r, name) for r in rows]) for name in PLAIN)
        forward_s, backward_s, update_s, weights_s, parameters, output_bytes, left_bytes = plain
        i = RECOMPUTE.index(choice.recompute)
        most_bytes, kept_bytes = (np.array([r.kept_bytes[k] for r in rows]) for k in (0, i))
        backward_s = backward_s + np.array([r.again_s[i] for r in rows])
        copies = replicas * inner
        experts = np.array([r.expert_parameters for r in rows])
        same = max(1, copies // self.experts)  # copies of an expert
        # a ring's bytes, of `same` members as of `copies`; a share of what is held, by the copies of each part
        ring = parameters - experts * (1 - (same - 1) * copies / (same * (copies - 1)) if copies > 1 else 0.0)
        held = (parameters - experts) / copies + experts / same
        gather, scatter, own_forward_s, own_backward_s = np.zeros_like(parameters), np.zeros_like(parameters), forward_s, backward_s
        wire = ring * self.state.message
        if choice.sharding >= 1:
            update_s = update_s * np.divide(held, parameters, out=np.zeros_like(held), where=parameters > 0)
            wire = ring * (self.state.message + self.state.weight) / 2
        if inner > 1:  # its own reduce-scatter and all-gather of gradients, in the server, after the last micro-batch
            inside = self._rate(entry.device, "inside")
            update_s = update_s + 2 * (inner - 1) / inner * wire / inside
            wire = wire / inner
        if choice.sharding >= 2 and copies > 1:
            part, hops = self._ring(entry, parameters - experts, copies, 1, replicas)
            if self.experts > 1 and same > 1:  # after it, of experts, one over the replicas that have the same
                own, more = self._ring(entry, experts, same, self.experts, replicas)
                part, hops = part + own, hops + more * (experts > 0)
            gather = part * self.state.weight + hops if choice.sharding == 3 else gather
            scatter = part * self.state.message + hops
            after = scatter + gather
            if self.sharding_messages == "overlapped":
                own_forward_s, own_backward_s = forward_s + self.stolen * gather, backward_s + self.stolen * after
                forward_s, backward_s = np.maximum(own_forward_s, gather), np.maximum(own_backward_s, after)
            else:
                forward_s, backward_s = forward_s + gather, backward_s + after
                gather, scatter = np.zeros_like(gather), np.zeros_like(scatter)
            # level 2 after the last micro-batch: the all-gather of weights only, in gradient-ring bytes (a ring moves them twice)
            wire = ring * self.state.weight / 2 if choice.sharding == 2 else np.zeros_like(parameters)
        # level 2 has one layer's gradients whole for a while, level 3 also its weights and those gathered ahead
        gathered = parameters * (0.0, 0.0, self.state.gradient, self.state.gradient + MAX_WHOLE * self.state.weight)[choice.sharding]
        state_bytes = (parameters - experts) * self.state.at(choice.sharding, copies) + experts * self.state.at(choice.sharding, same)
        working_bytes = np.maximum(0.0, most_bytes - kept_bytes) + gathered
        # what is computed again for the input's gradient stays for the weights' one
        left_bytes = left_bytes + np.maximum(0.0, most_bytes - kept_bytes)
        return (
            forward_s, backward_s, update_s, weights_s, wire, state_bytes, kept_bytes, working_bytes, output_bytes * inner, left_bytes * inner,
            gather, scatter, own_forward_s, own_backward_s,
        )  # fmt: skip

    def _ring(self, entry: Entry, parameters: F64, members: int, apart: int, replicas: int) -> tuple[F64, F64]:
        """(seconds per byte of a parameter, seconds of hops) of one turn of a ring over `members` copies, so many replicas apart."""
        gpus = self.gpus_per_server.get(entry.device, 1)
        near = replicas * entry.tensor <= gpus
        # A library runs as many rings as a server has members of the group, each through a NIC of its own: the group has all their shares.
        here = max(1, gpus // (entry.tensor * apart))
        rate = self._rate(entry.device, "inside") if near else self._rate(entry.device, "outside") * here
        if not near and self.inside_Bps.get(entry.device):
            rate = min(rate, self.inside_Bps[entry.device])
        # a ring goes through every server once: one hop between servers, the others inside
        far = 0 if near else min(members, -(-replicas * entry.tensor // gpus))
        hops = far * self.outside_hop_s.get(entry.device, 0.0) + (members - 1 - far) * self.inside_hop_s.get(entry.device, 0.0)
        return (members - 1) / members * parameters / rate, np.full_like(parameters, hops)

    def _rate(self, device: str, where: Literal["inside", "outside"]) -> float:
        rate = (self.inside_Bps if where == "inside" else self.outside_Bps).get(device, 0.0)
        if not rate > 0:
            raise UsageError(f"the table has no rate {where} a server of {device}", where=self.model, hint="give the fabric's links")
        return rate

    def profile(self, entries: Sequence[Entry], choices: Sequence[LayerChoice], replicas: int) -> LayerProfile:
        """The `LayerProfile` of those entries under one choice per layer, `replicas` copies. One value is one byte in it.

        All entries must share one tensor degree per layer size row; sizes differ by tensor degree only. Raises: as `priced`.
        """
        if len(choices) != self.layers:
            raise UsageError(f"{len(choices)} choices for {self.layers} layers", where=self.model)
        times: dict[Entry, tuple[LayerTime, ...]] = {}
        sizes: dict[int, tuple[LayerSize, ...]] = {}
        messages: dict[Entry, tuple[LayerMessages, ...]] = {}
        for entry in dict.fromkeys(entries):
            a = {name: column.tolist() for name, column in self.priced_each(entry, choices, replicas).items()}
            times[entry] = tuple(map(LayerTime, a["forward_s"], a["backward_s"], a["update_s"], a["weights_s"]))
            sizes[entry.tensor] = tuple(
                LayerSize(
                    parameters=wire / self.state.message, saved_values=kept / entry.microbatch, output_values=output / entry.microbatch,
                    state_bytes=state, working_bytes=working, left_values=left / entry.microbatch,
                )
                for wire, state, kept, working, output, left in zip(*(a[name] for name in COLUMNS[4:10]), strict=True)
            )  # fmt: skip
            if any(a["gather_s"]) or any(a["scatter_s"]):
                messages[entry] = tuple(map(LayerMessages, *(a[name] for name in COLUMNS[10:])))
        return LayerProfile(model=self.model, layers=self.layers, times=times, sizes=sizes, source=self.source, messages=messages)
