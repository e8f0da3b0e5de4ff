"""A plan's step beside its owner's, in one precision: what both sides are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import torch

from ...capture.exporting import line_of, places_noted
from ...capture.precision import PRECISIONS, trace_job
from ...capture.regions import REGION
from ...errors import MeshwrightError, Unsupported
from ...job import Training
from ...plan.batch_statistics import shared_norms
from ...plan.plan import Plan, TrainingLayout
from ...program.program import Program
from ..steps.forward_graph import OPAQUE, ForwardGraph, ForwardNode, from_traced
from ..train.data import Batches, Dataset, open_data
from ..train.dropout import Draws, SerialDraws, random_places
from ..train.loss_counts import LossCounts
from ..train.loss_terms import argument, loss_terms
from ..train.segment_builder import is_random
from ..train.segments import random_seed
from .differences import Tolerance, tolerance_of
from .graph_run import GraphRun, first_mixing
from .planned import RankStep, planned_step
from .step import Owner, Part
from .wide import wide_graph

__all__ = ["COMPARED", "Case"]

COMPARED = {"loss": "loss", "gradient": "gradients", "buffer": "buffers", "parameter": "parameters after the optimizer"}
ALIAS = "aten.alias.default"
LATER_BATCHES = 4  # whose loss alone is looked at, where it is not understood


@dataclass
class Case:
    """A plan's step in one precision. `inputs`: the graph whose inputs the data has the types of."""

    plan: Plan
    layout: TrainingLayout
    job: Training
    graph: ForwardGraph
    program: Program
    data: str | Dataset
    owner: Owner
    inputs: ForwardGraph | None = None

    @property
    def opaque(self) -> bool:
        return any(n.target == OPAQUE for n in self.graph.nodes)

    @cached_property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.owner.parameters().values() if p.dtype.is_floating_point), torch.float32)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is compared: codecs change gradients by intent."""
        return ("loss", "buffer") if any(b.codec for b in self.layout.buckets) else tuple(COMPARED)

    @cached_property
    def tolerance(self) -> Tolerance:
        """Of the coarsest type that anything is computed in: autocast and the owner's code may go below that of the parameters."""
        kinds = {getattr(torch, o.dtype) for n in self.graph.nodes for o in n.outputs if o is not None}
        kinds |= {p.dtype for p in self.owner.parameters().values()}
        if (cast := PRECISIONS[self.job.asked.precision]) is not None:
            kinds.add(cast)
        return tolerance_of(max((k for k in kinds if k.is_floating_point), key=lambda k: float(torch.finfo(k).eps), default=self.dtype))

    @property
    def drawn_otherwise(self) -> list[ForwardNode]:
        """Calls that draw random numbers which are not dropout's, modules that run as they are included."""
        places = random_places(self.graph)
        return [n for n in self.graph.nodes if is_random(n) and n.name not in places and not _draws_none(n)]

    @cached_property
    def draws(self) -> bool:
        return bool(random_places(self.graph))

    @cached_property
    def _batches(self) -> Batches:
        examples = self.owner.initial.examples
        dataset = open_data(self.data, examples, self.job.seed, self.job.global_batch) if isinstance(self.data, str) else self.data
        return Batches(dataset, self.layout, (self.inputs or self.graph).inputs, torch.device("cpu"))

    def microbatch(self, step: int, replica: int, microbatch: int) -> Sequence[torch.Tensor]:
        found = self._batches.microbatch(step, replica, microbatch)
        return [x.to(self.dtype) if x.is_floating_point() and self.inputs is not None else x for x in found]

    def pieces(self) -> list[tuple[int, int]]:
        """(replica, micro-batch) in the order of samples; of ranks that divide positions, the first."""
        return [(d, m) for d in range(0, self.layout.data, self.layout.context) for m in range(self.layout.microbatches_of(d))]

    def whole(self, step: int = 0) -> Part:
        """The global batch at once, with the dropout that the plan's ranks draw."""
        columns = zip(*(self.microbatch(step, d, m) for d, m in self.pieces()), strict=True)
        return Part([torch.cat(column) for column in columns], random=self.serial(0, self.layout.global_batch))

    def serial(self, first: int, samples: int) -> Callable[[], AbstractContextManager[object]]:
        if not self.draws:
            return nullcontext
        places = list(random_places(self.graph).values())
        return lambda: SerialDraws(Draws(seed=self.plan.seed, step=0, first=first, samples=samples), places)

    def own(self, replica: int, microbatch: int) -> Callable[[], AbstractContextManager[object]]:
        """The dropout of a micro-batch."""
        return self.serial(self.layout.first_sample(replica, microbatch), self.layout.microbatch_size)

    def parts(self) -> list[Part]:
        """Micro-batch by micro-batch, each counting for what it counts in the plan; random numbers of an opaque model as its rank draws them."""
        weights = self.weights()
        found = []
        for (d, m), weight in zip(self.pieces(), weights, strict=True):
            random = self.own(d, m)
            if self.opaque:
                random = partial(_seeded, random_seed(self.plan.seed, 0, d, m, self.layout.segments[0].key))
            found.append(Part(self.microbatch(0, d, m), weight, random))
        return found

    def later_losses(self) -> Iterator[tuple[float, float]]:
        """(of the whole batch, of its micro-batches as the plan weighs them) by the owner's module, of a few batches after the first."""
        share = 1.0 / len(self.pieces())
        for step in range(1, 1 + LATER_BATCHES):
            with torch.random.fork_rng(devices=[]):
                parts = [Part(self.microbatch(step, d, m), share, self.own(d, m)) for d, m in self.pieces()]
                yield self.owner.loss([self.whole(step)]), self.owner.loss(parts)

    def weights(self) -> list[float]:
        """Raises: Unsupported where micro-batches have no weight of their own."""
        terms, count = loss_terms(self.graph), len(self.pieces())
        if not terms:
            return [1.0 / count] * count
        if [*terms] != [*self.graph.outputs[:1]]:
            raise Unsupported("the loss has several terms that are not means over samples")
        counts = self.counts()
        return [counts.weight(self.microbatch(0, d, m), count) for d, m in self.pieces()]

    def counts(self) -> LossCounts:
        """Filled with what the whole batch counts."""
        terms = loss_terms(self.graph)
        divisors = {n: torch.ones((), dtype=torch.float64) for n in terms}
        constants = {n: c.tensor() for n, c in self.graph.constants.items()}
        counts = LossCounts(self.graph, terms, divisors, constants, self.owner.buffers())
        counts.fill(counts.sums([self.microbatch(0, d, m) for d, m in self.pieces()]), len(self.pieces()))
        return counts

    def counted_parts(self) -> list[Part]:
        """Micro-batch by micro-batch by the traced calls, divided by what the whole batch counts: where the owner's loss of a micro-batch alone has
        no weight in the batch's."""
        counts = self.counts()

        def loss(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
            return _run_of(self.graph, module).loss(inputs, counts.terms, counts.divisors)

        share = 1.0 / len(self.pieces())
        return [Part(self.microbatch(0, d, m), share, self.own(d, m), loss) for d, m in self.pieces()]

    def traced_as_owned(self) -> bool:
        """Whether the traced calls are the owner's module, on every micro-batch by itself: losses and gradients."""

        def loss(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
            return _run_of(self.graph, module).loss(inputs)

        for d, m in self.pieces():
            inputs = self.microbatch(0, d, m)
            own, traced = (self.owner.step([Part(inputs, 1.0, self.own(d, m), x)]) for x in (None, loss))
            pairs = [(torch.tensor(own.loss), torch.tensor(traced.loss)), *((g, traced.gradients.get(n)) for n, g in own.gradients.items())]
            largest = max((float(g.abs().max()) for g in own.gradients.values() if g.numel()), default=0.0)
            for a, b in pairs:
                floor = self.tolerance.relative * max(float(a.abs().nan_to_num().max()), self.tolerance.floor * largest)
                if b is None or bool(((a - b).abs().nan_to_num(posinf=0.0) > floor).any()) or not torch.equal(a.isnan(), b.isnan()):
                    return False
        return True

    @cached_property
    def unmixed(self) -> ForwardGraph:
        """The graph in which normalisations whose statistics replicas share give back what they are given."""
        shared = shared_norms(self.layout)
        nodes = [msgspec.structs.replace(n, target=ALIAS, args=n.args[:1], kwargs={}) if n.name in shared else n for n in self.graph.nodes]
        return msgspec.structs.replace(self.graph, nodes=tuple(nodes)) if shared else self.graph

    def mixing(self) -> ForwardNode | None:
        """The first call that brings samples together, beside what replicas share; None where that is not known."""
        if self.opaque:
            return None
        d, m = self.pieces()[0]
        graph, inputs, others = self.unmixed, [*self.microbatch(0, d, m)], [*self.microbatch(1, d, m)]
        if self.layout.microbatch_size == 1:
            try:
                graph = from_traced(trace_job(self.job, batch_size=2, device="cpu"))
            except MeshwrightError:
                return None
            graph = wide_graph(graph) if self.inputs is not None else graph
            inputs, others = ([torch.cat([x, y]) for x, y in zip(a, b, strict=True)] for a, b in ((inputs, others), (others, inputs)))
        return first_mixing(_run_of(graph, self.owner.build().module), inputs, others)

    def line(self, node: str, name: str = "") -> str:
        """`file:line` of the owner's code that makes a call, or the first that uses the parameter or buffer `name`; "" where that is not known."""
        users = [n.name for n in self.graph.nodes if node in ("", n.name) and (node or {f"param:{name}", f"buffer:{name}"} & {*n.inputs})]
        try:
            with places_noted():
                traced = trace_job(self.job, batch_size=self.layout.microbatch_size)
        except MeshwrightError:
            return ""
        return next((line_of(n.meta) for n in traced.graph_module.graph.nodes if n.name in users[:1]), "")

    def planned(self) -> list[RankStep]:
        opaque = None
        if any(n.target == REGION for n in self.graph.nodes):  # tracing makes the modules that are kept whole known here
            trace_job(self.job, batch_size=self.layout.microbatch_size, device="cpu")
        if self.opaque:
            traced = trace_job(self.job, batch_size=self.layout.microbatch_size, device="cpu", opaque=True)
            opaque = next(n.target for n in traced.graph_module.graph.nodes if n.op == "call_function")
        return planned_step(
            self.program, self.layout, self.graph, self.job, parameters=self.owner.parameters(), buffers=self.owner.buffers(), data=self,
            seed=self.plan.seed, dtype=self.dtype, opaque=opaque,
        )  # fmt: skip


def _draws_none(node: ForwardNode) -> bool:
    """A call whose operator may draw, with arguments by which it does not: dropout of probability 0, and recurrent layers without it."""
    if any(x in node.target for x in ("dropout", "attention")):
        return True
    recurrent = node.target.split(".")[1:2] in (["lstm"], ["gru"], ["rnn_tanh"], ["rnn_relu"])
    return recurrent and not (argument(node, "dropout", 0.0) and argument(node, "train", True))


def _seeded(seed: int) -> AbstractContextManager[object]:
    torch.manual_seed(seed)
    return nullcontext()


def _run_of(graph: ForwardGraph, module: torch.nn.Module) -> GraphRun:
    return GraphRun(graph, dict(module.named_parameters()), dict(module.named_buffers()))
