"""Autocast: the bits of eager autocast in one process, within rounding in every layout; loss scaling as GradScaler's, agreed on by all ranks."""

from __future__ import annotations

import pytest
import torch
from recipe_rig import checkpoint, job_of, plain, train, worst
from rig import graph_of
from tensor_rig import plan_case

from meshwright.capture.gpu_casts import gpu_casts
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.plan.plan import StepEnd
from meshwright.run.train.scaling import LossScaler
from meshwright.run.train.update import AVERAGE, Update

pytestmark = [pytest.mark.real, pytest.mark.timeout(590)]
MODELS = "tests/run/recipe_models.py:"
DTYPES = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
NORM = 0.5


def case_of(degrees, precision, level=0, name="single", **options):
    options = {"microbatch": 4 // degrees[0], "global_batch": 4, **options}
    sharding = DataSharding(level, level > 0, 1500)
    return plan_case(name, degrees, sharding=sharding, models=MODELS, precision=precision, end=StepEnd(norm=True), **options)


def by_hand(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01), None, None


def clipped(module):
    torch.nn.utils.clip_grad_norm_(module.parameters(), NORM)


def test_graphs_have_the_types_that_autocast_gives():
    plain_graph, cast = (graph_of(MODELS + "single", 2, "cross-entropy", p) for p in ("fp32", "bf16-autocast"))
    assert [n.name for n in plain_graph.nodes] == [n.name for n in cast.nodes]
    kinds = {n.target: n.outputs[0].dtype for n in cast.nodes}
    assert kinds["aten.linear.default"] == "bfloat16" and kinds["aten.layer_norm.default"] == "float32"
    assert {o.dtype for n in plain_graph.nodes for o in n.outputs} <= {"float32", "int64"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("recompute", ["none", "full", "steps"])
def test_one_process_has_the_bits_of_eager_autocast(pool, precision, recompute):
    case = case_of((1, 1, 1), precision, recompute=recompute)
    scaled = precision == "fp16-autocast"
    (found,) = pool.run(train, 1, case, job_of(case, "adamw", precision=precision), 0, 3)
    expected = plain(case, "single", 3, by_hand, dtype=DTYPES[precision], scaler=torch.amp.GradScaler("cpu") if scaled else None)
    assert found.losses == expected.losses
    for (name, _), values in found.weights.items():
        assert torch.equal(values, expected.weights[name].reshape(-1)), name


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "level", "options"),
    [
        ((2, 1, 1), 0, {}), ((1, 2, 1), 0, {"options": TensorOptions(sequence=True)}), ((1, 2, 2), 0, {"microbatch": 2}),
        ((2, 1, 2), 3, {"microbatch": 1}),
    ],
)  # fmt: skip
def test_layouts_equal_eager_autocast_within_rounding(pool, degrees, level, options):
    """bfloat16 has eight bits: a sum in another order is off by parts of a hundredth, as eager autocast is from float32."""
    case = case_of(degrees, "bf16-autocast", level, **options)
    job = job_of(case, "sgd", clip_norm=NORM, precision="bf16-autocast")
    found = pool.run(train, case.layout.ranks, case, job, 0, 2)
    make = lambda m: (torch.optim.SGD(m.parameters(), lr=0.01), None, None)  # noqa: E731
    expected = plain(case, "single", 2, make, clipped, dtype=torch.bfloat16)
    exact = plain(case, "single", 2, make, clipped)
    off = max(float((p - exact.weights[n]).abs().max() / p.abs().max()) for n, p in expected.weights.items())
    assert 1e-3 < off < 0.1 and worst(case, found, expected) <= 1.5 * off
    if degrees[1] * degrees[2] > 1:
        assert "bfloat16" in {v.dtype for v in case.layout.values}


def test_a_plan_by_a_gpus_list_is_eager_autocast_by_that_list(pool):
    """Rehearsed on processors: what a norm gives is float32, so other values cross the borders than by the processor's list."""
    job_and_loop = {"precision": "bf16-autocast", "casts": "cuda"}
    make = lambda m: (torch.optim.SGD(m.parameters(), lr=0.01), None, None)  # noqa: E731
    for degrees, options in (((1, 1, 1), {}), ((1, 2, 2), {"microbatch": 2})):
        case = case_of(degrees, "bf16-autocast:cuda", name="normed", **options)
        found = pool.run(train, case.layout.ranks, case, job_of(case, "sgd", **job_and_loop), 0, 2)
        with gpu_casts():
            expected = plain(case, "normed", 2, make, dtype=torch.bfloat16)
        if case.layout.ranks == 1:
            assert found[0].losses == expected.losses
            assert all(torch.equal(v, expected.weights[n].reshape(-1)) for (n, _), v in found[0].weights.items())
            assert plain(case, "normed", 2, make, dtype=torch.bfloat16).losses != expected.losses, "the processor's list gives something else"
        off = max(float((p - plain(case, "normed", 2, make).weights[n]).abs().max() / p.abs().max()) for n, p in expected.weights.items())
        assert worst(case, found, expected) <= 1.5 * off
    graphs = (graph_of(MODELS + "normed", 2, "cross-entropy", f"bf16-autocast{casts}") for casts in ("", ":cuda"))
    own, theirs = ([n.outputs[0].dtype for n in g.nodes] for g in graphs)
    assert own != theirs and len(own) == len(theirs)


