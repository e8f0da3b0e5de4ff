"""A mixture-of-experts layer that changes its parallelism between two steps without moving a weight.

Cite: C. Hwang and others, "Tutel: Adaptive Mixture-of-Experts at Scale" (MLSys 2023, arXiv 2206.03382).
Left open by the paper: ranks that disagree, scores that are not finite, no tokens at all. Our answer: one small all-reduce before each step tells all
ranks of them, so all raise the same error.
Deviations: capacity is aligned for every choice at once, so the choice changes no output; what was dropped is counted (`dropped`).
Invariant: outputs, gradients and losses are those of one process with all experts, but for the order of sums.
Cost: that of the experts on E · C rows over all ranks, and the exchanges of `decide.experts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..decide.experts import Choice, DictionarySearch, ExpertShape, Tutel
from ..decide.experts.megablocks import FittedWays
from ..decide.experts.search import TableSearch
from ..decide.experts.tutel import alignment_of
from ..drive.experts import LayerPrograms, table_of
from ..drive.plans import read_fabric, read_plan
from ..errors import Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..kernels.experts import Routing, capacity_of, decode, encode, load_balance_loss, load_importance_loss, route, slots_of
from ..kernels.experts.dropless import WAYS, first_rows, grouped_applies
from ..plan.plan import Plan
from ..run.experts import ExchangeRunner, Facts, WeightLayout, agree
from ..run.experts.agreement import number_of
from ..run.experts.ragged import ragged_exchange
from .experts import ExpertForm
from .routers import LinearRouter

__all__ = ["MoELayer"]


class MoELayer(torch.nn.Module):  # type: ignore[misc]
    """y [..., output] = sum over a token's k experts of gate · expert(x [..., H]). Call it on all ranks of `group`, also without tokens.

    experts: their number, over all ranks. form: `FeedForward`, `GatedFeedForward`, `ModuleExpert`, or your own `ExpertForm`.
    k, capacity_factor: defaults of every call; the factor f as in `kernels.experts.capacity_of`: > 0 fixed, 0 drops nothing, < 0 at most.
    prioritised: batch-prioritised routing. normalise: a token's gates add up to 1. gate: "after" weighs what experts give, "before" what they get.
    loss: "balance" (GShard) or "importance" (with `noise`), in `l_aux` after every call; noise: deviation of that on logits in training, times E.
    choice: (r, d, algorithm) of every step, or "search": tried and measured while training goes on. chunks, algorithms: tried.
    dropless: "loop", "padded", "grouped", "sparse" (blocks of `block`) or "auto", fitted to measured steps: rows of any number each instead of
        buffers, whatever capacity_factor says; among ranks for as many experts or a multiple of them.
    plan: of `experts plan`, or its file: the choice of every range of capacities comes from its table, and nothing is tried.
    fabric: a preset, file or Fabric whose devices are the group's ranks in order; it says what lies in one server. None: one switch.
    seed: of the experts' first weights, the same on all ranks; None: torch's own generator must be alike everywhere.

    After a call: `l_aux`, `dispatch_count` [E] (demand at this rank), `capacity`, `dropped` (choices of this rank's tokens that found no place),
    `used` (the choice). Expert parameters are apart on every rank and must not be averaged (`expert_parameters`); gradients are sums over all ranks.
    Raises: UsageError, Unsupported (an algorithm that does not apply); from calls on all ranks: NotFinite, RankDiverged, UsageError, GroupFailed.
    """

    def __init__(
        self, form: ExpertForm, experts: int, *, k: int = 2, capacity_factor: float = 1.0, router: torch.nn.Module | None = None,
        prioritised: bool = False, normalise: bool = True, gate: Literal["after", "before"] = "after",
        loss: Literal["balance", "importance"] = "balance", noise: float = 0.0, choice: Choice | tuple[int, int, str] | Literal["search"] = "search",
        dropless: str = "", block: int = 16, chunks: Sequence[int] = (1, 2, 4), algorithms: Sequence[str] = ("linear",), window: int = 128,
        fabric: str | Fabric | None = None, group: Any = None, seed: int | None = None, plan: str | Plan | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if gate not in ("after", "before") or loss not in ("balance", "importance"):
            raise UsageError(f"no gate {gate!r} or loss {loss!r}", where="MoELayer", hint="gate: after, before; loss: balance, importance")
        self.group = group if group is not None else (dist.group.WORLD if dist.is_initialized() else None)
        self.rank: int = 0 if self.group is None else self.group.rank()
        self.ranks: int = 1 if self.group is None else self.group.size()
        self.form, self.experts, self.k, self.capacity_factor = form, experts, k, capacity_factor
        self.prioritised, self.normalise, self.gate, self.loss, self.noise = prioritised, normalise, gate, loss, noise
        self.router = router or LinearRouter(form.model, experts)
        self.layout = WeightLayout(self.ranks, experts, form.sliced, form.whole)
        self.shape = ExpertShape(
            ranks=self.ranks, experts=experts, model=form.model, inner=form.inner, output=form.output, matrices=form.matrices,
            inner_elements=self.layout.slice_elements * self.layout.shares // self.layout.local, whole_elements=self.layout.whole_elements,
        )  # fmt: skip
        self.programs = self._programs(fabric)
        options = Tutel(chunks=tuple(chunks), algorithms=tuple(algorithms), window=window)
        self.choice = None if choice == "search" else Choice(*choice)
        self.ways = self._ways(dropless, block)
        searches: dict[bool, DictionarySearch | TableSearch]
        if plan is not None:
            table, window = table_of(plan if isinstance(plan, Plan) else read_plan(plan), self.shape)
            candidates = tuple(dict.fromkeys(table.values()))
            chunks = tuple(c.chunks for c in candidates)
            searches = dict.fromkeys((True, False), TableSearch(table, window=window))
        else:
            candidates = self._candidates(options) if self.choice is None else (self.choice,)
            searches = {training: DictionarySearch(candidates, window=window) for training in (True, False)}
        self.searches = searches
        self.alignment = alignment_of(self.shape.shares, tuple(chunks) if self.choice is None else (self.choice.chunks,))
        self.runner = ExchangeRunner(self.group, self.rank, self.programs, self.layout, form.run, self._took)
        self._last: tuple[bool, int, Choice, float] | None = None  # of the step before: in training?, capacity, choice, seconds
        self._forward_s = 0.0
        self._begin(seed)
        self.l_aux: torch.Tensor | None = None
        self.dispatch_count: torch.Tensor | None = None
        self.capacity, self.dropped, self._demand, self.used = 0, 0, 0, candidates[0]

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

    def _candidates(self, options: Tutel) -> tuple[Choice, ...]:
        from ..decide.experts import ExpertProblem

        problem = ExpertProblem(fabric=self.programs.fabric, ranks=self.programs.ranks, shape=self.shape, capacities=(1,))
        found = options.plan(problem).candidates
        if self.ranks > 1:
            for choice in found:
                self.programs.exchanges(choice)  # refuses what does not apply here
        return found

    def _begin(self, seed: int | None) -> None:
        """First weights: all experts are drawn on every rank, in order, and each keeps its own."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        each = [self.form.initial(generator) for _ in range(self.experts)]
        slices, whole = self.layout.part({name: torch.stack([e[name] for e in each]) for name in each[0]}, self.rank)
        self.slices, self.whole = torch.nn.Parameter(slices), torch.nn.Parameter(whole)
        for parameter in self.expert_parameters():
            parameter.meshwright_expert = True

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's own: leave them out of data-parallel averages."""
        return [self.slices, self.whole]

    # ---- a step ------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, *, k: int | None = None, capacity_factor: float | None = None) -> torch.Tensor:
        """x: [..., H]. Other ranks may have other numbers of tokens."""
        k, factor = k or self.k, self.capacity_factor if capacity_factor is None else capacity_factor
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        noisy = logits + self.noise * torch.randn_like(logits) / self.experts if self.training and self.noise > 0 else logits
        scores = torch.softmax(noisy, dim=1)
        fits = logits.shape[1] == self.experts and 1 <= k <= self.experts and bool(torch.isfinite(logits).all())
        routing = route(scores, k, prioritised=self.prioritised, normalise=self.normalise) if fits else None
        capacity = self._agreed(tokens, logits, k, factor, routing)
        assert routing is not None, "what does not fit is refused by all ranks"
        self.dispatch_count, self.capacity = routing.counts, capacity
        self.l_aux = self._loss(scores, logits, noisy, routing)
        if self.ways is not None:
            self.capacity, self.dropped = self._demand, 0
            return self._rows(x, tokens, routing)
        slots = slots_of(routing.experts, routing.locations, capacity)
        self.dropped = int((slots < 0).sum())
        rows = self.experts * capacity
        if not rows:  # no rank has a token
            return x.new_zeros(*x.shape[:-1], self.form.output) + 0 * self.slices.sum()
        gates = routing.gates.to(self.slices.dtype)
        encoded = encode(tokens.to(gates.dtype), slots, rows, gates if self.gate == "before" else None)
        done = self._through(encoded.view(self.experts, capacity, -1))
        out = decode(done.view(rows, -1), slots, gates if self.gate == "after" else None)
        return out.to(x.dtype).view(*x.shape[:-1], self.form.output)

    def _rows(self, x: torch.Tensor, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Without buffers: all rows of an expert follow each other."""
        slots = first_rows(routing.counts)[routing.experts] + routing.locations
        gates = routing.gates.to(self.slices.dtype)
        rows = encode(tokens.to(gates.dtype), slots, slots.numel(), gates if self.gate == "before" else None)
        if self.ranks == 1:
            done = self._multiplied(rows, routing.counts)
        else:
            done = ragged_exchange(self.group, self.ranks, rows, routing.counts, self._multiplied)
        out = decode(done, slots, gates if self.gate == "after" else None)
        return out.to(x.dtype).view(*x.shape[:-1], self.form.output)

    def _multiplied(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert self.ways is not None
        params = self.layout.sliced_of(self.slices, self.layout.local) if self.layout.sliced else {}
        params |= self.layout.whole_of(self.whole, self.layout.local) if self.layout.whole else {}
        each = counts.tolist()
        way = self.ways.choose(each)
        widths = (self.form.model, self.form.inner, self.form.output)
        if way == "grouped" and len(self.ways.ways) > 1 and not grouped_applies(len(rows), widths, rows.dtype):
            way = "loop"
        began = perf_counter()
        done = self.form.run_rows(rows, counts, params, way, self.ways.block)
        self.ways.record(way, each, perf_counter() - began)
        return done

    def _agreed(self, tokens: torch.Tensor, logits: torch.Tensor, k: int, factor: float, routing: Routing | None) -> int:
        """The capacity; what the ranks disagree on, or all have wrong, is raised here. The time of the step before goes to the search."""
        last, self._last = self._last, None
        known = 0 if last is None else int.from_bytes(hashlib.sha256(repr(last[:3]).encode()).digest()[:7])
        training = torch.is_grad_enabled()
        facts = Facts(
            demand=int(routing.counts.max()) if routing is not None else 0, tokens=len(tokens), finite=bool(torch.isfinite(logits).all()),
            time_s=last[3] if last else 0.0, equal=(k, number_of(float(factor)), logits.shape[1], tokens.shape[1], known, int(training)),
        )  # fmt: skip
        agreed = agree(facts, self.group, self.rank, self.ranks)
        self._demand = agreed.demand
        if tokens.shape[1] != self.form.model:
            raise UsageError(f"tokens have {tokens.shape[1]} elements, the experts take {self.form.model}", where="MoELayer")
        if logits.shape[1] != self.experts:
            raise UsageError(
                f"the router scores {logits.shape[1]} experts, the layer has {self.experts}", where="router",
                hint=f"a router for {self.experts} experts; another number of experts is another layer",
            )  # fmt: skip
        if not 1 <= k <= self.experts:
            raise UsageError(f"k must be 1..{self.experts} (there are {self.experts} experts), got {k}", where="k", hint=f"k={self.experts}")
        if last is not None:
            self.searches[last[0]].record(last[1], last[2], agreed.time_s)
        factor = 0.0 if self.ways is not None else factor
        return capacity_of(factor, tokens=agreed.tokens, experts=self.experts, k=k, demand=agreed.demand, alignment=self.alignment)

    def _loss(self, scores: torch.Tensor, logits: torch.Tensor, noisy: torch.Tensor, routing: Routing) -> torch.Tensor:
        if self.loss == "balance":
            return load_balance_loss(scores, routing.experts[:, 0])
        return load_importance_loss(torch.softmax(logits, 1), noisy.gather(1, routing.experts), self.noise)

    def _through(self, encoded: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            params = self.layout.sliced_of(self.slices, self.experts) if self.layout.sliced else {}
            return self.form.run(encoded, params | (self.layout.whole_of(self.whole, self.experts) if self.layout.whole else {}), 1.0)
        self.used = self.choice or self.searches[torch.is_grad_enabled()].choose(encoded.shape[1])
        return self.runner.run(encoded, self.slices, self.whole, self.used)

    def _took(self, choice: Choice, capacity: int, time_s: float, which: str) -> None:
        """A pass is over; the time of a training step is that of both."""
        if which == "forward":
            self._forward_s = time_s
        elif self.choice is None:
            self._last = (which == "backward", capacity, choice, time_s + (self._forward_s if which == "backward" else 0.0))

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def full_experts(self) -> dict[str, torch.Tensor]:
        """Parameters of all experts, stacked [E, ...], on every rank; to be called on all of them. Raises: GroupFailed."""
        if self.ranks == 1:
            return self.layout.full([self.slices.detach()], [self.whole.detach()])
        parts = []
        for own in (self.slices.detach(), self.whole.detach()):
            every = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(every, own, group=self.group) if own.numel() else None
            parts.append(every)
        return self.layout.full(*parts)

    def load_full_experts(self, full: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of what `full_experts` gave, on any number of ranks. Raises: FormatError for another kind or number of experts."""
        with torch.no_grad():
            for parameter, part in zip(self.expert_parameters(), self.layout.part(full, self.rank), strict=True):
                parameter.copy_(part)
