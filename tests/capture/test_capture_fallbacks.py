"""What happens to modules that cannot be exported, cannot be traced, or are wrong."""

from __future__ import annotations

import msgspec
import pytest
import torch
from capture_nets import EXAMPLES, ODD, real_flops, real_saved_bytes

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.errors import CaptureError, UnknownName, Unsupported, UsageError
from meshwright.graph.graph import OpGraph, Work
from meshwright.graph.liveness import peak_bytes, segment_workspace
from meshwright.graph.scale import at_batch


def total(graph: OpGraph) -> Work:
    return sum((n.forward + n.backward for n in graph.nodes), Work())


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(ODD.read_text().splitlines(), 1) if text in line)


def test_every_method_counts_the_same_work_and_saves_the_same_bytes() -> None:
    graphs = {m: capture(f"{EXAMPLES}/gpt.py:tiny", methods=(m,), scalable=False) for m in ("export", "aot", "make_fx", "opaque")}
    assert {m: g.method for m, g in graphs.items()} == {m: m for m in graphs}
    exported = graphs["export"]
    for method, graph in graphs.items():
        assert total(graph).flops == total(exported).flops, method
        assert graph.saved_bytes == exported.saved_bytes, method
        assert graph.parameter_count == exported.parameter_count
        if method != "export":
            assert [n.name for n in graph.nodes] == ["model"] == [graph.outputs[0]]
    for method in ("aot", "make_fx"):
        joint = graphs[method].joint
        assert {j.node for j in joint} == {"model"} and {j.phase for j in joint} == {"forward", "backward"}
        assert set(graphs[method].gradients) == {p.name for p in exported.parameters}
        assert peak_bytes(graphs[method]) == pytest.approx(peak_bytes(exported), rel=0.01)
    assert graphs["opaque"].joint == () and peak_bytes(graphs["opaque"]) >= peak_bytes(exported)
    assert segment_workspace(graphs["opaque"], ["model"]) == (0, exported.saved_bytes)


def test_a_module_with_control_flow_by_value_becomes_one_measured_operator() -> None:
    model = f"{ODD}:value_dependent"
    graph = capture(model)
    assert graph.method == "opaque" and [n.name for n in graph.nodes] == ["model"]
    why = next(n for n in graph.notes if n.startswith("torch.export refused"))
    assert "aten._local_scalar_dense.default" in why and "module ''" in why
    assert f"odd_models.py:{line_of('control flow by value')}" in why
    real = trace_forward(model, device="cpu", opaque=True)
    assert graph.saved_bytes == real_saved_bytes(real) and total(graph).flops == real_flops(real)
    assert at_batch(graph, 6).nodes[0].forward.flops == 6 * graph.nodes[0].forward.flops // 4
    # ... and is still trained: the one node runs under autograd.
    values = [real.value(v) for v in real.placeholders]
    gradients = torch.autograd.grad(real.graph_module(*values)[0], list(real.parameters.values()))
    real.objective(*real.inputs).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, real.parameters.values(), strict=True))


def test_a_gradient_inside_forward_is_not_exported_but_traced_whole() -> None:
    graph = capture(f"{ODD}:inner_gradient", scalable=False)
    assert graph.method == "aot" and any("gradient is taken inside forward" in n for n in graph.notes)
    assert trace_forward(f"{ODD}:inner_gradient", device="cpu").method == "opaque"


def test_what_cannot_be_captured_is_said_with_operator_place_and_module() -> None:
    for function, methods, module in (("value_dependent_huge", None, "1"), ("value_dependent", ("export",), "")):
        with pytest.raises(CaptureError) as caught:
            capture(f"{ODD}:{function}", **({"methods": methods} if methods else {}))
        assert caught.value.where.endswith(f"odd_models.py:{line_of('control flow by value')}")
        assert "operator aten._local_scalar_dense.default" in caught.value.message and f"module {module!r}" in caught.value.message
        assert caught.value.data == {"operator": "aten._local_scalar_dense.default", "module": module}
        assert caught.value.hint
    assert "too many to run it for real" in _message("value_dependent_huge")


def _message(function: str) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(f"{ODD}:{function}")
    return caught.value.message


def test_a_module_that_fails_on_its_own_inputs_names_the_operator_and_module() -> None:
    with pytest.raises(CaptureError, match=r"operator aten.addmm.default in module 'down' fails") as caught:
        capture(f"{ODD}:shapes_do_not_fit")
    assert caught.value.where.endswith(f"odd_models.py:{line_of('self.down(self.up(x))')}")


def test_nothing_is_printed_while_tracing(capfd: pytest.CaptureFixture[str]) -> None:
    capture(f"{ODD}:value_dependent", scalable=False)
    with pytest.raises(CaptureError):
        capture(f"{ODD}:shapes_do_not_fit")
    assert capfd.readouterr() == ("", "")


def test_construction_that_reads_values_is_done_really_and_noted() -> None:
    graph = capture(f"{ODD}:reads_values_when_built")
    assert graph.method == "export" and "built with real memory" in graph.notes[0] and graph.scaling is not None


def test_a_module_that_returns_its_loss() -> None:
    own, given = capture(f"{ODD}:own_loss", loss="output"), capture(f"{ODD}:linear")
    assert total(own).flops == total(given).flops and own.nodes[-1].module == ""
    with pytest.raises(UsageError, match="not a floating-point scalar"):
        capture(f"{ODD}:linear", loss=f"{ODD}:per_row_loss")


def test_what_does_not_scale_says_so() -> None:
    graph = capture(f"{ODD}:other_calls")
    assert graph.scaling is None and any("cannot be scaled" in n and "batch 3" in n for n in graph.notes)
    with pytest.raises(Unsupported, match="captured at batch 3 only") as caught:
        at_batch(graph, 4)
    assert "--batch 4" in caught.value.hint


def test_rows_by_rows_scale_by_a_third_capture() -> None:
    graph = capture(f"{ODD}:rows_by_rows")
    assert graph.scaling is not None and graph.scaling.square
    found, own = (msgspec.structs.replace(g, scaling=None, notes=()) for g in (at_batch(graph, 5), capture(f"{ODD}:rows_by_rows", batch_size=5)))
    assert found == own


def test_unknown_method() -> None:
    with pytest.raises(UnknownName, match="no capture method 'jit'"):
        capture(f"{ODD}:linear", methods=("jit",))


def test_flex_attention_is_refused_with_torchs_own_reason() -> None:
    line = line_of("return self.outside(flex_attention(")
    with pytest.raises(CaptureError, match="FlexAttention does not support backward on CPU") as caught:
        capture(f"{ODD}:flexible", loss="mse")
    assert f"odd_models.py:{line}" in str(caught.value.where)
