"""Small random step graphs: chains and branches, views, several results, nodes that must not run again, gradients."""

from __future__ import annotations

from hypothesis import strategies as st

from meshwright.graph.step_graph import StepGraph, StepNode, StepStorage


class Builder:
    def __init__(self) -> None:
        self.nodes: list[StepNode] = []
        self.storages: list[StepStorage] = []

    def storage(self, size: int, kind: str = "made") -> int:
        self.storages.append(StepStorage(size_bytes=size, owner=f"s{len(self.storages)}", kind=kind))  # type: ignore[arg-type]
        return len(self.storages) - 1

    def given(self, size: int, kind: str = "input") -> int:
        s = self.storage(size, kind)
        self.nodes.append(StepNode(name=f"n{len(self.nodes)}", target="placeholder", phase="input", storages=(s,)))
        return len(self.nodes) - 1

    def op(
        self, inputs: tuple[int, ...], sizes: tuple[int, ...] = (), *, phase: str = "forward", time_s: float = 1.0, target: str = "aten.op.default",
        workspace: int = 0, random: bool = False,
    ) -> int:  # fmt: skip
        """Without sizes: a view of its first input."""
        makes = tuple(self.storage(size) for size in sizes)
        places = makes or self.nodes[inputs[0]].storages
        self.nodes.append(
            StepNode(
                name=f"n{len(self.nodes)}", target=target, phase=phase, inputs=inputs, storages=places, makes=makes,  # type: ignore[arg-type]
                time_s=time_s if sizes else 0.0, workspace_bytes=workspace, random=random,
            )
        )  # fmt: skip
        return len(self.nodes) - 1

    def item(self, x: int, which: int, phase: str = "forward") -> int:
        s = self.nodes[x].storages[which]
        self.nodes.append(StepNode(name=f"n{len(self.nodes)}", target="getitem", phase=phase, inputs=(x,), storages=(s,)))  # type: ignore[arg-type]
        return len(self.nodes) - 1

    def sizes(self, inputs: tuple[int, ...]) -> int:
        """Numbers, which lie in no storage."""
        self.nodes.append(StepNode(name=f"n{len(self.nodes)}", target="aten.sym_size.int", phase="forward", inputs=inputs))
        return len(self.nodes) - 1

    def graph(self, results: tuple[int, ...], in_flight: int = 1) -> StepGraph:
        boundary = next(i for i, n in enumerate(self.nodes) if n.phase == "backward")
        return StepGraph(
            name="test", nodes=tuple(self.nodes), storages=tuple(self.storages), boundary=boundary, results=results, in_flight=in_flight,
        )  # fmt: skip


def chain(sizes: list[int], times: list[float], *, fixed: int = 0, input_size: int = 1) -> StepGraph:
    """x -> f1 -> ... -> fl, the loss last; backward of i reads the input and the output of f_i and the gradient of its output."""
    b = Builder()
    if fixed:
        b.given(fixed, "parameter")
    values = [b.given(input_size)]
    for size, t in zip(sizes, times, strict=True):
        values.append(b.op((values[-1],), (size,), time_s=t))
    gradient = -1
    for i in range(len(sizes), 0, -1):
        read = (values[i - 1], values[i], *([gradient] if gradient >= 0 else []))
        gradient = b.op(read, (sizes[i - 2] if i > 1 else input_size,), phase="backward", time_s=times[i - 1])
    return b.graph((values[-1], gradient))


@st.composite
def step_graphs(draw: st.DrawFn, most: int = 8, flights: tuple[int, ...] = (1, 1, 2, 5), views: bool = False) -> StepGraph:
    """`views`: more of them, of numbers and in backward too."""
    b = Builder()
    inputs = [b.given(draw(st.integers(0, 20)), "parameter"), b.given(draw(st.integers(1, 20)))]
    forward: list[int] = list(inputs)
    tangent = b.given(1, "tangent")
    for _ in range(draw(st.integers(2, most))):
        read = tuple(dict.fromkeys(draw(st.lists(st.sampled_from(forward[-5:]), min_size=1, max_size=2))))
        kind = draw(st.sampled_from(["op", "op", "op", "view", "pair", "random", *(["view", "sizes"] if views else [])]))
        if kind == "view":
            forward.append(b.op(read))
        elif kind == "sizes":
            forward.append(b.sizes(read))
        elif kind == "pair":
            x = b.op(read, (draw(st.integers(1, 30)), draw(st.integers(1, 30))), time_s=draw(st.integers(1, 9)))
            forward += [b.item(x, 0), b.item(x, 1)]
        else:
            forward.append(
                b.op(read, (draw(st.integers(1, 60)),), time_s=draw(st.integers(1, 9)), workspace=draw(st.integers(0, 5)), random=kind == "random")
            )
    loss = b.op((forward[-1],), (1,))
    gradient = b.op((loss, forward[-1], tangent), (draw(st.integers(1, 9)),), phase="backward")
    results, seen = [loss], list[int]()
    for i in range(len(forward) - 1, 1, -1):
        if draw(st.integers(0, 3)):
            read = tuple(dict.fromkeys([gradient, forward[i], *draw(st.lists(st.sampled_from(forward[: i + 1] + seen[-2:]), max_size=2))]))
            if views and draw(st.booleans()):
                seen.append(b.op(draw(st.sampled_from([read, read[::-1]])), phase="backward"))
                read = (*read, seen[-1])
            gradient = b.op(read, (draw(st.integers(1, 20)),), phase="backward", time_s=draw(st.integers(1, 9)), workspace=draw(st.integers(0, 5)))
            if draw(st.booleans()):
                results.append(gradient)
    return b.graph((*dict.fromkeys([*results, gradient]),), draw(st.sampled_from(flights)))
