"""What an order of ranks costs: a matrix of probed (or stated) message costs, and the steps of every algorithm over positions.

A message of m bytes from i to j takes alpha[i, j] + m · beta[i, j]. An algorithm is a list of synchronous stages (its rounds, see `classic.rounds`);
a stage takes as long as its slowest rank: the largest latency of its messages plus its bytes, one after another, out or in. Trees that pipeline take
their depth once and their busiest rank for every further piece. Where locality groups share an uplink, a stage also takes at
least the bytes that leave a group over the uplink's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....cost import Transport
from ....errors import FormatError, Unsupported
from ....fabric.fabric import Fabric
from ....kernels.rank_orders import Passes
from ..classic.bruck import all_gather_rounds, all_to_all_rounds
from ..classic.double_tree import double_parents, rooted_parents
from ..classic.halving_doubling import doubling_rounds, halving_rounds, rabenseifner_rounds, whole_rounds
from ..classic.hierarchical import leader_rounds
from ..classic.rooted_tree import tree_parents
from ..classic.rounds import Move, reverse
from ..classic.scatter_allgather import ring_rounds
from .groups import infer_groups

__all__ = ["ALGORITHMS", "BCUBE_RADIX", "FAR_FIRST", "CostMatrix", "Model", "Objective", "consecutive", "model_of", "stages_of"]

F64 = NDArray[np.float64]
SCHEMA, VERSION = "meshwright.rank-costs", 1
MAX_ENDPOINTS = 4096  # of a cost file, whose matrices are squares of that
MAX_INFERRED_ENDPOINTS = 512  # whose groups are inferred: the work grows with their cube, some seconds here
INFERRED_AT_BYTES = 1 << 20  # a message whose cost is that of its rate on most networks
FAR_FIRST = "halving-doubling-far"  # all-reduce whose largest messages go to the farthest partners, as some libraries have it
ALGORITHMS = ("ring", "halving-doubling", FAR_FIRST, "bcube", "recursive-doubling", "bruck", "hierarchical", "double-tree", "rooted-tree")
BCUBE_RADIX = 4  # of halving and doubling as "bcube"


class Objective(NamedTuple):
    """Compared in this order: predicted time; seconds of the busiest uplink (or, where none is known, messages between groups); sum of all messages'
    costs. The first alone ties as soon as one slow message cannot be avoided."""

    time_s: float
    load: float
    sum_s: float


@dataclass(frozen=True, kw_only=True)
class CostMatrix:
    """Costs between n endpoints, `names[i]` -> `names[j]`.

    host: endpoints of one host have equal numbers and stay together in every order. group: locality group. uplink_Bps: rate at which a group is
    left, 0 = unknown. source: where the figures come from. address: where each endpoint can be reached; () = unknown.
    """

    names: tuple[str, ...]
    alpha_s: F64
    beta_s_per_byte: F64
    host: tuple[int, ...]
    group: tuple[int, ...]
    uplink_Bps: tuple[float, ...] = ()
    source: str = ""
    address: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.names)
        for what, matrix in (("alpha_s", self.alpha_s), ("beta_s_per_byte", self.beta_s_per_byte)):
            if matrix.shape != (n, n) or not np.all(np.isfinite(matrix)) or np.any(matrix < 0):
                raise FormatError(f"must be {n} x {n} finite numbers >= 0", where=what)
        if len(self.host) != n or len(self.group) != n:
            raise FormatError(f"must have {n} entries", where="host" if len(self.host) != n else "group")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def capacity_Bps(self) -> F64:
        """Uplink rate per group; infinite where unknown."""
        groups = max(self.group) + 1
        stated = [*self.uplink_Bps, *([0.0] * groups)][:groups]
        return np.array([x if x > 0 else np.inf for x in stated])

    def message_s(self, size_bytes: float) -> F64:
        """Seconds of a message of that size, from each endpoint to each."""
        return self.alpha_s + size_bytes * self.beta_s_per_byte

    @staticmethod
    def of_fabric(fabric: Fabric, ranks: Sequence[str], transport: Transport | None = None) -> CostMatrix:
        """From links: latencies of the route, and the narrowest link. Hosts and groups are the fabric's servers; an uplink is what leaves one.

        Raises: Disconnected.
        """
        n, actor = len(ranks), [fabric.actor_of[name] for name in ranks]
        alpha, beta = np.zeros((n, n)), np.zeros((n, n))
        overhead = 2 * transport.per_message_s if transport else 0.0
        for i in range(n):
            for j in range(n):
                if i != j:
                    links = [fabric.links[x] for x in fabric.route(actor[i], actor[j])]
                    alpha[i, j] = sum(x.latency_s for x in links) + max(x.library_latency_s for x in links) + overhead
                    beta[i, j] = 1 / min(x.rate_Bps for x in links) + (2 * transport.per_byte_s if transport else 0.0)
        label: dict[str, int] = {}
        group = tuple(label.setdefault(fabric.device(name).group, len(label)) for name in ranks)
        uplinks = []
        for name in label:
            inside = {d.name for d in fabric.devices if d.group == name} | {s.name for s in fabric.switches if s.group == name and name}
            uplinks.append(float(sum(x.rate_Bps for x in fabric.links if x.src in inside and x.dst not in inside)))
        return CostMatrix(
            names=tuple(ranks), alpha_s=alpha, beta_s_per_byte=beta, host=group, group=group, uplink_Bps=tuple(uplinks) if len(label) > 1 else (),
            source=f"fabric {fabric.name}",
        )  # fmt: skip

    def to_document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "version": VERSION, "source": self.source, "names": list(self.names), "alpha_s": self.alpha_s.tolist(),
            "beta_s_per_byte": self.beta_s_per_byte.tolist(), "host": list(self.host), "group": list(self.group), "uplink_Bps": list(self.uplink_Bps),
            **({"address": list(self.address)} if any(self.address) else {}),
        }  # fmt: skip

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> CostMatrix:
        """`host`, `group` and `uplink_Bps` may be missing: every endpoint is its own host, groups are inferred from latencies, or from
        the costs of a message of INFERRED_AT_BYTES, rates of uplinks are unknown. Raises FormatError naming the field."""
        if document.get("schema") != SCHEMA or document.get("version") != VERSION:
            found = f"{document.get('schema')!r} version {document.get('version')!r}"
            raise FormatError(f"must be {SCHEMA} version {VERSION}, got {found}", where="schema")
        names = document.get("names")
        if not isinstance(names, list) or not 2 <= len(names) <= MAX_ENDPOINTS or not all(isinstance(x, str) and x for x in names):
            raise FormatError(f"must be a list of 2 to {MAX_ENDPOINTS} names", where="names")
        if len(set(names)) < len(names):
            raise FormatError(f"{next(x for i, x in enumerate(names) if x in names[:i])!r} is named twice", where="names")
        n = len(names)

        def matrix(key: str) -> F64:
            rows = document.get(key)
            numbers = isinstance(rows, list) and len(rows) == n and all(isinstance(r, list) and len(r) == n for r in rows)
            if not numbers or not all(type(x) in (int, float) for r in rows or () for x in r):
                raise FormatError(f"must be {n} x {n} finite numbers >= 0", where=key)
            return np.array(rows, np.float64)

        def numbered(key: str, default: Sequence[int]) -> tuple[int, ...]:
            values = document.get(key, default)
            if not isinstance(values, list | range) or len(values) != n or not all(type(x) is int and 0 <= x < n for x in values):
                raise FormatError(f"must be {n} whole numbers 0..{n - 1}", where=key)
            return tuple(values)

        uplinks = document.get("uplink_Bps", [])
        if not isinstance(uplinks, list) or len(uplinks) > n or not all(type(x) in (int, float) and x >= 0 and np.isfinite(x) for x in uplinks):
            raise FormatError("must be a list of rates >= 0, one per group", where="uplink_Bps")
        addresses = document.get("address", [])
        if not isinstance(addresses, list) or len(addresses) not in (0, n) or not all(isinstance(x, str) for x in addresses):
            raise FormatError(f"must be {n} texts", where="address")
        costs = CostMatrix(
            names=tuple(names), alpha_s=matrix("alpha_s"), beta_s_per_byte=matrix("beta_s_per_byte"), host=numbered("host", range(n)),
            group=numbered("group", [0] * n), uplink_Bps=tuple(float(x) for x in uplinks), source=str(document.get("source", "")),
            address=tuple(addresses),
        )  # fmt: skip
        if "group" in document or n > MAX_INFERRED_ENDPOINTS:
            return costs
        by_latency = infer_groups(costs.alpha_s)
        return replace(costs, group=by_latency if any(by_latency) else infer_groups(costs.message_s(INFERRED_AT_BYTES)))


# ---- algorithms over positions ---------------------------------------------------------------------------------------------
class Stage(NamedTuple):
    """Messages from positions `src` to `dst` of `size_bytes` each, done `times` times. `single`: nobody sends or receives two of them."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    size_bytes: F64
    times: int
    single: bool


