"""What eager PyTorch runs is captured as it runs: loss, every gradient and every buffer of the traced graph are the module's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from eager_models import CAUSES, WHOLE, Bag

from meshwright.capture.calling import flat_inputs, loss_of, prediction_of
from meshwright.capture.forward import TracedForward, trace_forward, trace_objective
from meshwright.capture.graph import capture
from meshwright.capture.losses import Objective
from meshwright.capture.regions import REGION, run_region
from meshwright.capture.resolve import ModelSource, build_model
from meshwright.errors import Unsupported, UsageError
from meshwright.run.steps.forward_graph import ForwardGraph, decode_argument, from_traced

MODELS = Path(__file__).with_name("eager_models.py")


def traced_step(traced: TracedForward) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and buffers after one run of the graph on copies of its tensors."""
    values = {v: traced.value(v).detach().clone() for v in traced.placeholders}
    for v in values:
        if v.startswith("param:"):
            values[v].requires_grad_(traced.value(v).requires_grad)
    (loss,) = traced.graph_module(*values.values())
    loss.backward()
    named = {v.partition(":")[2]: x for v, x in values.items() if not v.startswith("input:")}
    return loss, {n: x.grad for n, x in named.items() if x.grad is not None}, named


def compare(traced: TracedForward, *, rounding: float = 0.0) -> None:
    """`rounding`: absolute, of gradients that are summed in another order."""
    eager = copy.deepcopy(traced.objective)
    loss, gradients, after = traced_step(traced)
    expected = eager(*traced.inputs)
    expected.backward()
    assert torch.equal(loss, expected)
    aliases = {a for names in traced.aliases.values() for a in names}
    for name, p in eager.model.named_parameters(remove_duplicate=False):
        if name in aliases:
            continue
        ours, theirs = gradients.get(name), p.grad
        if ours is None or theirs is None:
            assert theirs is None or not theirs.any(), name
            assert ours is None or not ours.any(), name
        else:
            assert torch.allclose(ours, theirs, rtol=0, atol=rounding), name
    for name, b in eager.model.named_buffers():
        if name in after:
            assert torch.equal(after[name], b), name


@pytest.mark.parametrize("cause", CAUSES)
def test_loss_gradients_and_buffers_are_those_of_the_module(cause: str) -> None:
    traced = trace_forward(f"{MODELS}:{cause}", loss="mse", device="cpu")
    assert traced.method == "export"
    whole = [n for n in traced.graph_module.graph.nodes if str(n.target) == REGION]
    assert len(whole) == (cause in WHOLE)
    assert any("kept whole" in n and f"({cause})" in n for n in traced.notes) == (cause in WHOLE)
    compare(traced, rounding=1e-6 if cause == "ChangedThroughViews" else 0.0)
    again = ForwardGraph.from_json(from_traced(traced).to_json())  # ... and it travels to ranks
    assert {n.name for n in again.nodes} == set(traced.nodes)


def test_constants_that_json_has_no_numbers_for_travel_to_ranks() -> None:
    traced = trace_forward(f"{MODELS}:OddConstants", loss="mse", device="cpu")
    compare(traced)
    graph = from_traced(traced)
    again = ForwardGraph.from_json(graph.to_json())
    held = {n: traced.buffers[n] for n in again.constants}
    assert {str(x.dtype) for x in held.values()} >= {"torch.complex64", "torch.float32"}
    for name, x in held.items():
        assert torch.equal(again.constants[name].tensor().nan_to_num(nan=7.0), x.nan_to_num(nan=7.0)), name
    arguments = [decode_argument(a, str, torch.device("cpu")) for n in again.nodes for a in n.args]
    assert complex(0.5, 1.0) in arguments


def test_buffers_that_forward_assigns_are_the_modules_own_and_stay_where_they_are_made() -> None:
    """Export and `functional_call` put back what a module had: the new values were lost without a word."""
    traced = trace_forward(f"{MODELS}:AssignsBuffers", loss="mse", device="cpu")
    plain = copy.deepcopy(traced.objective.model)
    torch.nn.functional.mse_loss(plain(traced.inputs[0]), traced.inputs[1])  # nothing of ours runs here
    _, _, after = traced_step(traced)
    expected = {n: b for n, b in plain.named_buffers() if n in ("2.calls", "2.mean", "2.last")}
    assert len(expected) == 3 and all(torch.equal(after[n], b) and b.any() for n, b in expected.items())
    changes = [n.name for n in traced.graph_module.graph.nodes if "copy_" in str(n.target)]
    assert len(changes) == 3 and {traced.module_paths[n] for n in changes} == {"2"}
    opaque = trace_forward(f"{MODELS}:AssignsBuffers", loss="mse", device="cpu", opaque=True)
    _, _, after = traced_step(opaque)
    assert all(torch.equal(after[n], b) for n, b in expected.items())


def test_a_buffer_that_is_given_another_form_is_refused(tmp_path) -> None:
    (tmp_path / "grows.py").write_text(
        "import torch\n"
        "class Grows(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        self.seen = torch.cat([self.seen, x.mean(0)])\n"
        "        return super().forward(x)\n"
        "def build():\n"
        "    net = Grows(4, 4)\n"
        "    net.register_buffer('seen', torch.zeros(4))\n"
        "    return net, (torch.randn(2, 4), torch.randn(2, 4))\n"
    )
    with pytest.raises(Unsupported, match="forward gives the buffer 'seen' another form"):
        trace_forward(f"{tmp_path / 'grows.py'}:build", loss="mse", device="cpu")


