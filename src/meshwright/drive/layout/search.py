"""From a captured graph and a fabric to ranked layouts: layer table, network, runtime, search. No model is touched, nothing is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from ...cost import Cost
from ...decide.layout.layer_costs import Precision, layer_table
from ...decide.layout.mixed.candidate import Pool, Problem
from ...decide.layout.mixed.nearest import nearest_feasible
from ...decide.layout.mixed.search import Demands, Found, require_methods, search_mixed, uniform_choices
from ...errors import Infeasible, Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...fabric.servers import ServerKind, network_of, server_kinds
from ...graph.graph import OpGraph
from ...plan.routing import UNIFORM, Routing
from ...profile.frameworks import TIME_ERROR, Framework
from ...profile.layer_table import RECOMPUTE, LayerTable, Recompute
from ...profile.network import TrainingRuntime
from .schedules import LayoutSchedules

__all__ = ["LayoutFindings", "find_expert_layouts", "find_layouts", "framework_runtime", "runtime_of_servers"]

# Samples per micro-batch that are tried unless others are asked for.
TRIED_MICROBATCHES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class LayoutFindings:
    found: Found
    problem: Problem
    demands: Demands
    precision: Precision


def runtime_of_servers(kinds: Sequence[ServerKind], table: LayerTable, cost: Cost) -> TrainingRuntime:
    """How messages behave, from fabric and cost: shared NICs, latency of the farthest message; sizes in the table are bytes already."""
    return TrainingRuntime(
        activation_bytes_per_value=1.0, gradient_bytes_per_value=table.state.message, saved_bytes_per_value=1.0,
        state_bytes_per_parameter=sum(table.state[:3]), gpus_per_server={k.name: k.gpus for k in kinds},
        nics_by_device={k.name: k.nics for k in kinds if k.nics},
        per_message_s=cost.transport.per_message_s + max(k.outside_latency_s for k in kinds), source=cost.source,
    )  # fmt: skip


def framework_runtime(runtime: TrainingRuntime, made: Framework, kinds: Sequence[ServerKind]) -> TrainingRuntime:
    """`runtime` as the framework behaves: sends, overlap of gradients, the host's time, what its process holds beside the model."""
    return msgspec.structs.replace(
        runtime, p2p=made.p2p, overlap_gradients=made.overlap_gradients, per_action_s=made.per_action_s, per_iteration_s=made.per_iteration_s,
        compute_error=TIME_ERROR,
        constant_memory_bytes={**runtime.constant_memory_bytes, **({k.name: made.constant_bytes for k in kinds} if made.constant_bytes else {})},
        source=f"{runtime.source}, {made.name}",
    )  # fmt: skip