@dataclass(frozen=True)
class Tree:
    """A pipelined tree: parent per position, bytes of a piece, pieces; `both` = up and down; `levels`: (positions, their parents), root's first."""

    parents: tuple[int, ...]
    piece_bytes: float
    pieces: int
    both: bool
    up: bool
    levels: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    @staticmethod
    def of(parents: Sequence[int], piece_bytes: float, pieces: int, op: str) -> Tree:
        levels, front = [], [v for v, parent in enumerate(parents) if parent < 0]
        while front := [v for v, parent in enumerate(parents) if parent in set(front)]:
            levels.append((np.array(front, np.int64), np.array([parents[v] for v in front], np.int64)))
        return Tree(tuple(parents), piece_bytes, pieces, op == "all-reduce", op == "reduce", tuple(levels))


def _rounds(algorithm: str, op: str, n: int, sizes: Sequence[int]) -> tuple[list[list[Move]], int] | None:
    """(rounds, blocks of the message), None where the algorithm has no such operation. `sizes`: of the groups of consecutive positions that a
    hierarchy has."""
    if algorithm in ("halving-doubling", FAR_FIRST, "bcube"):
        radix = BCUBE_RADIX if algorithm == "bcube" else 2
        if op == "all-reduce":
            return rabenseifner_rounds(n, near=algorithm != FAR_FIRST, radix=radix)
        if algorithm == FAR_FIRST:  # the other operations are far first anyway
            return None
        pick = {"all-gather": doubling_rounds, "reduce-scatter": halving_rounds}.get(op)
        return (pick(n, near=False, radix=radix), n) if pick else None
    if algorithm == "hierarchical":
        return (leader_rounds(consecutive(sizes), 0), len(sizes)) if op == "all-reduce" else None
    if algorithm == "recursive-doubling":
        return (whole_rounds(n), 1) if op == "all-reduce" else None
    if algorithm == "bruck" and op == "all-to-all":
        return all_to_all_rounds(n), n
    if algorithm not in ("ring", "bruck") or op not in ("all-gather", "reduce-scatter", "all-reduce"):
        return None
    gather = ring_rounds(n) if algorithm == "ring" else all_gather_rounds(n)
    sums = gather if algorithm == "ring" else reverse(gather)  # a ring goes on in the same direction
    return {"all-gather": gather, "reduce-scatter": sums, "all-reduce": [*sums, *gather]}[op], n


