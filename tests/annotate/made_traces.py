"""Traces made up for tests, with known owners: a forward pass of some modules, its backward by sequence numbers, an optimizer, on two threads."""

import json
from dataclasses import dataclass, field

from meshwright.io.trace.read import read_trace
from meshwright.trace.module_tree import CapturedOperator, ModuleNode, ModuleTree


def tree(*modules, operators=()):
    """From (path, class) pairs in definition order."""
    number = {path: i for i, (path, _) in enumerate(modules)}
    nodes = [ModuleNode(path=p, kind=k, parent=number[p.rpartition(".")[0]] if p else -1) for p, k in modules]
    made = [
        CapturedOperator(name=n, module=number[p], owners=tuple((o, tuple(number[x] for x in w)) for o, w in owners)) for n, p, owners in operators
    ]
    return ModuleTree(model="made", modules=tuple(nodes), operators=tuple(made))


@dataclass
class Made:
    """Slices one after the other on a track, µs; `truth` is what each named slice should be given."""

    events: list = field(default_factory=list)
    clock: float = 0.0
    sequence: int = 0

    def slice(self, name, *, cat="cpu_op", dur=10.0, tid=1, inside=(), gap=1.0, **args):
        self.clock += gap
        start = self.clock
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": 0.0, "args": args}
        self.events.append(event)
        for child in inside:
            child()
        self.clock = max(self.clock, start + dur)
        event["dur"] = self.clock - start
        return event

    def forward(self, *names, tid=1):
        """Operators that make an autograd node each; returns (name, sequence number)."""
        made = []
        for name in names:
            self.slice(name, tid=tid, **{"Sequence number": self.sequence, "Fwd thread id": 0})
            made.append((name, self.sequence))
            self.sequence += 1
        return made

    def backward(self, made, *, tid=1, accumulate=()):
        """Nodes in reverse; after the node of an operator in `accumulate` a gradient is accumulated."""
        for name, number in reversed(made):
            node = f"{name.partition('::')[2].title()}Backward0"
            args = {"Sequence number": number, "Fwd thread id": 1}
            inner = lambda node=node, args=args: self.slice(node, tid=tid, dur=8.0, **args)  # noqa: E731
            self.slice(f"autograd::engine::evaluate_function: {node}", tid=tid, inside=[inner], **args)
            if name in accumulate:
                self.slice("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", tid=tid, dur=3.0)

    def annotation(self, name, body, *, tid=1):
        self.slice(name, cat="user_annotation", tid=tid, dur=0.0, inside=[body])

    def trace(self, tmp_path, name="made.json", **more):
        path = tmp_path / name
        path.write_text(json.dumps({**more, "traceEvents": self.events}))
        return read_trace(path)


def found(annotation):
    """(name, module path or None, stage, evidence) of every unit, in order of time."""
    trace, labels, modules = annotation.trace, annotation.labels, annotation.tree.modules if annotation.tree else ()
    return [
        (
            trace.name_of(r).removeprefix("autograd::engine::evaluate_function: "),
            modules[labels.module[r]].path if labels.module[r] >= 0 else None,
            int(labels.stage[r]),
            int(labels.evidence[r]),
        )
        for r in annotation.units.rows.tolist()
    ]
