"""The gate on small models: plans that train what a plain loop trains pass, everything else is named; without what makes them equal, it is caught."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gate_models import MLP
from gate_rig import MODELS, gated, plan_of
from rig import kept_graph_of

from meshwright.capture import exporting
from meshwright.capture.forward import trace_forward
from meshwright.errors import DifferentTraining, Unsupported
from meshwright.job import Training
from meshwright.plan.vocabulary import base_node
from meshwright.run.gate import case as cases
from meshwright.run.gate import gate as gating
from meshwright.run.gate import step as steps
from meshwright.run.gate.gate import Stated, gate, too_large
from meshwright.run.gate.scaled import ScaledDown, scaled_down
from meshwright.run.gate.step import Owner, Part
from meshwright.run.launch.outcome import forward_graph
from meshwright.run.train import segments

EQUAL = ("loss", "gradients", "buffers", "parameters after the optimizer")


def refused(model: str, degrees: tuple[int, int, int] = (2, 1, 1), *, stated: Stated = Stated(), **how: Any) -> DifferentTraining:
    with pytest.raises(DifferentTraining) as caught:
        gated(model, degrees, stated=stated, **how)
    return caught.value


@pytest.mark.sample(3)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 1), (2, 2, 1)])
def test_plain_models_are_their_owners(degrees: tuple[int, int, int]) -> None:
    for model in ("dropping", "language", "attending") if degrees[1] == 1 else ("attending",):
        report = gated(model, degrees, loss="mse" if model == "dropping" else "cross-entropy", optimizer="adamw")
        assert report.compared == EQUAL and report.precision == "float64" and report.samples == 8, model
        assert report.largest_error < 1e-7 and report.numbers > 900 and not report.stated
        assert report.dropout == ("serial" if model == "dropping" else "none")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_levels_and_recomputation(zero: int) -> None:
    assert gated("tied", (2, 1, 2), loss="cross-entropy", optimizer="adamw", zero=zero).precision == "float64"
    assert gated("attending", (1, 1, 2), loss="cross-entropy", recompute=("selective", "full", "least")[zero - 1]).precision == "float64"


def test_the_owners_step_is_a_plain_loop() -> None:
    """The reference itself, against a loop written out."""
    job = Training(model=MODELS + "mlp", global_batch=8, loss="mse", optimizer="adamw", learning_rate=0.1, seed=5)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    owner = Owner(job, wide=False)
    found = owner.step([Part((x, y))])
    torch.manual_seed(5)
    model = MLP()
    for of, own in ((owner.parameters(), model.named_parameters()), (owner.buffers(), model.named_buffers())):
        assert {n: t.tolist() for n, t in of.items()} == {n: t.tolist() for n, t in own}, "before any step"
    assert owner.loss([Part((x, y), weight=0.5)]) == pytest.approx(0.5 * found.loss)
    wide = Owner(job, wide=True)
    assert {t.dtype for t in wide.parameters().values()} == {torch.float64}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    assert found.loss == float(loss.detach())
    for name, p in model.named_parameters():
        assert torch.equal(found.gradients[name], p.grad) and torch.equal(found.parameters[name], p)


# ---- the owner's gradients --------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize("model", ["reversing", "tensor_hook", "module_hook", "node_hook", "packed", "early_module_hook"])
def test_the_owners_gradients_are_kept(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = gated(model, (2, 1, 1))
    assert report.compared == EQUAL and report.precision == "float64"
    monkeypatch.setattr(exporting, "watching", lambda model, found, seen: contextlib.nullcontext())
    if model.endswith("module_hook"):  # noticed in another place too (`exporting`)
        return
    kept_graph_of.cache_clear()
    try:
        error = refused(model)  # as torch.export has it
    finally:
        kept_graph_of.cache_clear()
    assert error.data["cause"] == "operator" and error.data["kind"] == "gradient" and error.data["error"] > 1e-3
    assert error.data["operators"] and error.data["module"].startswith("blocks.")


def test_forward_hooks_are_traced() -> None:
    assert gated("forward_hooks", (1, 1, 2)).compared == EQUAL


@pytest.mark.parametrize("model", ["parameter_hook", "accumulated_hook"])
def test_hooks_on_parameters_are_refused_with_their_line(model: str) -> None:
    with pytest.raises(Unsupported, match=r"tests/run/gate_models.py:\d+: .*'blocks.0.0.weight' has a hook on its gradient") as caught:
        gated(model)
    assert caught.value.data["cause"] == "user-gradients"


def test_hooks_on_all_modules_keep_the_model_whole() -> None:
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda m, given, out: None)
    try:
        graph = trace_forward(MODELS + "mlp", loss="mse")
    finally:
        handle.remove()
    assert graph.method == "opaque" and any("backward hooks of all modules" in n for n in graph.notes)


def test_what_changes_outside_the_module_is_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="computes something else the second time it runs"):
        gated("counting", (2, 1, 1))
    # the gate sees by itself what no trial of the model has seen
    monkeypatch.setattr(exporting, "refuse_left_tensors", lambda *given: True)
    error = refused("counting")
    assert error.data["cause"] == "outside" and "something outside the module" in error.message and "buffers" in error.hint


# ---- losses -----------------------------------------------------------------------------------------------------------
COUNTED = ["ignoring", "ignoring_most", "class_weights", "summed", "negative_log", "masked", "masked_means", "two_terms", "shifted"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("loss", COUNTED)
def test_losses_are_normalised_as_one_process_would(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for degrees in ((2, 1, 1), (1, 1, 2), (1, 2, 1)):
        assert gated("attending", degrees, loss=loss).compared == EQUAL, degrees
    for module in (cases, segments):
        monkeypatch.setattr(module, "loss_terms", lambda graph: {})
    assert refused("attending", loss=loss).data["kind"] == "loss"


def test_a_loss_that_is_a_module_has_its_weights() -> None:
    assert gated("attending", (2, 1, 1), loss="weighted_module").compared == EQUAL


@pytest.mark.parametrize("loss", ["sum_of_squares", "mean_by_hand", "huber"])
def test_losses_over_elements(loss: str) -> None:
    assert gated("mlp", (2, 1, 2), loss=loss).compared == EQUAL


def test_a_planned_step_weighs_the_loss_of_a_micro_batch() -> None:
    assert gated("attending", (2, 1, 1), loss="ignoring", recompute="steps").precision == "float32"
    with pytest.raises(Unsupported, match="all targets of a micro-batch are ignored"):
        gated("attending", (2, 1, 1), loss="ignoring_most", recompute="steps")
    with pytest.raises(Unsupported, match="a part of the loss is not a mean over samples"):
        gated("attending", (2, 1, 1), loss="two_terms", recompute="steps")


def test_a_batch_without_a_target_that_counts_is_refused() -> None:
    with pytest.raises(Unsupported, match="the loss is a mean over nothing"):
        gated("attending", (2, 1, 1), loss="ignoring_all")


# ---- the batch as a whole ---------------------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        ("batch_norm", "mse", "batch_norm of module 'norm'"), ("mlp", "contrast", "depends on what else is in its micro-batch"),
        ("mlp", "balance", "depends on what else"), ("mlp", "by_the_root", "depends on what else"),
    ],
)  # fmt: skip
def test_what_looks_at_the_batch_is_a_stated_choice(model: str, loss: str, said: str) -> None:
    error = refused(model, loss=loss)
    assert error.data["cause"] == "batch-statistics" and said in error.message and "--batch-statistics local" in error.hint
    report = gated(model, (2, 1, 1), loss=loss, stated=Stated(batch_statistics="local"))
    assert report.stated == ("batch statistics local",) and report.against == "micro-batch by micro-batch" and report.compared == EQUAL
    for degrees in ((1, 1, 1), (1, 1, 2)):
        whole = gated(model, degrees, loss=loss, microbatch=8, stated=Stated(batch_statistics="global"))
        assert whole.against == "the whole batch at once" and not whole.stated


def test_global_statistics_of_a_plan_that_shares_none_are_refused() -> None:
    with pytest.raises(Unsupported, match="the plan has 4 micro-batches, which share no statistics"):
        gated("batch_norm", (2, 1, 1), stated=Stated(batch_statistics="global"))


@pytest.mark.parametrize(("model", "whole"), [("noisy", False), ("noisy_own", True)])
def test_random_numbers_are_a_stated_choice(model: str, whole: bool) -> None:
    """In an opaque model the plan's own numbers can be drawn again, and the step is compared with them."""
    error = refused(model)
    assert error.data["cause"] == "random-streams" and "--dropout local" in error.hint
    report = gated(model, (2, 1, 1), stated=Stated(dropout="local"))
    assert report.stated == ("dropout local",) and report.dropout == "local"
    assert (report.compared == EQUAL) == whole and bool(report.why_not) != whole