def consecutive(sizes: Sequence[int]) -> list[list[int]]:
    """Groups of consecutive positions of these sizes."""
    ends = [0, *accumulate(sizes)]
    return [list(range(a, b)) for a, b in pairwise(ends)]


def stages_of(algorithm: str, op: str, n: int, size_bytes: int, sizes: Sequence[int] = ()) -> list[Stage]:
    """The algorithm's rounds, equal ones counted. Raises: Unsupported."""
    found = _rounds(algorithm, op, n, sizes or (n,))
    if found is None:
        raise Unsupported(f"{algorithm} has no {op} to order ranks for", hint=f"algorithms: {', '.join(ALGORITHMS)}")
    rounds, blocks = found
    counted: dict[tuple[tuple[int, int, float], ...], int] = {}
    for step in rounds:
        key = tuple((m.src, m.dst, len(m.blocks) * size_bytes / blocks) for m in step if m.src != m.dst)
        if key:
            counted[key] = counted.get(key, 0) + 1
    out = []
    for key, times in counted.items():
        src, dst, size = zip(*key, strict=True)
        single = len(set(src)) == len(src) == len(set(dst))
        out.append(Stage(np.array(src, np.int64), np.array(dst, np.int64), np.array(size, np.float64), times, single))
    return out


def _trees(algorithm: str, op: str, n: int, size_bytes: int, pieces: int) -> list[Tree]:
    if op not in ("all-reduce", "broadcast", "reduce"):
        raise Unsupported(f"{algorithm} has no {op} to order ranks for", hint=f"algorithms: {', '.join(ALGORITHMS)}")
    shapes: Sequence[Sequence[int]] = [tree_parents(n, "binomial")]
    if algorithm == "double-tree":
        shapes = double_parents(n) if op == "all-reduce" else rooted_parents(n)
    each = size_bytes / len(shapes) / pieces
    return [Tree.of(shape, each, pieces, op) for shape in shapes]


