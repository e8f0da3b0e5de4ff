"""Experts for tokens whose routes are known: they go to their experts on the ranks of a group, and come back. What `MoELayer` and layers of other
makers' models (`nn.convert`) have in common.

Cite: C. Hwang and others, "Tutel: Adaptive Mixture-of-Experts at Scale" (MLSys 2023, arXiv 2206.03382).
Left open by the paper: ranks that disagree, scores that are not finite, no tokens at all. Our answer: one small all-reduce before each step tells all
ranks of them, so all raise the same error.
Deviations: capacity is aligned for every choice at once, so the choice changes no output; what was dropped is counted (`dropped`).
Invariant: outputs and gradients are those of one process with all experts, but for the order of sums.
Cost: that of the experts on E · C rows over all ranks, and the exchanges of `decide.experts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch

from ..decide.experts import Choice, DictionarySearch, ExpertProblem, ExpertShape, Tutel
from ..decide.experts.megablocks import FittedWays
from ..decide.experts.search import TableSearch
from ..decide.experts.tutel import alignment_of
from ..drive.experts import LayerPrograms, table_of
from ..drive.experts.replicas import rate_between, require_room
from ..drive.plans import read_fabric, read_plan
from ..errors import Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..kernels.experts import Routing, capacity_of, decode, encode, slots_of
from ..kernels.experts.dropless import WAYS, first_rows, grouped_applies
from ..plan.plan import Plan
from ..run.executor.held_groups import holds_group
from ..run.experts import CopyPrices, ExchangeRunner, ExpertCopies, Facts, WeightLayout, agree
from ..run.experts.agreement import number_of
from ..run.experts.copies import tied
from ..run.experts.ragged import ragged_exchange
from .experts import ExpertForm

__all__ = ["Ask", "RoutedExperts", "Spread"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a layer's experts lie on ranks and are reached; the fields are arguments of `MoELayer`."""

    choice: Choice | tuple[int, int, str] | Literal["search"] = "search"
    dropless: str = ""
    block: int = 16
    chunks: Sequence[int] = (1, 2, 4)
    algorithms: Sequence[str] = ("linear",)
    window: int = 128
    fabric: str | Fabric | None = None
    plan: str | Plan | None = None
    spare: int = 0
    replan: int = 100


@dataclass(frozen=True)
class Ask:
    """What a call asks for. finite: no score is NaN or infinite; scored: experts that the router gave scores for."""

    k: int
    factor: float
    finite: bool
    scored: int