def blow(module, step):
    """In the second step one rank's weights give gradients that float16 cannot hold."""
    if step == 1:
        for p, tensor, _ in module.kept():
            if "norm.weight" in p.name:
                tensor.data.mul_(1e4)


def test_a_step_that_overflows_is_left_out_by_all_ranks(pool, tmp_path):
    case = case_of((2, 1, 2), "fp16-autocast", microbatch=1)
    job = job_of(case, "adamw", precision="fp16-autocast", clip_norm=NORM)
    source = str(tmp_path)
    found = pool.run(train, 4, case, job, 0, 2, source, None, blow)
    index = checkpoint(case, job, 2, found)
    assert index.scalars["scaler:skipped"] == 1 and index.scalars["scaler:scale"] == 32768.0 and index.scalars["scaler:good"] == 0
    once = pool.run(train, 4, case, job, 0, 1)
    for a, b in zip(found, once, strict=True):
        for key, values in a.weights.items():
            grown = values / (1e4 if "norm.weight" in key[0] else 1)
            assert torch.allclose(grown, b.weights[key], rtol=1e-6), "nothing else has changed"
    again = pool.run(train, 4, case, job, 2, 4, str(tmp_path / "more"), (source, index))
    later = checkpoint(case, job, 4, again)
    assert later.scalars["scaler:scale"] <= 32768.0


# ---- bfloat16 weights ------------------------------------------------------------------------------------------------
class WithMasters(torch.optim.Optimizer):
    """A plain loop's optimizer on float32 copies: AdamW with clipping by norm."""

    def __init__(self, module):
        self.weights = list(module.parameters())
        self.masters = [torch.nn.Parameter(w.detach().float()) for w in self.weights]
        self.inner = torch.optim.AdamW(self.masters, lr=0.01)
        super().__init__(self.weights, {"lr": 0.01})

    def step(self, closure=None):
        for w, m in zip(self.weights, self.masters, strict=True):
            m.grad = w.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, NORM)
        self.inner.step()
        with torch.no_grad():
            for w, m in zip(self.weights, self.masters, strict=True):
                w.copy_(m)


def test_bfloat16_weights_follow_float32_masters(pool, tmp_path):
    case = case_of((1, 1, 1), "fp32", name="half")
    job = job_of(case, "adamw", clip_norm=NORM, ema=0.5)
    (found,) = pool.run(train, 1, case, job, 0, 3, str(tmp_path))
    made = []
    expected = plain(case, "half", 3, lambda m: (made.append(WithMasters(m)) or made[0], None, None))
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    index = checkpoint(case, job, 3, [found])
    for name, p in expected.weights.items():
        assert float((found.weights[name, 0].view(p.shape) - p).abs().max()) <= 0.01 * float(p.abs().max()), name
        assert index.parts[f"optimizer:{name}:master"]["rank-000.safetensors"].dtype == "float32"
        assert found.averages[name, 0].dtype == torch.float32
    changed = [m.detach() - w.float() for m, w in zip(made[0].masters, made[0].weights, strict=True)]
    assert any(bool(x.any()) for x in changed), "masters hold what weights round away"


@pytest.mark.parametrize(("before", "after"), [(((2, 1, 2), 3), ((2, 1, 2), 3)), (((2, 1, 1), 1), ((1, 2, 1), 0))])
def test_masters_are_resumed_in_any_layout(pool, before, after, tmp_path):
    source, target = (case_of(d, "fp32", level, name="half", microbatch=1) for d, level in (before, after))
    job = job_of(source, "adamw", clip_norm=NORM)
    whole = pool.run(train, source.layout.ranks, source, job, 0, 4)
    index = checkpoint(source, job, 2, pool.run(train, source.layout.ranks, source, job, 0, 2, str(tmp_path)))
    again = pool.run(train, target.layout.ranks, target, job, 2, 4, "", (str(tmp_path), index))
    if before == after:
        assert all(torch.equal(a.weights[k], b.weights[k]) for a, b in zip(whole, again, strict=True) for k in a.weights)
    losses = [sum(x) / len(x) for x in zip(*(e.losses for e in again if e.losses[0] is not None), strict=True)]
    expected = [sum(x) / len(x) for x in zip(*(e.losses for e in whole if e.losses[0] is not None), strict=True)]
    assert losses == pytest.approx(expected[2:], rel=2e-2)


def test_an_average_may_begin_before_the_optimizers_own_state():
    """A first step that is left out averages all the same; the optimizer must not take the average for state that it made."""
    weight = torch.nn.Parameter(torch.ones(2))
    update = Update(torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0), ema=0.5, scaler=LossScaler())
    for gradient in (float("inf"), 32768.0):  # at half the first scale
        weight.grad = torch.full((2,), gradient)
        update.clipped_step([weight], lambda: torch.tensor(float(weight.grad[0])))
    assert update.scaler.skipped == 1 and torch.allclose(weight.detach(), torch.full((2,), 0.5))
    assert torch.allclose(update.state[weight][AVERAGE], torch.full((2,), 0.75)) and update.state[weight]["step"] == 1