@dataclass(frozen=True)
class Model:
    """Evaluates orders for one algorithm, operation and size. `rotates`: the cost does not depend on where the order starts."""

    matrix: CostMatrix
    algorithm: str
    op: str
    size_bytes: int
    stages: tuple[Stage, ...]
    trees: tuple[Tree, ...]
    rotates: bool

    def __call__(self, order: Sequence[int]) -> Objective:
        """The objective of `order`: position -> endpoint."""
        ranks = np.asarray(order, np.int64)
        evaluate: Callable[[NDArray[np.int64]], Objective] = self._tree_cost if self.trees else self._stage_cost
        return evaluate(ranks)

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        return np.asarray(self.matrix.group)

    @cached_property
    def passes(self) -> Passes:
        """The messages as `kernels.rank_orders` has them."""
        if not self.trees:
            m, _, spans = self._messages
            times, single = [float(s.times) for s in self.stages], [int(s.single) for s in self.stages]
            start, zeros = [0, *(last for _, last in spans)], np.zeros(len(spans), np.int64)
            return Passes(np.array(start), np.array(times), np.array(single), zeros, zeros + 1, m.src, m.dst, m.size_bytes, 1.0)
        ways = [(t, number, up) for number, t in enumerate(self.trees, 1) for up in ((True, False) if t.both else (t.up,))]
        below, above = ([np.concatenate([level[end] for level in t.levels]) for t, _, _ in ways] for end in (0, 1))
        size = np.concatenate([np.full(len(b), t.piece_bytes) for b, (t, _, _) in zip(below, ways, strict=True)])
        return Passes(
            np.cumsum([0, *(len(b) for b in below)]), np.array([float(t.pieces) for t, _, _ in ways]), np.zeros(len(ways), np.int64),
            np.array([number for _, number, _ in ways]), np.array([int(up) for _, _, up in ways]), np.concatenate(below), np.concatenate(above),
            size, float(self.trees[0].pieces),
        )  # fmt: skip

    @cached_property
    def _messages(self) -> tuple[Stage, NDArray[np.int64], list[tuple[int, int]]]:
        """The messages of all stages in one, the stage of each, and where a stage begins and ends among them."""
        ends = [0, *accumulate(len(s.src) for s in self.stages)]
        src, dst, size = (np.concatenate([getattr(s, field) for s in self.stages]) for field in ("src", "dst", "size_bytes"))
        return Stage(src, dst, size, 1, False), np.repeat(np.arange(len(self.stages)), np.diff(ends)), [*pairwise(ends)]

    def _stage_cost(self, order: NDArray[np.int64]) -> Objective:
        n, groups, capacity = len(order), self._groups, self.matrix.capacity_Bps
        messages, stage_of, spans = self._messages
        known = bool(np.isfinite(capacity).any())
        src, dst = order[messages.src], order[messages.dst]
        alpha, flow = self.matrix.alpha_s[src, dst], messages.size_bytes * self.matrix.beta_s_per_byte[src, dst]
        cost = alpha + flow
        crossing = groups[src] != groups[dst]
        busiest = crossings = [0.0] * len(spans)
        if crossing.any():
            # All of a group share its uplink, so a stage takes at least what leaves (or enters) a group over that rate.
            leaving, shape = np.where(crossing, messages.size_bytes, 0.0), (len(spans), len(capacity))
            both = [np.bincount(stage_of * shape[1] + groups[end], leaving, shape[0] * shape[1]).reshape(shape) / capacity for end in (src, dst)]
            busiest = np.maximum(*both).max(axis=1).tolist()
            crossings = np.bincount(stage_of, crossing, len(spans)).tolist()
        time_s = load = total = 0.0
        for number, (stage, (first, last)) in enumerate(zip(self.stages, spans, strict=True)):
            slowest = float(cost[first:last].max()) if stage.single else 0.0
            for end in () if stage.single else (src, dst):
                latest = np.zeros(n)
                # A rank sends (or receives) its messages one after another: their bytes add up, of their latencies only the largest is seen.
                np.maximum.at(latest, end[first:last], alpha[first:last])
                slowest = max(slowest, float((latest + np.bincount(end[first:last], flow[first:last], n)).max()))
            time_s += stage.times * max(slowest, busiest[number])
            load += stage.times * (busiest if known else crossings)[number]
            total += stage.times * float(cost[first:last].sum())
        return Objective(time_s, load, total)

    def _tree_cost(self, order: NDArray[np.int64]) -> Objective:
        n, groups = len(order), self._groups
        time_s = total = load = 0.0
        busy_out, busy_in = np.zeros(n), np.zeros(n)
        leaving = np.zeros((2, len(self.matrix.capacity_Bps)))
        deepest = 0.0
        for tree in self.trees:
            depth = 0.0
            for upward in (True, False) if tree.both else (tree.up,):
                reach = np.zeros(n)
                for below, above in tree.levels:
                    a, b = (order[below], order[above]) if upward else (order[above], order[below])
                    alpha, flow = self.matrix.alpha_s[a, b], tree.piece_bytes * self.matrix.beta_s_per_byte[a, b]
                    # Up or down, the way between a rank and the root has the same messages, so one pass over the levels serves both.
                    reach[below] = reach[above] + alpha + flow
                    busy_out += np.bincount(a, flow, n)
                    busy_in += np.bincount(b, flow, n)
                    total += tree.pieces * float((alpha + flow).sum())
                    crossing = groups[a] != groups[b]
                    if crossing.any():
                        for side, end in enumerate((a, b)):
                            leaving[side] += tree.piece_bytes * np.bincount(groups[end[crossing]], minlength=leaving.shape[1])
                        load += tree.pieces * int(crossing.sum())
                depth += float(reach.max())
            deepest = max(deepest, depth)
        pieces = self.trees[0].pieces
        shared = float((leaving / self.matrix.capacity_Bps).max())
        # The first piece goes the whole way; every further one is held up by the busiest rank or uplink.
        time_s = max(deepest + (pieces - 1) * max(float(busy_out.max()), float(busy_in.max()), shared), pieces * shared)
        known = bool(np.isfinite(self.matrix.capacity_Bps).any())
        return Objective(time_s, pieces * shared if known else load, total)


def model_of(matrix: CostMatrix, algorithm: str, op: str, size_bytes: int, *, pieces: int | None = None) -> Model:
    """The model of an algorithm. `pieces` of pipelined trees; None = one per 64 KiB, at most 16. Raises: Unsupported."""
    n = len(matrix)
    if algorithm not in ALGORITHMS:
        raise Unsupported(f"no cost model for {algorithm!r}", hint=f"algorithms: {', '.join(ALGORITHMS)}")
    if algorithm in ("double-tree", "rooted-tree"):
        trees = tuple(_trees(algorithm, op, n, size_bytes, pieces or min(16, max(1, size_bytes >> 16))))
        return Model(matrix, algorithm, op, size_bytes, (), trees, False)
    members = [matrix.group.count(g) for g in dict.fromkeys(matrix.group)]
    stages = stages_of(algorithm, op, n, size_bytes, members)
    return Model(matrix, algorithm, op, size_bytes, tuple(stages), (), algorithm in ("ring", "bruck"))