class RoutedExperts(torch.nn.Module):  # type: ignore[misc]
    """Experts of `form` over the ranks of a group (None: this process alone). A subclass holds the parameters (`flat_parameters`)."""

    def __init__(self, form: ExpertForm, experts: int, spread: Spread, group: Any) -> None:
        super().__init__()
        self.form, self.experts = form, experts
        self.capacity, self.dropped, self._demand = 0, 0, 0
        self.dispatch_count: torch.Tensor | None = None
        self.spread_over(group, spread)

    def spread_over(self, group: Any, spread: Spread) -> None:
        """Lay the experts over the ranks of `group`; a subclass's parameters are this rank's part then."""
        form, experts = self.form, self.experts
        self.group, self.spread = group, spread
        holds_group(self)
        self.rank: int = 0 if group is None else group.rank()
        self.ranks: int = 1 if group is None else group.size()
        self.layout = WeightLayout(self.ranks, experts, form.sliced, form.whole)
        self.shape = ExpertShape(
            ranks=self.ranks, experts=experts, model=form.model, inner=form.inner, output=form.output, matrices=form.matrices,
            inner_elements=self.layout.slice_elements * self.layout.shares // self.layout.local, whole_elements=self.layout.whole_elements,
        )  # fmt: skip
        self.programs = self._programs(spread.fabric)
        options = Tutel(chunks=tuple(spread.chunks), algorithms=tuple(spread.algorithms), window=spread.window)
        self.choice = None if spread.choice == "search" else Choice(*spread.choice)
        self.ways = self._ways(spread.dropless, spread.block)
        self.copies = self._copies(spread) if spread.spare else None
        self._seen: tuple[int, ...] = ()  # versions of this rank's weights at the call before
        chunks: Sequence[int] = spread.chunks
        searches: dict[bool, DictionarySearch | TableSearch]
        if spread.plan is not None:
            table, window = table_of(spread.plan if isinstance(spread.plan, Plan) else read_plan(spread.plan), self.shape)
            candidates = tuple(dict.fromkeys(table.values()))
            chunks = tuple(c.chunks for c in candidates)
            searches = dict.fromkeys((True, False), TableSearch(table, window=window))
        else:
            candidates = self._candidates(options) if self.choice is None else (self.choice,)
            searches = {training: DictionarySearch(candidates, window=spread.window) for training in (True, False)}
        self.searches = searches
        self.alignment = alignment_of(self.shape.shares, tuple(chunks) if self.choice is None else (self.choice.chunks,))
        self.runner = ExchangeRunner(group, self.rank, self.programs, self.layout, form.run, self._took)
        self._last: tuple[bool, int, Choice, float] | None = None  # of the step before: in training?, capacity, choice, seconds
        self._forward_s = 0.0
        self.used = candidates[0]

    def _programs(self, fabric: str | Fabric | None) -> LayerPrograms:
        found = fabric if isinstance(fabric, Fabric) else read_fabric(fabric or f"laptop:{max(self.ranks, 2)}")
        if len(found.devices) < self.ranks:
            raise UsageError(f"the fabric has {len(found.devices)} devices for {self.ranks} ranks", where="fabric", hint="a device for every rank")
        return LayerPrograms(found, tuple(d.name for d in found.devices)[: self.ranks], self.shape)

    def _ways(self, dropless: str, block: int) -> FittedWays | None:
        """Ways to multiply rows without buffers; None with buffers."""
        if not dropless:
            return None
        if dropless not in (*WAYS, "auto"):
            raise UsageError(f"no way {dropless!r}", where="dropless", hint=f"ways: {', '.join(WAYS)}, auto")
        if self.layout.shares > 1:
            raise Unsupported(
                f"{self.experts} experts on {self.ranks} ranks are shared, and rows without buffers go to whole experts", where="dropless",
                hint=f"capacity_factor=0 drops nothing either; or {self.ranks} experts", data={"shares": self.layout.shares},
            )  # fmt: skip
        if dropless != "auto":
            return FittedWays((dropless,), block)
        sparse = self.form.inner and self.form.inner % block == 0 and not self.layout.whole
        return FittedWays(("grouped", "loop", "padded", *(("sparse",) if sparse else ())) if self.form.inner else ("loop",), block)

    def _copies(self, spread: Spread) -> ExpertCopies:
        """Places for copies of hot experts. Raises: Unsupported, UsageError, Infeasible where no copy fits."""
        if self.ways is None or self.ranks == 1:
            where = "one process" if self.ranks == 1 else "buffers"
            raise Unsupported(f"copies of hot experts with {where}", where="spare", hint="several ranks and dropless='auto', or spare=0")
        shape, devices = self.shape, self.programs.ranks
        size = (shape.inner_elements + shape.whole_elements) * shape.element_bytes
        require_room(self.programs.fabric, devices, size, shape.local, spread.spare)
        prices = CopyPrices(
            expert_bytes=size, row_bytes=(shape.model + shape.output) * shape.element_bytes,
            rate_Bps=int(rate_between(self.programs.fabric, devices[0], devices[-1])),
        )  # fmt: skip
        return ExpertCopies(self.group, self.rank, self.ranks, self.experts, spread.spare, spread.replan, prices)

    def _candidates(self, options: Tutel) -> tuple[Choice, ...]:
        problem = ExpertProblem(fabric=self.programs.fabric, ranks=self.programs.ranks, shape=self.shape, capacities=(1,))
        found = options.plan(problem).candidates
        if self.ranks > 1:
            for choice in found:
                self.programs.exchanges(choice)  # refuses what does not apply here
        return found

    # ---- parameters --------------------------------------------------------------------------------------------
    def flat_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's slices, and its part of what is whole, as `WeightLayout` lays them; gradients flow back."""
        raise NotImplementedError

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters of this rank's experts, stacked, where no other rank has a slice of them."""
        slices, whole = self.flat_parameters()
        found = self.layout.sliced_of(slices, self.layout.local) if self.layout.sliced else {}
        return found | (self.layout.whole_of(whole, self.layout.local) if self.layout.whole else {})

    # ---- a step ------------------------------------------------------------------------------------------------
    def dispatch(self, tokens: torch.Tensor, routing: Routing | None, ask: Ask, gate: str = "after") -> torch.Tensor:
        """Tokens [T, H] through their experts: [T, output]. routing: None where what is asked does not fit, which all ranks then refuse."""
        capacity = self._agreed(tokens, ask, routing)
        assert routing is not None, "what does not fit is refused by all ranks"
        self.dispatch_count, self.capacity = routing.counts, capacity
        if self.ways is not None:
            self.capacity, self.dropped = self._demand, 0
            return self._rows(tokens, routing, gate)
        slots = slots_of(routing.experts, routing.locations, capacity)
        self.dropped = int((slots < 0).sum())
        rows = self.experts * capacity
        slices, whole = self.flat_parameters()
        if not rows:  # no rank has a token
            return tokens.new_zeros(len(tokens), self.form.output) + 0 * slices.sum()
        gates = routing.gates.to(slices.dtype)
        encoded = encode(tokens.to(gates.dtype), slots, rows, gates if gate == "before" else None)
        done = self._through(encoded.view(self.experts, capacity, -1), routing.counts.clamp(max=capacity), slices, whole)
        return decode(done.view(rows, -1), slots, gates if gate == "after" else None).to(tokens.dtype)

    def _rows(self, tokens: torch.Tensor, routing: Routing, gate: str) -> torch.Tensor:
        """Without buffers: all rows of an expert follow each other."""
        slots = first_rows(routing.counts)[routing.experts] + routing.locations
        params = self.local_parameters()
        gates = routing.gates.to(next(iter(params.values())).dtype)
        rows = encode(tokens.to(gates.dtype), slots, slots.numel(), gates if gate == "before" else None)

        def multiplied(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return self._multiplied(rows, counts, params)

        if self.copies is not None:
            done = self._with_copies(self.copies, rows, routing.counts, params)
        else:
            done = multiplied(rows, routing.counts) if self.ranks == 1 else ragged_exchange(self.group, self.ranks, rows, routing.counts, multiplied)
        return decode(done, slots, gates if gate == "after" else None).to(tokens.dtype)

    def _with_copies(
        self, copies: ExpertCopies, rows: torch.Tensor, counts: torch.Tensor, params: dict[str, torch.Tensor]
    ) -> torch.Tensor:  # fmt: skip
        """Each row to its expert's home or to one of its copies: as if every place of a rank were an expert of its own."""
        training, local = torch.is_grad_enabled(), copies.local
        came, others = copies.weights(params, training=training, changed=self._changed)
        slots = copies.slots(counts)
        order = torch.argsort(slots, stable=True)
        places = torch.bincount(slots, minlength=self.ranks * (local + copies.spare))

        def multiplied(rows: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
            began, mine = perf_counter(), int(each[:local].sum())
            done = [self._multiplied(rows[:mine], each[:local], params)]
            if len(came):
                done.append(self._multiplied(rows[mine:], each[local : local + len(came)], others))
            copies.rows, copies.rows_s = copies.rows + len(rows), copies.rows_s + perf_counter() - began
            return tied(torch.cat(done), came) if training else torch.cat(done)

        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        done = ragged_exchange(self.group, self.ranks, rows.index_select(0, order), places, multiplied).index_select(0, back)
        copies.after_call(counts, training=training)
        return done

    def _multiplied(self, rows: torch.Tensor, counts: torch.Tensor, params: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self.ways is not None
        each = counts.tolist()
        way = self.ways.choose(each)
        widths = (self.form.model, self.form.inner, self.form.output)
        if way == "grouped" and len(self.ways.ways) > 1 and not grouped_applies(len(rows), widths, rows.dtype):
            way = "loop"
        began = perf_counter()
        done = self.form.run_rows(rows, counts, params, way, self.ways.block)
        self.ways.record(way, each, perf_counter() - began)
        return done

    def _agreed(self, tokens: torch.Tensor, ask: Ask, routing: Routing | None) -> int:
        """The capacity; what the ranks disagree on, or all have wrong, is raised here. The time of the step before goes to the search."""
        last, self._last = self._last, None
        known = 0 if last is None else int.from_bytes(hashlib.sha256(repr(last[:3]).encode()).digest()[:7])
        training = torch.is_grad_enabled()
        seen = tuple(x for p in self.parameters() for x in (p._version, p.data_ptr())) if self.copies is not None else ()
        facts = Facts(
            demand=int(routing.counts.max()) if routing is not None else 0, tokens=len(tokens), finite=ask.finite,
            time_s=last[3] if last else 0.0, equal=(ask.k, number_of(float(ask.factor)), ask.scored, tokens.shape[1], known, int(training)),
            changed=seen != self._seen,
        )  # fmt: skip
        agreed = agree(facts, self.group, self.rank, self.ranks)
        self._demand, self._seen, self._changed = agreed.demand, seen, agreed.changed
        if tokens.shape[1] != self.form.model:
            raise UsageError(f"tokens have {tokens.shape[1]} elements, the experts take {self.form.model}", where="MoELayer")
        if ask.scored != self.experts:
            raise UsageError(
                f"the router scores {ask.scored} experts, the layer has {self.experts}", where="router",
                hint=f"a router for {self.experts} experts; another number of experts is another layer",
            )  # fmt: skip
        if not 1 <= ask.k <= self.experts:
            raise UsageError(f"k must be 1..{self.experts} (there are {self.experts} experts), got {ask.k}", where="k", hint=f"k={self.experts}")
        if last is not None:
            self.searches[last[0]].record(last[1], last[2], agreed.time_s)
        factor = 0.0 if self.ways is not None else ask.factor
        return capacity_of(factor, tokens=agreed.tokens, experts=self.experts, k=ask.k, demand=agreed.demand, alignment=self.alignment)

    def _through(self, encoded: torch.Tensor, counts: torch.Tensor, slices: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Buffers [E, C, H] through the experts. `counts` [E]: filled rows of each, the first ones."""
        if self.ranks == 1:
            return self._filled(encoded, counts)
        self.used = self.choice or self.searches[torch.is_grad_enabled()].choose(encoded.shape[1])
        return self.runner.run(encoded, slices, whole, self.used)

    def _filled(self, encoded: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """In one process filled rows alone are multiplied: in the order, and so with the sums, of rows without buffers."""
        experts, capacity, width = encoded.shape
        at = torch.arange(experts * capacity, device=encoded.device).view(experts, capacity)
        at = at[at % capacity < counts.unsqueeze(1)]
        rows, form = encoded.reshape(-1, width).index_select(0, at), self.form
        grouped = form.inner and grouped_applies(len(rows), (form.model, form.inner, form.output), rows.dtype)
        done = form.run_rows(rows, counts, self.local_parameters(), "grouped" if grouped else "loop", self.spread.block)
        return done.new_zeros(experts * capacity, form.output).index_copy(0, at, done).view(experts, capacity, -1)

    def _took(self, choice: Choice, capacity: int, time_s: float, which: str) -> None:
        """A pass is over; the time of a training step is that of both."""
        if which == "forward":
            self._forward_s = time_s
        elif self.choice is None:
            self._last = (which == "backward", capacity, choice, time_s + (self._forward_s if which == "backward" else 0.0))
