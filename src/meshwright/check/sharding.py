"""Sharding plans: is every tensor everywhere in the state in which it is read, and does every gradient come back whole?

From the graph and the plan alone. For every operand the redistribution that the plan states is followed, step by step, from the state in which the
value lies to the one in which the operator reads it, and back for its gradient; parameters must get complete gradients, where need be from a
bucket. Bytes are counted again where all pieces are equal. Of operators only what holds for all of a kind is proved (`_signature`): who reads copies
gives copies; summands come from summands or from splits, pass through what is linear only, and are never multiplied with each other; what works
element by element keeps the state. That a matrix product or an attention may run in its states is not proved here: tests run each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ..graph.graph import OpGraph, OpNode, operator_name
from ..plan.sbp import State, gradient_of, kind_of, split_of, valid, value_of
from ..plan.sharding import MoveRecord, ShardingPlan, item_bytes
from .verdict import Finding, Verdict, guarded

__all__ = ["check_sharding"]

Steps = Sequence[tuple[int, str]]
BYTES_REASONS = ("activations", "gradients", "parameters", "loader")
# One element of the result needs the same element of the operand, and nothing else of it.
ELEMENTWISE = frozenset({
    "relu", "gelu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "abs", "neg", "dropout", "clamp", "pow", "elu", "leaky_relu",
    "hardtanh", "softplus", "erf", "sin", "cos", "reciprocal", "square", "to", "_to_copy", "clone", "contiguous", "detach", "alias",
})  # fmt: skip
LINEAR = frozenset({"neg", "to", "_to_copy", "clone", "contiguous", "detach", "alias"})  # of those: a sum of results is the result of the sum
PRODUCTS = frozenset({"mul", "mm", "bmm", "matmul", "linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"})


def check_sharding(plan: ShardingPlan, graph: OpGraph) -> Verdict:
    """`graph`: the one that was planned. Operators without a rule are named in a note."""
    findings = guarded("plan", lambda: list(_form(plan, graph)))
    if not findings:
        findings = guarded("values", lambda: list(_Follow(plan, graph).findings()))
    if not findings:
        findings = guarded("plan", lambda: list(_figures(plan, graph)))
    note = "operators are proved by the rules of their kind only; that products and attention may run in their states is tested, not proved"
    return Verdict(findings=tuple(findings), notes=(note,))


def _wrong(check: str, text: str, **witness: object) -> Finding:
    return Finding(check=check, message=text, witness=witness)


# ---- form --------------------------------------------------------------------------------------------------------------------
def _form(plan: ShardingPlan, graph: OpGraph) -> Iterator[Finding]:
    if prod(plan.mesh) != len(plan.devices) or len(set(plan.devices)) < len(plan.devices) or min(plan.mesh, default=0) < 1:
        yield _wrong("plan", f"a mesh of {' x '.join(map(str, plan.mesh))} on {len(plan.devices)} devices, each once", field="mesh")
    if plan.fingerprint != graph.fingerprint():
        yield _wrong("plan", "the plan was made for another graph", field="fingerprint")
        return
    shapes = _shapes(graph)
    sources = {name for name in shapes if ":" in name}
    operators, unknown = {n.name for n in graph.nodes}, set(plan.hubs) - set(shapes)
    named: tuple[tuple[str, set[str], set[str]], ...] = (
        ("ops", set(plan.ops), operators), ("sources", set(plan.sources), sources), ("hubs", unknown, set()),
    )  # fmt: skip
    for what, said, real in named:
        if said != real:
            yield _wrong("plan", f"{what} names others than the graph: {sorted(said ^ real)[:3]}", field=what)
            return
    for node in graph.nodes:
        if len(plan.ops[node.name].inputs) != len(node.inputs):
            yield _wrong("plan", f"{node.name} has {len(node.inputs)} operands, the plan {len(plan.ops[node.name].inputs)}", operator=node.name)
            return
    for name, state, shape in _states(plan, graph, shapes):
        text = _odd(state, shape, plan.mesh)
        if text:
            yield _wrong("plan", f"{name}: {text}", value=name, state=list(state))


def _shapes(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    found = {f"input:{i}": v.shape for i, v in enumerate(graph.inputs)}
    found |= {f"param:{p.name}": p.shape for p in graph.parameters} | {f"buffer:{b.name}": b.shape for b in graph.buffers}
    return found | {n.name: n.outputs[0].shape if n.outputs else () for n in graph.nodes}


def _states(plan: ShardingPlan, graph: OpGraph, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, State, tuple[int, ...]]]:
    for table in (plan.sources, plan.hubs):
        yield from ((name, state, shapes[name]) for name, state in table.items())
    for node in graph.nodes:
        record = plan.ops[node.name]
        yield from ((f"{node.name} operand {i}", s, shapes[v]) for i, (s, v) in enumerate(zip(record.inputs, node.inputs, strict=True)))
        yield node.name, record.output, shapes[node.name]


def _odd(state: State, shape: tuple[int, ...], mesh: Sequence[int]) -> str:
    if len(state) != len(mesh):
        return f"{len(state)} types on {len(mesh)} axes"
    for kind in state:
        plain = kind in ("R", "B", "P", "M")
        if not plain and not (kind[:1] == "S" and kind[1:].replace("/", "", 1).isdecimal()):
            return f"there is no type {kind[:16]!r}"
    return "" if valid(shape, state, mesh) else f"a tensor of shape {shape} cannot be in {state}"


# ---- following values and gradients ------------------------------------------------------------------------------------------
class _Follow:
    def __init__(self, plan: ShardingPlan, graph: OpGraph) -> None:
        self.plan, self.graph = plan, graph
        self.records: dict[tuple[str, int], MoveRecord] = {(m.reader, m.slot): m for m in plan.moves}
        self.used: set[tuple[str, int]] = set()
        self.trained = {f"param:{p.name}" for p in graph.parameters if p.trainable}
        for node in graph.nodes:
            if node.passes_gradient and any(v in self.trained for v in node.inputs):
                self.trained.add(node.name)

    def findings(self) -> Iterator[Finding]:
        if len(self.records) < len(self.plan.moves):
            yield _wrong("values", "an operand has two redistributions")
            return
        for value in self.plan.hubs:
            yield from self._edge(value, f"hub:{value}", 0, value, self._lies(value), self.plan.hubs[value])
        for node in self.graph.nodes:
            record = self.plan.ops[node.name]
            for slot, value in enumerate(node.inputs):
                own = node.mutates_buffers and value.startswith("buffer:")
                hub = value in self.plan.hubs and not own
                lies = self.plan.hubs[value] if hub else self._lies(value)
                yield from self._edge(value, node.name, slot, f"hub:{value}" if hub else value, lies, record.inputs[slot])
            trained = [v in self.trained for v in node.inputs] if node.name in self.trained else []
            yield from _signature(node, record.inputs, record.output, trained)
        read = {v for node in self.graph.nodes for v in node.inputs}
        for name in [n.name for n in self.graph.nodes if n.name in self.trained and n.name not in read]:
            if odd := [kind for kind in self.plan.ops[name].output if kind not in ("R", "P")]:
                text = f"nobody reads {name}, the loss, so its gradient is whole everywhere; the plan has it in {odd[0]}"
                yield _wrong("values", text, operator=name)
        for key in sorted(set(self.records) - self.used):
            yield _wrong("values", f"a redistribution for operand {key[1]} of {key[0]!r}, which is none", reader=key[0], slot=key[1])

    def _lies(self, value: str) -> State:
        return self.plan.sources[value] if ":" in value else self.plan.ops[value].output

    def _edge(self, value: str, reader: str, slot: int, source: str, lies: State, read: State) -> Iterator[Finding]:
        record = self.records.get((reader, slot))
        self.used.add((reader, slot))
        if record is not None and record.source != source:
            yield _wrong("values", f"operand {slot} of {reader} is {source}, its redistribution is of {record.source}", reader=reader, slot=slot)
            return
        forward, backward, bucket = (record.forward, record.backward, record.bucket) if record else ((), (), ())
        arrives = _after(value_of(lies), forward)
        if isinstance(arrives, str) or arrives != value_of(read):
            yield self._lost(f"{source} lies in {lies}", arrives, f"operand {slot} of {reader} is read in {read}", reader, slot)
        if value not in self.trained:
            return
        back = _after(gradient_of(read), backward)
        if bucket and not isinstance(back, str):
            if not value.startswith("param:") or any(back[axis] != "P" for axis in bucket):
                yield _wrong("values", f"the gradient of {value} for {reader} has no summands on axes {list(bucket)} to wait for", reader=reader)
                return
            if not any(b.axes == bucket and _after(_summands(bucket, len(back)), b.steps) == ("B",) * len(back) for b in self.plan.buckets):
                yield _wrong("values", f"no bucket sums the gradients over axes {list(bucket)}", axes=list(bucket))
            back = tuple("B" if axis in bucket else kind for axis, kind in enumerate(back))
        if isinstance(back, str) or back != gradient_of(lies):
            yield self._lost(f"the gradient of operand {slot} of {reader}", back, f"that of {source} is wanted in {gradient_of(lies)}", reader, slot)
        if value.startswith("param:") and "P" in gradient_of(lies):
            yield _wrong("values", f"the gradient of {value} stays in summands, and the optimizer reads it", value=value)

    def _lost(self, what: str, found: State | str, wanted: str, reader: str, slot: int) -> Finding:
        came = found if isinstance(found, str) else f"it comes in {found}"
        return _wrong("values", f"{what}: {came}; {wanted}", reader=reader, slot=slot)


def _summands(axes: Sequence[int], count: int) -> State:
    return tuple("P" if axis in axes else "B" for axis in range(count))


def _after(state: State, steps: Steps) -> State | str:
    """The state that the steps lead to, or what is wrong with one."""
    for axis, target in steps:
        if not 0 <= axis < len(state):
            return f"there is no axis {axis}"
        old, later = state[axis], {split[0] for kind in state[axis + 1 :] if (split := split_of(kind)) is not None}
        if old == target or (old[0] in "PM" and target[0] not in "SB") or target[0] not in "SBP" or old == "R":
            return f"no step leads from {old} to {target}"
        # Splits of one dimension nest in axis order: an outer one cannot begin or end under an inner one.
        if any(split is not None and split[0] in later for split in (split_of(old), split_of(target))):
            return f"axis {axis} cannot go from {old} to {target} while a later axis splits the same dimension"
        state = (*state[:axis], target, *state[axis + 1 :])
    return state


def _signature(node: OpNode, inputs: Sequence[State], output: State, trained: Sequence[bool]) -> Iterator[Finding]:
    """What holds for every operator of a kind, axis by axis. `trained`: whether a gradient flows to the operand; () where none comes."""
    name = operator_name(node.target)
    for axis, out in enumerate(value_of(output)):
        read = [value_of(s)[axis] for s in inputs]
        says = ""
        if read and all(k == "B" for k in read) and out != "B":
            says = f"reads copies and gives {out}"
        elif all(k == "B" for k in read) and any(t and s[axis] != output[axis] for t, s in zip(trained, inputs, strict=False)):
            says = f"gets a gradient as of {output[axis]}, and hands on one as of another type"
        elif out == "B" and any(k[0] == "S" for k in read) and not (name == "cross_entropy_loss" and read[0].startswith("S1")):
            says = "reads a part and gives the whole"
        elif read.count("P") > 1 and name in PRODUCTS:
            says = "multiplies summands with each other"
        elif "P" in read and name in ELEMENTWISE - LINEAR:
            says = "is not linear, and reads summands"
        elif name in ELEMENTWISE and len(read) == 1 and read[0] != out:
            says = f"works element by element, reads {read[0]} and gives {out}"
        elif "P" in read and out != "P" and name in LINEAR:
            says = f"reads summands and gives {out}"
        if says:
            yield _wrong("values", f"{node.name} ({name}), axis {axis}: {says}", operator=node.name, axis=axis)


# ---- figures -----------------------------------------------------------------------------------------------------------------
def _figures(plan: ShardingPlan, graph: OpGraph) -> Iterator[Finding]:
    if plan.time_s < plan.bound_time_s * (1 - 1e-9):
        yield _wrong("plan", f"the time, {plan.time_s:.6g} s, is below the bound, {plan.bound_time_s:.6g} s", field="time_s")
    if abs(sum(plan.parts_s.values()) - plan.time_s) > 1e-9 * max(plan.time_s, 1e-12):
        yield _wrong("plan", f"the parts of the step take {sum(plan.parts_s.values()):.6g} s, it says {plan.time_s:.6g}", field="parts_s")
    if len(plan.bytes_sent) != len(plan.devices):
        yield _wrong("plan", f"bytes of {len(plan.bytes_sent)} ranks, there are {len(plan.devices)}", field="bytes_sent")
        return
    counted = _sent(plan, graph)
    if counted is None:
        return
    for rank, row in enumerate(plan.bytes_sent):
        for reason in BYTES_REASONS:
            if getattr(row, reason) != counted[reason]:
                text = f"rank {rank} sends {counted[reason]} bytes of {reason}, it says {getattr(row, reason)}"
                yield _wrong("plan", text, field="bytes_sent", rank=rank)
                return


def _sent(plan: ShardingPlan, graph: OpGraph) -> dict[str, int] | None:
    """Bytes by reason that every rank sends; None where pieces are unequal."""
    shapes, sent = _shapes(graph), dict.fromkeys(BYTES_REASONS, 0)
    dtypes = {f"input:{i}": v.dtype for i, v in enumerate(graph.inputs)} | {f"param:{p.name}": p.dtype for p in graph.parameters}
    dtypes |= {f"buffer:{b.name}": b.dtype for b in graph.buffers} | {n.name: n.outputs[0].dtype for n in graph.nodes if n.outputs}
    flat: dict[tuple[tuple[int, ...], int], int] = {}
    for move in plan.moves:
        value = move.source.removeprefix("hub:")
        floats = dtypes[value].startswith(("float", "bfloat"))
        item = plan.item_bytes if plan.item_bytes and floats else item_bytes(dtypes[value])
        node = plan.ops.get(move.reader)
        read = node.inputs[move.slot] if node is not None else plan.hubs[value]
        lies = plan.hubs[value] if move.source.startswith("hub:") else plan.sources[value] if ":" in value else plan.ops[value].output
        ahead = "parameters" if value.startswith("param:") else "loader" if ":" in value else "activations"
        if move.bucket:
            piece = _piece(shapes[value], lies, plan.mesh)
            if piece is None:
                return None
            flat[move.bucket, item] = flat.get((move.bucket, item), 0) + piece
        ways = ((value_of(lies), move.forward, ahead), (gradient_of(read), move.backward, "gradients" if ahead == "parameters" else ahead))
        for state, steps, reason in ways:
            count = _of_steps(shapes[value], state, steps, plan.mesh)
            if count is None:
                return None
            sent[reason] += count * item
    for (axes, item), elements in flat.items():
        steps = next(b.steps for b in plan.buckets if b.axes == axes and b.item == item)
        count = _of_steps((elements,), _summands(axes, len(plan.mesh)), steps, plan.mesh)
        if count is None:
            return None
        sent["gradients"] += count * item
    return sent


def _piece(shape: Sequence[int], state: State, mesh: Sequence[int]) -> int | None:
    """Elements of a rank's piece, the same at all; None where they are not."""
    left = list(shape)
    for kind, parts in zip(state, mesh, strict=True):
        split = split_of(kind)
        if split is not None:
            if left[split[0]] % (parts * split[1]):
                return None
            left[split[0]] //= parts
    return prod(left)


def _of_steps(shape: Sequence[int], state: State, steps: Steps, mesh: Sequence[int]) -> int | None:
    total = 0
    for axis, target in steps:
        parts, kind = mesh[axis], kind_of(state[axis], target)
        after = (*state[:axis], target, *state[axis + 1 :])
        shared = _piece(shape, (*state[:axis], "B", *state[axis + 1 :]), mesh)  # what the axis' group shares
        if shared is None or _piece(shape, state, mesh) is None or _piece(shape, after, mesh) is None:
            return None
        share = {"all-to-all": (parts - 1, parts * parts), "all-gather": (parts - 1, parts), "reduce-scatter": (parts - 1, parts)}
        times, over = {**share, "all-reduce": (2 * (parts - 1), parts)}.get(kind, (0, 1))
        if shared * times % over:
            return None
        total += shared * times // over
        state = after
    return total