@pytest.mark.parametrize(("model", "loss", "degrees", "first"), [
    ("batch_norm", "mse", (2, 1, 1), "aten.batch_norm.default"), ("centred", "sum_and_mean", (1, 1, 2), "aten.mean.dim"),
    ("mlp", "contrast", (1, 2, 1), "aten.matmul.default"),
])  # fmt: skip
def test_what_brings_samples_together_is_named(model: str, loss: str, degrees: tuple[int, int, int], first: str) -> None:
    """Also where a micro-batch's loss has no weight of its own, as it is several terms: the traced calls stand for the module then."""
    error = refused(model, degrees, loss=loss, microbatch=1 if model == "centred" else 2)
    assert error.data["cause"] == "batch-statistics"
    assert (first in error.message) == (model != "batch_norm")
    report = gated(model, degrees, loss=loss, microbatch=1 if model == "centred" else 2, stated=Stated(batch_statistics="local"))
    assert report.stated == ("batch statistics local",) and report.compared == EQUAL


def test_a_buffer_that_remembers_the_batch_is_named() -> None:
    error = refused("instance_norm")
    assert error.data["cause"] == "batch-statistics" and error.data["kind"] == "buffer"
    assert "aten.instance_norm.default in module '2' keeps in it" in error.message


@pytest.mark.parametrize(("degrees", "how"), [((2, 1, 1), {}), ((1, 1, 2), {"recompute": "full"})])
def test_what_a_forward_pass_changes_changes_once_a_step_and_is_not_computed_again(degrees: tuple[int, int, int], how: dict[str, str]) -> None:
    """Spectral norm: the step's loss depends on buffers that a forward pass changes, whatever its samples are."""
    eager = "tests/capture/eager_models.py:"
    report = gated("Parametrized", degrees, models=eager, **how)
    assert report.compared == EQUAL and not report.stated and report.largest_error < 1e-7
    if how:
        again = {base_node(n) for s in plan_of("Parametrized", degrees, models=eager, **how).layout.segments for n in sum(s.computed_again(), ())}
        assert "linear_1" in again and not again & {"div", "clone", "clone_1", "mv", "mv_1"}


