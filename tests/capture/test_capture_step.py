"""The joint graph of a step: it computes what eager computes, and its storages are those of a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from meshwright.capture.step import CapturedStep, capture_step, step_graph_of
from meshwright.capture.torch_private import storage_key
from meshwright.capture.work import tensors_in
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import CaptureError, Unsupported


class Net(nn.Module):
    """Convolution, batch norm, dropout, a constant, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.relu(self.norm(self.conv(x)))) + torch.tensor([1.0])
        return self.head(self.up(y.mean((2, 3))))


def net() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 3, 8, 8), torch.randint(0, 8, (4,)))


def real_tensors(step: CapturedStep) -> list[torch.Tensor]:
    module, given = step.source.module, {"tangent": torch.ones(())}
    named = {**dict(module.named_parameters()), **dict(module.named_buffers()), **step.constants}
    kinds = [v.partition(":") for v in step.values]
    return [step.source.inputs[int(rest)] if kind == "input" else given[kind] if kind == "tangent" else named[rest] for kind, _, rest in kinds]


class Watch(fx.Interpreter):  # type: ignore[misc]
    """Runs the graph and compares what shares storage, and the storages' sizes, with the step graph."""

    def __init__(self, step: CapturedStep) -> None:
        super().__init__(step.graph_module, garbage_collect_values=False)
        self.step = step.step_graph
        self.node = {n.name: n for n in self.step.nodes}
        self.key: dict[int, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.node:
            real = list(dict.fromkeys(storage_key(x) for x in tensors_in(result)))
            sizes = {storage_key(x): x.untyped_storage().nbytes() for x in tensors_in(result)}
            assert len(real) == len(self.node[n.name].storages), n.name
            for key, storage in zip(real, self.node[n.name].storages, strict=True):
                assert self.key.setdefault(key, storage) == storage, n.name
                assert sizes[key] == self.step.storages[storage].size_bytes, n.name
        return result


def test_graph_and_storages_are_those_of_a_real_run() -> None:
    module, inputs = net()
    step = capture_step(module, inputs)
    assert check_step_plan(step.step_graph, keep_everything(step.step_graph)).ok
    assert {k: sum(n.random for n in step.step_graph.nodes if n.module == k) for k in ("drop", "conv")} == {"drop": 1, "conv": 0}
    assert [v for v in step.values if v.startswith("param")] == [f"param:{n}" for n, _ in module.named_parameters()]
    with torch.no_grad():
        torch.manual_seed(3)
        found = dict(zip(step.outputs, Watch(step).run(*real_tensors(step)), strict=True))
    torch.manual_seed(3)
    loss = step.objective(*inputs)
    loss.backward()
    assert torch.equal(found["loss"], loss)
    for name, parameter in module.named_parameters():
        assert torch.equal(found[f"gradient:{name}"], parameter.grad), name
    for name, buffer in module.named_buffers():
        assert torch.equal(found[f"buffer:{name}"], buffer), name


def test_views_and_transposes_make_nothing() -> None:
    graph = capture_step(*net()).step_graph
    made = {n.name: [graph.storages[s].owner for s in n.makes] for n in graph.nodes}
    transposes = [n for n in graph.nodes if n.target in ("aten.t.default", "aten.detach.default", "aten.view.default", "operator.getitem")]
    assert len(transposes) > 5 and all(not made[n.name] for n in transposes)
    weight = next(n.storages for n in graph.nodes if n.module == "param:up.weight")
    assert sum(n.storages == weight for n in graph.nodes) >= 4


def test_dynamic_shapes_are_refused() -> None:
    dim = torch.export.Dim("batch", min=2, max=64)
    graph = torch.export.export(nn.Linear(4, 4), (torch.randn(8, 4),), dynamic_shapes=((dim,),) and {"input": {0: dim}}).graph_module
    with pytest.raises(Unsupported, match="symbolic size"):
        step_graph_of(graph)


def test_what_export_refuses_is_named() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(CaptureError, match="cannot be captured"):
        capture_step(Reads(), (torch.randn(4, 4), torch.randn(4, 4)), loss="mse")


def test_sparse_gradients_are_refused() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(50, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    with pytest.raises((Unsupported, CaptureError)):
        capture_step(Bag(), (torch.zeros(4, 2, dtype=torch.long), torch.randn(4, 4)), loss="mse")


def test_a_partitioners_graph() -> None:
    """Without names: tangents by their placeholders' names, static inputs as parameters; the storages are the same."""
    step = capture_step(*net())
    parameters = [i for i, v in enumerate(step.values) if v.startswith("param")]
    graph = step_graph_of(step.graph_module, static_inputs=parameters, forward_outputs=4)
    assert [n.name for n in graph.nodes] == [n.name for n in step.step_graph.nodes] and graph.boundary == step.step_graph.boundary
    kinds = [s.kind for s in graph.storages if s.kind != "made"]
    assert (kinds.count("parameter"), kinds.count("tangent")) == (len(parameters), 1)


def test_a_graph_that_calls_modules_is_refused() -> None:
    with pytest.raises(Unsupported, match="only ATen calls"):
        step_graph_of(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))
