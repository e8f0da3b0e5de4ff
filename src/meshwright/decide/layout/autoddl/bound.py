"""Lower bounds: bytes that any plan without redundant work must receive, and seconds that no plan of the space can beat.

Cite: Al Daas et al., "Tight memory-independent parallel matrix multiplication communication lower bounds" (SPAA 2022), for one product.
Left open there: a training step. Our answer: a fully connected layer's three products share one index space (m, n, k). A rank that does V of its
multiply-adds touches x entries of X (or dX), y of Y (dY), w of W, and x·y·w >= V² (Loomis-Whitney). A touched entry of the weights' gradient
that the rank has not computed from all m rows must come in from elsewhere: at most V/m are complete. A touched entry of X is received unless
the rank has itself done all of the product that made it; a touched entry of dY likewise. So the rank receives, per layer,

    x + y + w - V/m - V/k - V/n   words,   least over all (x, y, w) within the matrices,

with x >= V/n, y >= V/k, w >= V/m too; for V = mnk/p it is the bound of one product. The first layer's X needs not be received (inputs are
loaded anywhere). With M words of memory also 2V/sqrt(M) - M. Redundant work, r times the least, lowers the communication and raises the
work: the bound on time takes the best r per layer.
What is not counted (so the bounds hold): convolutions, attention, layers that read the same value as a larger one, small exchanges.
Invariant: no feasible plan is below (property test).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

from ....fabric.fabric import Fabric
from ....graph.graph import Work, operator_name
from .model import Model, scaled
from .network import Network
from .problem import ShardingProblem

__all__ = ["Layer", "bound_bytes", "bound_time_s", "fastest_ingress_Bps", "layers", "least_words", "memory_limit"]

LINEAR = ("linear", "addmm", "mm")
REDUNDANCY_STEPS = 64  # redundancies tried between 1 and the number of ranks, in equal ratios: more make the bound tighter
ROUNDING_SHARE = 1 - 1e-9  # rounding of floats never lifts a bound above a plan


@dataclass(frozen=True)
class Layer:
    """A product of X[m, k] and a trainable W[k, n]; `first`: X is loaded, no gradient flows into it; `item`: bytes per element."""

    node: str
    m: int
    n: int
    k: int
    item: int
    first: bool


def least_words(
    m: int, n: int, k: int, share: float, *, most: float | None = None, first: bool = False, memory: float = float("inf")
) -> float:  # fmt: skip
    """Words that a rank with a part of an m x n x k product between `share` and `most` (default: exactly `share`) receives in a step, at least."""
    volume, upper = float(m) * n * k * share, float(m) * n * k * (most if most is not None else share)
    # (entries touched at least, entries there are) of W, Y, X; an entry of W serves at most m multiply-adds, and so on
    sides = [(volume / m, float(k) * n), (volume / k, float(m) * n), (volume / n, float(m) * k)]
    have = upper / m + upper / k + (0.0 if first else upper / n)
    product = volume * volume / (sides[2][1] if first else 1.0)
    words = max(0.0, _least_sum(product, sides[:2] if first else sides) - have)
    if memory < float("inf"):
        words = max(words, 2 * volume / sqrt(memory) - memory)
    return words * ROUNDING_SHARE


def _least_sum(product: float, sides: list[tuple[float, float]]) -> float:
    """Least sum of numbers between given limits whose product is at least `product`: one level, cut off at the limits."""
    level = max(high for _, high in sides)
    least = 0.0
    for _ in range(200):
        middle = (least + level) / 2
        reached = 1.0
        for low, high in sides:
            reached *= min(max(middle, low), high)
        least, level = (middle, level) if reached < product else (least, middle)
    return sum(min(max(least, low), high) for low, high in sides)


def layers(network: Network) -> list[Layer]:
    """The fully connected layers that are counted: of those that read (through other operators) one value, the largest."""
    best: dict[frozenset[str], Layer] = {}
    origin: dict[str, frozenset[str]] = {}
    for vertex in network.vertices:
        if vertex.node is None or vertex.call is None or vertex.kind == "hub":
            continue
        node, call = vertex.node, vertex.call
        sources: frozenset[str] = frozenset().union(*(origin.get(x, frozenset()) for x in node.inputs))
        origin[node.name] = sources
        if operator_name(node.target) not in LINEAR or not call.has_gradient:
            continue
        weights = [i for i, x in enumerate(node.inputs) if x.startswith("param:") and len(call.shapes[i]) == 2]
        if len(weights) != 1:
            continue
        n = call.outputs[0][-1]
        k = call.shapes[weights[0]][0] * call.shapes[weights[0]][1] // n
        rows = 1
        for d in call.outputs[0][:-1]:
            rows *= d
        data = next(i for i, x in enumerate(node.inputs) if not x.startswith("param:"))
        layer = Layer(node.name, rows, n, k, vertex.value.item, not call.differentiable[data])
        origin[node.name] = frozenset({node.name})
        key = sources or frozenset({f"={node.inputs[data]}"})
        taken = [other for other in best if other & key]
        if all(best[o].m * best[o].n * best[o].k < rows * n * k for o in taken):
            for o in taken:
                del best[o]
            best[key] = layer
    return list(best.values())


def bound_bytes(network: Network, ranks: int, *, memory_bytes: int = 0) -> int:
    """Bytes that each rank receives on average in a step, at least, if no work is done twice."""
    total = 0.0
    for x in layers(network):
        memory = memory_bytes / x.item if memory_bytes else float("inf")
        total += least_words(x.m, x.n, x.k, 1 / ranks, first=x.first, memory=memory) * x.item
    return int(total)


def fastest_ingress_Bps(fabric: Fabric) -> int:
    """The most bytes per second that any device can receive."""
    rates: dict[str, int] = {}
    for link in fabric.links:
        rates[link.dst] = rates.get(link.dst, 0) + link.rate_Bps
    return max((rates.get(d.name, 0) for d in fabric.devices), default=0)


def bound_time_s(model: Model, *, memory_bytes: int = 0) -> float:
    """Seconds per step that no plan on these devices beats under the problem's costs: perfectly divided work, received bytes, best redundancy."""
    problem, ranks = model.problem, model.mesh.ranks
    rate = fastest_ingress_Bps(problem.fabric)
    s_per_byte = (1 / rate if rate else 0.0) + 2 * problem.cost.transport.per_byte_s
    counted = {x.node: x for x in layers(model.network)}
    total = 0.0
    for vertex in model.network.vertices:
        if vertex.node is None or vertex.kind != "op":
            continue
        layer = counted.get(vertex.name)
        least = float("inf")
        for redundancy in _redundancies(ranks) if layer is not None else iter([1.0]):
            share = redundancy / ranks
            seconds = sum(_work_s(model, w, share, 1 / ranks) for w in (vertex.node.forward, vertex.node.backward))
            if layer is not None:
                memory = memory_bytes / layer.item if memory_bytes else float("inf")
                most = min(1.0, share * ranks ** (1 / REDUNDANCY_STEPS))  # every redundancy up to the next that is tried
                words = least_words(layer.m, layer.n, layer.k, min(share, 1.0), most=most, first=layer.first, memory=memory)
                seconds += words * layer.item * s_per_byte
            least = min(least, seconds)
        total += least
    return total * ROUNDING_SHARE


def _redundancies(ranks: int) -> Iterator[float]:
    return iter([ranks ** (i / REDUNDANCY_STEPS) for i in range(REDUNDANCY_STEPS + 1)])


def _work_s(model: Model, work: Work, flops: float, moved: float) -> float:
    return model.problem.cost.roofline(scaled(work, flops, moved), model.device).time_s


def memory_limit(problem: ShardingProblem) -> int:
    """Bytes of memory that a device may use; 0: no limit is known."""
    if problem.memory_bytes is not None:
        return problem.memory_bytes
    known = [d.memory_bytes for d in problem.fabric.devices if d.memory_bytes]
    return min(known) if known else 0