def test_a_loss_that_is_no_number_is_told() -> None:
    report = gated("diverged", (2, 1, 1))
    assert report.compared == EQUAL and report.notes == ("the owner's loss of the first batch is nan",)


def test_a_loss_that_is_no_number_is_told_also_where_it_was_not_understood() -> None:
    assert gated("diverged", (2, 1, 1), loss="added_up_where_positive").notes == ("the owner's loss of the first batch is nan",)


def test_a_difference_where_the_owners_loss_is_no_number_is_no_fault_of_the_plan() -> None:
    error = refused("diverged_whole")
    assert error.data["cause"] == "no-number" and "of this batch is nan" in error.message and "a number" in error.hint


def test_a_sum_that_is_kept_whole_is_named() -> None:
    error = refused("mlp", (2, 1, 1), loss="added_up_where_positive")
    assert error.data["cause"] == "sum-over-samples" and "the mean over its 4 micro-batches" in error.message
    assert 'reduction="mean"' in error.hint and "one micro-batch in all" in error.hint


def test_calls_that_are_not_the_modules_are_no_batch_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that export lost, in a module whose loss has several terms and which looks at its batch besides."""
    monkeypatch.setattr(exporting, "watching", lambda model, found, seen: contextlib.nullcontext())
    kept_graph_of.cache_clear()
    try:
        error = refused("centred_hooked", loss="sum_and_mean")
    finally:
        kept_graph_of.cache_clear()
    assert error.data["cause"] == "operator" and "not the module's" in error.data["notes"][-1]


def test_a_step_that_is_equal_by_chance_is_no_proof() -> None:
    error = refused("seldom_noisy")
    assert error.data["cause"] == "random-streams" and "though not in this step" in error.message and "aten.rand.default" in error.message
    assert gated("recurrent", (2, 1, 1)).compared == EQUAL  # its operator may draw, and does not
    with pytest.raises((DifferentTraining, Unsupported), match="random"):
        gated("recurrent_dropping", (2, 1, 1))
    assert gated("seldom_noisy", (2, 1, 1), stated=Stated(dropout="local")).why_not.startswith("random numbers other than dropout's")


# ---- optimizers -------------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("optimizer", "whole", "split"),
    [
        ("elementwise", [(2, 1, 1), (1, 1, 2), (1, 2, 1)], []), ("clipping", [(2, 1, 1)], [(1, 1, 2), (1, 2, 1)]),
        ("lars", [(2, 1, 1), (1, 1, 2)], [(1, 2, 1)]), ("rows", [(1, 1, 2)], [(1, 2, 1)]), ("orthogonal", [(1, 1, 2)], [(1, 2, 1)]),
    ],
)  # fmt: skip
def test_optimizers_are_given_what_they_look_at_or_refused(
    optimizer: str, whole: list[tuple[int, int, int]], split: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for degrees in whole:
        assert gated("attending", degrees, loss="cross-entropy", optimizer=optimizer).compared == EQUAL, degrees
    for degrees in split:
        with pytest.raises(Unsupported, match="looks beyond") as caught:
            gated("attending", degrees, loss="cross-entropy", optimizer=optimizer)
        flag, _, one = caught.value.data["degree"].partition(" ")
        assert flag in ("--tp", "--pp") and one == "1" and f"plan with {flag} 1" in caught.value.hint
        taken = any(d[("--dp", "--tp", "--pp").index(flag)] == 1 for d in whole)  # what the hint says to plan is among those that are equal
        assert taken, (optimizer, flag)
    monkeypatch.setattr(gating, "refuse_optimizer", lambda *_: None)
    for degrees in split:
        assert refused("attending", degrees, loss="cross-entropy", optimizer=optimizer).data["cause"] == "optimizer"


def test_replicas_divide_whole_parameters_under_optimizers_that_look_at_them() -> None:
    assert gated("attending", (2, 1, 1), loss="cross-entropy", optimizer="newton_schulz", zero=2).compared == EQUAL
    with pytest.raises(Unsupported, match="what other replicas update") as caught:
        gated("attending", (2, 1, 1), loss="cross-entropy", optimizer="clipping", zero=2)
    assert caught.value.data["degree"] == "--zero 0"


def test_an_optimizer_that_follows_rounding_is_said_so() -> None:
    error = refused("low_rank", (2, 1, 1), optimizer="orthogonal")
    assert error.data["cause"] == "optimizer" and error.data["kind"] == "parameter" and "but for rounding" in error.message


def test_an_update_that_differs_of_whole_parameters_is_no_affair_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cases.planned_step

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        found[1].parameters[0].values[0] += 1
        return found

    monkeypatch.setattr(cases, "planned_step", wrong)
    assert refused("mlp").data["cause"] == "operator"


# ---- limits, precision ------------------------------------------------------------------------------------------------
def test_of_a_large_plan_a_copy_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("attending", (4, 1, 2), loss="cross-entropy", global_batch=64, zero=1, recompute="full")
    assert plan.layout is not None and not too_large(plan, plan.layout)
    flops = 3 * sum(s.forward.flops for s in plan.layout.segments) * plan.layout.all_microbatches
    monkeypatch.setattr(gating, "MAX_GATE_FLOPS", flops // 2)
    report = gate(plan, data="synthetic")
    assert report.copy == "16 samples of 64, 2 replicas of 4" and report.samples == 16 and report.compared == EQUAL
    assert "GFLOP" in report.notes[0] and "a smaller copy of the plan was compared (16 samples of 64" in report.text()
    whole = gate(plan, data="synthetic", limited=False)
    assert whole.compared == EQUAL and not whole.copy and whole.samples == 64
    monkeypatch.setattr(gating, "MAX_GATE_FLOPS", 1)
    assert "a copy with 16 samples of 64" in gate(plan, data="synthetic").why_not
    monkeypatch.setattr(gating, "MAX_GATE_FLOPS", 1e12)
    monkeypatch.setattr(gating, "MAX_GATE_BYTES", 1)
    assert "of gradients" in gate(plan, data="synthetic").why_not


def test_a_copy_is_traced_once_and_that_trace_is_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tracing is most of what a copy costs: the trace that it is planned from is run, and gives the calls that another would."""
    from meshwright.capture import forward

    plan = plan_of("attending", (2, 1, 1), loss="cross-entropy", global_batch=32)
    assert plan.layout is not None
    traced, real = [], forward.exported_program
    monkeypatch.setattr(forward, "exported_program", lambda *args: traced.append(args) or real(*args))
    monkeypatch.setattr(gating, "MAX_GATE_FLOPS", 3 * sum(s.forward.flops for s in plan.layout.segments) * plan.layout.all_microbatches // 2)
    assert gate(plan, data="synthetic").copy and len(traced) == 1
    small = scaled_down(plan, tmp_path)
    assert "undecided" not in small.plan.job  # proved at the first attempt, its bound too
    assert small.plan.layout is not None
    assert forward_graph(small.plan, small.plan.layout, small.traced) == forward_graph(small.plan, small.plan.layout)


def test_a_copy_that_trains_something_else_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("mlp", (2, 1, 1), loss="balance", global_batch=32)
    assert plan.layout is not None
    flops = 3 * sum(s.forward.flops for s in plan.layout.segments) * plan.layout.all_microbatches
    monkeypatch.setattr(gating, "MAX_GATE_FLOPS", flops // 2)
    with pytest.raises(DifferentTraining, match=r"of a smaller copy: 8 samples of 32") as caught:
        gate(plan, data="synthetic")
    assert caught.value.data["model"] == MODELS + "mlp" and caught.value.data["cause"] == "batch-statistics"


def test_a_plan_of_which_there_is_no_copy_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("attending", (1, 2, 1), loss="cross-entropy")
    monkeypatch.setattr(gating, "MAX_GATE_FLOPS", 1)
    monkeypatch.setattr(gating, "scaled_down", lambda plan, folder: (_ for _ in ()).throw(Unsupported("no such model")))
    assert gate(plan, data="synthetic").why_not.endswith("there is no smaller copy: no such model")
    monkeypatch.setattr(gating, "scaled_down", lambda plan, folder: ScaledDown(plan, "nothing", "no.such.data"))
    monkeypatch.setattr(gating, "too_large", lambda plan, layout, calls=[]: "" if calls.append(1) or len(calls) > 1 else "large")
    assert "large; a copy with nothing could not be compared: no data 'no.such.data'" in gate(plan, data="synthetic").why_not


def test_a_module_that_is_float32_inside_is_compared_so() -> None:
    report = gated("narrow_inside", (2, 1, 1))
    assert report.precision == "float32" and report.compared == EQUAL
    assert any("double precision" in n for n in report.notes)


def test_a_model_of_several_precisions_is_compared_in_the_coarsest() -> None:
    report = gated("Autocast", (1, 1, 2), microbatch=8, models="tests/capture/eager_models.py:")
    assert report.precision == "float32" and report.tolerance == 3e-2 and report.compared == EQUAL


def test_calls_without_a_double_form_are_compared_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's code may go around an operator that has none, and the traced calls hold it."""
    real = cases.planned_step

    def narrow_only(*args: Any, **kwargs: Any) -> Any:
        if kwargs["dtype"] is torch.float64:
            raise RuntimeError("expected Float32, got Double")
        return real(*args, **kwargs)

    monkeypatch.setattr(cases, "planned_step", narrow_only)
    report = gated("mlp", (2, 1, 1))
    assert report.precision == "float32" and report.compared == EQUAL and "expected Float32, got Double" in report.notes[0]


def test_what_the_owners_code_calls_float32_is_widened_too(monkeypatch: pytest.MonkeyPatch) -> None:
    report = gated("rounded_inside", (2, 1, 1))
    assert report.precision == "float64" and report.compared == EQUAL and report.largest_error < 1e-12 and not report.notes
    monkeypatch.setattr(steps, "Widened", contextlib.nullcontext)
    assert refused("rounded_inside").data["error"] < 1e-5  # its rounding would look like a difference


@pytest.mark.parametrize("kind", ["loss", "gradients", "buffers", "parameters"])
def test_every_kind_of_number_is_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is off by a millionth is found, wherever it is."""
    real = cases.planned_step

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if kind == "loss":
            found[0].losses[-1] *= 1 + 1e-6
        elif kind == "buffers":
            found[1].buffers["norm.running_mean"][3] += 1e-6
        else:
            getattr(found[1], kind)[0].values[0] += 1e-5 * getattr(found[1], kind)[0].values.abs().max()
        return found

    monkeypatch.setattr(cases, "planned_step", wrong)
    error = refused("batch_norm", (2, 1, 1), microbatch=4, stated=Stated(batch_statistics="local"))
    assert error.data["differences"] >= 1
    monkeypatch.setattr(cases, "planned_step", real)
    assert gated("batch_norm", (2, 1, 1), microbatch=4, stated=Stated(batch_statistics="local")).compared == EQUAL




def test_a_loss_that_is_not_understood_is_looked_at_for_longer() -> None:
    """Every target of the first batch counts; of later ones some do not, and an opaque model's micro-batches cannot be weighed."""
    plan = plan_of("own_language", (2, 1, 1), loss="cross-entropy")
    with pytest.raises(DifferentTraining) as caught:
        gate(plan, data=MODELS + "padded_later")
    assert caught.value.data["cause"] == "batch-statistics" and caught.value.data["kind"] == "loss"
    assert gate(plan, data="synthetic").compared == EQUAL
