"""AutoDDL: the SBP signature of every operator on every mesh of the devices, by exact search, integer programme or coordinate descent.

Cite: see CITE.
Left open by the paper: gradients that are already complete (its grad(B) = P costs an all-reduce too many), layers that must change together,
values with several readers, several readers of one gather, memory. Our answers: types R and B, exact elimination (optimal on chains and on graphs of
small width) with pair moves beside it, hubs, a price on memory with an integer programme behind.
Deviations: see DEVIATIONS. The baselines (data parallel, Megatron pairs, convolutions data + fully connected tensor parallel, their product on two
axes) are always among the candidates, each in its best form, so that the answer is never slower than they are in the model.
Invariant: the plan's bytes are those its execution sends; no plan is below its bounds; equal inputs and seed give equal bytes.
Cost: meshes x elimination, O(vertices · S³) for graphs that reduce by degree 2, S <= types^axes choices per vertex.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Infeasible, TimeLimit, UnknownName, Unsupported
from ....kernels.effort import Budget, Cut
from ....plan.sharding import BucketRecord, MoveRecord, ShardingPlan, ValueState
from .bound import bound_bytes, bound_time_s, memory_limit
from .evaluate import moves
from .mesh import Mesh, all_meshes, make_mesh
from .model import Model
from .network import Network, build_network
from .problem import ShardingProblem, ShardingStrategy
from .redistribute import Step
from .search import Found, MeshSearch, attempt, least_memory
from .templates import TEMPLATES

__all__ = ["CITE", "DEVIATIONS", "SEARCHES", "AutoDDL"]

CITE = Cite(
    key="chen2023autoddl",
    title="AutoDDL: Automatic Distributed Deep Learning with Near-Optimal Bandwidth Cost",
    year=2023,
    venue="arXiv:2301.06813; IEEE TPDS",
)
DEVIATIONS = (
    "a broadcast tensor's gradient may be complete (R) as well as partial (B)",
    "a value with several readers is redistributed once, at a hub",
    "exact elimination before coordinate descent; pair moves; integer programme under memory limits",
    "packed projections may be split in blocks",
    "operators priced by roofline, axes by the traffic of all their groups on the fabric's routes",
)
SEARCHES = ("auto", "exact", "ilp", "descent", *TEMPLATES)


@dataclass(frozen=True, kw_only=True)
class AutoDDL(ShardingStrategy):
    """Options. `search`: auto (templates, exact, else descent), exact, ilp, descent, or one template only. `mesh`: only this one."""

    name: ClassVar[str] = "autoddl"
    cite: ClassVar[Cite] = CITE

    search: str = "auto"
    restarts: int = 20
    pairs: bool = True
    mesh: tuple[int, ...] | None = None
    time_limit_s: float = 120.0

    def plan(self, problem: ShardingProblem, *, rng: np.random.Generator | None = None, seed: int = 0) -> ShardingPlan:
        """The fastest plan found that fits.

        Raises: UnknownName (search), UsageError (mesh, dtypes, number of devices), Unsupported (a template that no mesh has), Infeasible (nothing
        fits in memory; says what would), TimeLimit (nothing was found in time). At the time limit the best so far is returned; its notes say what
        was not searched, and its options hold the `cut`: the meshes that were.
        """
        return self.candidates(problem, most=1, rng=rng, seed=seed)[0]

    def candidates(self, problem: ShardingProblem, *, most: int, rng: np.random.Generator | None = None, seed: int = 0) -> list[ShardingPlan]:
        """The `most` fastest plans that differ (of every mesh and way to search), fastest predicted first: to be tried out. Raises as `plan`."""
        if self.search not in SEARCHES:
            raise UnknownName(f"there is no search {self.search!r}", hint=f"there are: {', '.join(SEARCHES)}")
        problem.fabric.require_connected()
        network = build_network(problem)
        limit = memory_limit(problem)
        found: list[Found] = []
        notes: list[str] = []
        searches: list[MeshSearch] = []
        meshes = self._meshes(problem)
        budget = Budget(len(meshes), time_limit_s=self.time_limit_s)
        for mesh in meshes:
            if not budget.spend():
                notes.append(f"time was up before mesh {mesh} was searched")
                continue
            try:
                with budget.net():
                    search = MeshSearch(Model.of(problem, mesh, network), limit)
                    searches.append(search)
                    for one in self._on_mesh(search, rng if rng is not None else np.random.default_rng(seed)):
                        found.append(one)
            except TimeLimit:
                if budget.cut is None:
                    raise
                notes.append(f"time was up while mesh {mesh} was searched")
        if not found and budget.cut:
            raise budget.cut.error("no layout was found so far")
        if not found:
            raise Unsupported(f"the template {self.search} has no plan here", hint="use --strategy autoddl", data={"template": self.search})
        fitting = [f for f in found if not limit or f.evaluation.memory_bytes <= limit]
        if not fitting and budget.cut:
            raise budget.cut.error("no layout that fits in memory was found so far")
        if not fitting:
            raise _too_large(found, searches, limit)
        fitting.sort(key=lambda f: f.evaluation.time_s)
        different: dict[tuple[object, ...], Found] = {}
        for f in fitting:
            states = tuple(c[i].inputs + (c[i].output,) for c, i in zip(f.model.choices, f.assignment, strict=True))
            different.setdefault((f.model.mesh.sizes, states), f)
        return [self._document(problem, network, f, found, limit, notes, seed, budget.cut) for f in list(different.values())[:most]]

    def _meshes(self, problem: ShardingProblem) -> list[Mesh]:
        if self.mesh is not None:
            return [make_mesh(problem.fabric, problem.cost, self.mesh)]
        return all_meshes(problem.fabric, problem.cost, most=problem.max_axes)

    def _on_mesh(self, search: MeshSearch, rng: np.random.Generator) -> Iterator[Found]:
        if self.search in TEMPLATES:
            yield from search.templates([self.search])
            return
        found: list[Found] = []
        for one in search.templates():
            found.append(one)
            yield one
        if self.search in ("auto", "exact"):
            best = search.best_exact()
            if best is not None:
                found.append(best)
                yield best
                if search.fits(best) or self.search == "exact":
                    return
        if self.search == "ilp" or search.limit_bytes:
            programme = attempt(search.best_ilp)
            if programme is not None:
                found.append(programme)
                yield programme
        if self.search != "ilp" or not found:
            yield search.best_descent(found, rng, self.restarts, pairs=self.pairs)

    def _document(
        self, problem: ShardingProblem, network: Network, best: Found, found: Sequence[Found], limit: int, notes: Sequence[str], seed: int,
        cut: Cut | None,
    ) -> ShardingPlan:  # fmt: skip
        model, at = best.model, best.assignment
        sources: dict[str, tuple[str, ...]] = {}
        hubs: dict[str, tuple[str, ...]] = {}
        ops: dict[str, ValueState] = {}
        for i, vertex in enumerate(network.vertices):
            choice = model.choices[i][at[i]]
            if vertex.kind == "op":
                ops[vertex.name] = ValueState(inputs=choice.inputs, output=choice.output, names=choice.names)
            else:
                (hubs if vertex.kind == "hub" else sources)[vertex.name] = choice.output
        whole = network.whole
        said = [f"kept whole on every device, no split is known: {', '.join(whole)}"] if whole else []
        said += ["parameters are not trained" for p in problem.graph.parameters if not p.trainable][:1]
        evaluation = best.evaluation
        graph = problem.graph
        exact = [f.exact for f in found if f.what == "exact"]
        every = bool(exact) and all(exact) and not notes and len(exact) == len({f.model.mesh.sizes for f in found})
        every = every and evaluation.time_s <= min(f.evaluation.time_s for f in found)
        return ShardingPlan(
            strategy=self.name if self.search not in TEMPLATES else self.search, options=_options(self, cut), model=graph.model, loss=graph.loss,
            batch=graph.batch_size, optimizer=problem.optimizer, fabric=problem.fabric.name, fingerprint=graph.fingerprint(),
            item_bytes=problem.item_bytes, mesh=model.mesh.sizes, devices=model.mesh.devices, sources=sources, hubs=hubs, ops=ops,
            moves=_move_records(best), buckets=_bucket_records(best),
            time_s=evaluation.time_s, parts_s=evaluation.parts_s, bytes_sent=evaluation.bytes_sent, memory_bytes=evaluation.memory_bytes,
            bound_time_s=bound_time_s(model, memory_bytes=limit), bound_bytes=bound_bytes(network, model.mesh.ranks, memory_bytes=limit),
            whole=whole, notes=(*said, *notes, *([str(cut)] if cut else [])),
            alternatives=_alternatives(best, found, limit), cite=CITE.key, exact=every, seed=seed,
        )  # fmt: skip


def _steps(steps: Sequence[Step]) -> tuple[tuple[int, str], ...]:
    return tuple((s.axis, s.target) for s in steps)


def _move_records(best: Found) -> tuple[MoveRecord, ...]:
    network = best.model.network
    records = []
    for move in moves(best.model, best.assignment):
        edge = network.edges[move.edge]
        records.append(MoveRecord(
            source=network.vertices[edge.source].key, reader=network.vertices[edge.reader].key, slot=edge.slot,
            forward=_steps(move.forward), backward=_steps(move.backward), bucket=move.bucket,
        ))  # fmt: skip
    return tuple(records)


def _bucket_records(best: Found) -> tuple[BucketRecord, ...]:
    return tuple(BucketRecord(axes=axes, item=item, steps=_steps(path)) for (axes, item), path in best.evaluation.buckets.items())


def _options(strategy: AutoDDL, cut: Cut | None) -> dict[str, Any]:
    given = {k: v for k, v in asdict(strategy).items() if k != "time_limit_s"}
    return given if cut is None else given | {"cut": cut.to_json()}


def _alternatives(best: Found, found: Sequence[Found], limit: int) -> tuple[dict[str, Any], ...]:
    """The best of every way on every mesh, fastest first."""
    rows = []
    for f in sorted(found, key=lambda f: f.evaluation.time_s):
        fits = not limit or f.evaluation.memory_bytes <= limit
        why = "chosen" if f is best else "" if fits else "does not fit in memory"
        rows.append({
            "what": f.what, "mesh": list(f.model.mesh.sizes), "time_s": f.evaluation.time_s, "mean_bytes": f.evaluation.mean_bytes,
            "memory_bytes": f.evaluation.memory_bytes, "why": why,
        })  # fmt: skip
    return tuple(rows)


def _too_large(found: Sequence[Found], searches: Sequence[MeshSearch], limit: int) -> Infeasible:
    least = min([f.evaluation.memory_bytes for f in found] + [m for s in searches if (m := least_memory(s))])
    return Infeasible(
        f"no layout fits: the smallest found needs {least} bytes on a device, {limit} are there",
        hint="use more devices, a smaller batch, or devices with more memory",
        data={"limit": "memory", "needed_bytes": least, "available_bytes": limit},
    )