def find_layouts(
    graph_at: Callable[[int], OpGraph], fabric: Fabric, cost: Cost, *, global_batch: int, precision: Precision,
    microbatches: Iterable[int] = TRIED_MICROBATCHES, tensors: Iterable[int] = (), sequence: bool = True, memory_bytes: int = 0,
    demands: Demands | None = None, methods: Iterable[str] = (), adjust: Callable[[TrainingRuntime], TrainingRuntime] | None = None,
    simulated: int = 50, refine: int = 5, levels: Iterable[int] = (0, 1, 2, 3),
    sharding_messages: Literal["overlapped", "blocking"] = "overlapped", recompute: Iterable[Recompute] = RECOMPUTE, schedules: Iterable[str] = (),
    framework: Framework | None = None, contexts: Sequence[int] = (), experts: int = 1, routing: Routing = UNIFORM,
) -> LayoutFindings:  # fmt: skip
    """Ranked layouts. `memory_bytes`: of every device instead of the fabric's; `adjust` changes the runtime; `schedules`: names of those allowed
    beside 1F1B, none for all.

    `framework`: whose kernels, state, overlap and overheads the prices are of; None: operators alone on a roofline.
    `contexts`: degrees of context parallelism beside 1, by default those that leave ranks long sequences (`context_degrees`); (1,): none.
    `experts`: the degree of expert parallelism, `routing`: how tokens choose experts. `tensors`: degrees, by default all powers of two in a server;
    `levels`, `recompute`: sharding levels and recomputation allowed.

    Raises: Infeasible, UsageError, Disconnected and what the parts raise.
    """
    fabric.require_connected()
    if global_batch < 1:
        raise UsageError(f"must be >= 1, got {global_batch}", where="global batch")
    kinds = server_kinds(fabric)
    largest = max(k.gpus for k in kinds)
    degrees = sorted(set(tensors)) or [t for t in (1 << i for i in range(largest.bit_length())) if t <= largest]
    allowed = set(levels)
    if not allowed or not allowed <= {0, 1, 2, 3}:
        raise UsageError("sharding levels are 0, 1, 2 and 3", where="levels")
    again = set(recompute)
    if not again or not again <= set(RECOMPUTE):
        raise UsageError(f"recomputation is one of {', '.join(RECOMPUTE)}", where="recompute")
    sizes = sorted({m for m in microbatches if m >= 1 and global_batch % m == 0})
    if not sizes:
        raise UsageError(f"no micro-batch divides a global batch of {global_batch}", where="micro-batches", hint="add 1, which divides every batch")
    orders, named = LayoutSchedules(tuple(schedules)), tuple(methods)
    require_methods(named)
    wanted = demands or Demands()
    wanted.require({k.name for k in kinds})
    priced = partial(  # the first that needs the graph, which may take long to capture
        layer_table, graph_at, kinds, cost, tensors=degrees, precision=precision, sequence=sequence, sharding_messages=sharding_messages,
        framework=framework, watts=demands.watts if demands is not None else None, contexts=contexts, experts=experts, routing=routing,
    )  # fmt: skip
    table = priced(microbatches=sizes)
    pools = tuple(Pool(kind=k, memory_bytes=memory_bytes or k.device.memory_bytes) for k in kinds)
    runtime = runtime_of_servers(kinds, table, cost)
    if framework is not None:
        runtime = framework_runtime(runtime, framework, kinds)
    problem = Problem(
        table=table, pools=pools, network=network_of(kinds), runtime=adjust(runtime) if adjust else runtime, global_batch=global_batch,
        choices=tuple(c for c in uniform_choices() if c.sharding in allowed and c.recompute in again), schedules=orders,
    )  # fmt: skip
    try:
        found = search_mixed(problem, wanted, methods=named, simulated=simulated, refine=refine)
    except Infeasible as error:
        def smaller() -> Problem:
            return replace(problem, table=priced(microbatches=[1, *sizes]))

        raise nearest_feasible(error, problem, wanted, smaller=smaller, methods=named) from None
    return LayoutFindings(found=found, problem=problem, demands=wanted, precision=precision)


def find_expert_layouts(degrees: Sequence[int], find: Callable[[int], LayoutFindings]) -> tuple[LayoutFindings, dict[int, str]]:
    """The findings of the best of several expert degrees, and what each came to. `find`: `find_layouts` of one.

    The bound of any layout becomes the least of those of all degrees: no layout with any of them is faster. Raises: what `find` does where no degree
    has a layout; UsageError without degrees.
    """
    if not degrees:
        raise UsageError("no expert degree", where="--ep", hint="e.g. --ep 1,8,64")
    made: dict[int, LayoutFindings] = {}
    said: dict[int, str] = {}
    for degree in degrees:
        try:
            made[degree] = find(degree)
            said[degree] = f"{made[degree].found.best.time_s:.6g} s"
        except (Infeasible, Unsupported) as error:
            if degree == degrees[-1] and not made:
                raise
            said[degree] = error.message
    best = min(made, key=lambda d: made[d].found.best.time_s)
    loosest = min(made.values(), key=lambda x: x.found.bounds.universal_s).found.bounds
    found = made[best].found
    bounds = replace(found.bounds, universal_s=loosest.universal_s, universal=loosest.universal)
    return replace(made[best], found=replace(found, bounds=bounds)), said