@pytest.mark.parametrize("cause", sorted({*WHOLE, "NoGrad", "Autocast", "Vmapped"}))
def test_the_captured_graph_can_be_planned(cause: str) -> None:
    graph = capture(f"{MODELS}:{cause}", loss="mse")
    assert graph.method == "export" and graph.scaling is not None
    if cause in WHOLE:
        (region,) = [n for n in graph.nodes if n.target == REGION]
        assert region.random and region.module == "2" and any(v.startswith("param:2.") for v in region.inputs)
        assert region.forward.flops > 0 and region.backward.flops > 0


def test_changes_that_later_calls_see_through_memory_are_written_out() -> None:
    traced = trace_forward(f"{MODELS}:ChangedThroughViews", loss="mse", device="cpu")
    targets = [str(n.target) for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    assert not [t for t in targets if "_." in t]
    assert {"aten.slice_scatter.default", "aten.select_scatter.default", "aten.permute.default"} <= set(targets)
    kept = trace_forward(f"{MODELS}:DropsInPlace", loss="mse", device="cpu")
    targets = [str(n.target) for n in kept.graph_module.graph.nodes if n.op == "call_function"]
    assert "aten.dropout.default" in targets and "aten.relu_.default" in targets


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_the_outermost_module_keep_all_of_it_whole() -> None:
    traced = trace_forward(f"{MODELS}:hooked_root", loss="mse", device="cpu")
    assert traced.method == "opaque" and any("backward hooks" in n for n in traced.notes)
    compare(traced)


def test_a_module_kept_whole_is_not_patched_afterwards_and_needs_a_trace() -> None:
    traced = trace_forward(f"{MODELS}:Experts", loss="mse", device="cpu")
    assert "_call_impl" not in traced.objective.model[2].__dict__
    with pytest.raises(Unsupported, match="is not known here") as caught:
        run_region("another model", [])
    assert caught.value.hint


def test_random_numbers_are_where_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trace_forward(f"{MODELS}:Experts", loss="mse", device="cpu")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("model", "loss", "names"),
    [
        ("bag", "output", ("tokens", "weights", "labels")),
        ("bag", "cross-entropy", ("tokens", "weights", "labels")),
        ("bag", f"{MODELS}:loss_of_all", ("tokens", "weights", "labels")),
        ("bag_dictionary", "output", ("tokens", "weights", "labels")),
        ("bag_dictionary", "cross-entropy", ("tokens", "weights", "labels")),
        ("bag_tuple", "output", ("0", "weights", "labels")),
        ("bag_tuple", "cross-entropy", ("0", "weights", "labels")),
        ("bag_nested", "cross-entropy", ("tokens", "weights", "extra.bias.0", "target")),
        ("bag_in_order", "cross-entropy", None),
        ("bag_in_order", "output", None),
    ],
)
def test_keyword_inputs_and_outputs_with_fields(model: str, loss: str, names: tuple[str, ...] | None) -> None:
    source = build_model(f"{MODELS}:{model}", device="cpu", batch_size=6)
    assert (source.calling.names if source.calling else None) == names
    assert all(len(x) == 6 for x in source.inputs) and source.inputs[-1].dtype == torch.int64
    traced = trace_forward(f"{MODELS}:{model}", loss=loss, device="cpu", batch_size=6)
    assert traced.method == "export"
    compare(traced)
    # ... and the loss is what the owner's own call gives.
    args, kwargs = traced.objective.calling.arguments(traced.inputs) if names else (traced.inputs, {})
    if loss == "output":
        assert torch.equal(loss_of(traced.objective.model(*args, **kwargs)), traced_step(traced)[0])


def test_what_is_told_of_inputs_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="example input 'weights' has 3 rows"):
        build_model(f"{MODELS}:unequal_keywords", device="cpu")
    with pytest.raises(UsageError, match="no tensor among the example inputs"):
        build_model(f"{MODELS}:nothing_but_flags", device="cpu")


def test_the_prediction_is_the_first_tensor_unless_it_has_a_name() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert prediction_of({"hidden": a, "logits": b}) is b
    assert prediction_of((None, [a, b])) is a and prediction_of("text") == "text"
    loss = torch.ones(())
    assert loss_of({"loss": a, "logits": b}) is a and loss_of((b, a)) == (b, a)
    assert loss_of((a, loss)) is loss and loss_of((loss, a.sum())) is loss and loss_of({"logits": a, "objective": loss}) is loss
    calling = flat_inputs({"labels": a, "x": b})[1]
    assert calling is not None and calling.arguments([b]) == ((), {"x": b})
    assert Bag("tuple").form == "tuple"


def test_a_tensor_that_is_given_twice_is_two_inputs():
    """As `labels=input_ids`: data may give another label, and each use must read its own."""
    graph = from_traced(trace_forward(f"{MODELS}:one_tensor_twice", loss="mse", batch_size=2, device="cpu"))
    by_target = {n.target: n for n in graph.nodes}
    assert by_target["aten.linear.default"].args[0] == {"value": "input:0"}
    assert by_target["aten.broadcast_tensors.default"].args[0][1] == {"value": "input:1"}


class Cached(torch.nn.Module):
    """Joins what it computes to an empty tensor, as a cache of keys and values begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor([]), self.layer(x)], -1)


def test_an_empty_tensor_among_what_is_joined_is_no_operand() -> None:
    source = ModelSource(name="cached", module=Cached(), inputs=(torch.ones(2, 3), torch.ones(2, 3)))
    traced = trace_objective(Objective(source.module, "mse"), source, loss="mse", mode=None)
    (joined,) = [n for n in traced.graph_module.graph.nodes if str(n.target) == "aten.cat.default"]
    assert len(joined.args[0]) == 1
    compare(traced)
