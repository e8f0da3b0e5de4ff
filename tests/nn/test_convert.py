"""Other makers' expert layers: recognised by what they do, replaced with equal outputs, or named with the reason why not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent / "run"))
from convert_ranks import INNER, TOKENS, block_of, every_choice, inputs  # noqa: E402
from owner_models import Block, Model, OwnerExperts  # noqa: E402
from processes import RankPool  # noqa: E402

from meshwright.decide.experts import degrees_of  # noqa: E402
from meshwright.errors import NotFinite, Unsupported, UsageError  # noqa: E402
from meshwright.nn import Spread, StackedExperts, balance_biases, convert_experts  # noqa: E402

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


def both(model: Any, **more: Any) -> tuple[Any, Any, Any]:
    ours = copy.deepcopy(model)
    return model, ours, convert_experts(ours, **more)


def same(model: Any, ours: Any, *args: Any, loss: Any = lambda y: y.square().sum(), **kwargs: Any) -> None:
    """Outputs, loss, and gradients by name."""
    for m in (model, ours):
        loss(m(*args, **kwargs)).backward()
    with torch.no_grad():
        one, two = (loss(m(*args, **kwargs)) for m in (model, ours))
    assert torch.allclose(one, two, rtol=1e-9, atol=0)
    theirs, mine = dict(model.named_parameters()), dict(ours.named_parameters())
    assert list(theirs) == list(mine) and list(model.state_dict()) == list(ours.state_dict())
    for name, p in theirs.items():
        assert (p.grad is None) == (mine[name].grad is None)
        assert p.grad is None or torch.allclose(p.grad, mine[name].grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("dropless", ["loop", "padded", "sparse", ""])
def test_a_converted_model_is_the_owners(dropless: str) -> None:
    torch.manual_seed(0)
    model, ours, report = both(Model(inner=16).double(), spread=Spread(dropless=dropless, choice=(1, 1, "linear")))
    same(model, ours, torch.arange(10).view(2, 5))
    first, second = report.replaced
    assert (first.path, first.experts, first.model, first.inner, first.activation) == ("blocks.0.experts", 4, 8, 16, "silu")
    assert first.router.text == "top 2 by softmax, normalised" and first.compared and not report.whole
    router = second.router
    assert (router.score, router.k, router.normalised, router.scale, router.groups) == ("sigmoid", 2, True, 2.5, (2, 1))
    assert router.bias == "e_score_correction_bias" and second.shared == ("blocks.1.shared_experts",)
    assert "2 of 4 groups" not in report.text and "1 of 2 groups, balanced by e_score_correction_bias" in report.text


def test_parameters_are_the_owners_own_and_states_go_both_ways() -> None:
    model = Model().double()
    before = dict(model.named_parameters())
    owner = copy.deepcopy(model)
    convert_experts(model)
    assert all(p is before[n] for n, p in model.named_parameters())
    model.load_state_dict(owner.state_dict())
    owner.load_state_dict(model.state_dict())
    assert convert_experts(model).text == "no expert layers"  # what is ours is left alone


class Clamped(OwnerExperts):
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return super().forward(hidden_states, top_k_index, top_k_weights).clamp(max=0.01)


class OtherCall(OwnerExperts):
    def forward(self, x: Any, weights: Any) -> Any:  # type: ignore[override]
        return x


class Biased(OwnerExperts):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(4, 12))


class Broken(OwnerExperts):
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        raise ValueError("not today")


@pytest.mark.parametrize(("experts", "why"), [
    (lambda: torch.nn.ModuleList([torch.nn.Linear(8, 8)]), "modules of their own"),
    (lambda: Clamped(4, 8, 6), "ours gives other outputs on a probe"), (lambda: OtherCall(4, 8, 6), "it is called with (x, weights)"),
    (lambda: Biased(4, 8, 6), "its parameters are down_proj, gate_up_proj, gate_up_proj_bias"),
    (lambda: OwnerExperts(4, 8, 6, torch.nn.Hardtanh()), "its activation is none of"), (lambda: Broken(4, 8, 6), "cannot be called on a probe"),
])  # fmt: skip
def test_what_is_not_alike_stays_whole_and_is_named(experts: Any, why: str) -> None:
    block = Block(4, 8, 6, 2)
    block.experts = experts()
    report = convert_experts(torch.nn.ModuleDict({"mlp": block}))
    (kept,) = report.whole
    assert not report.replaced and why in kept.why and kept.path == "mlp.experts" and why in report.text


def test_wrong_tensors_and_models_are_named() -> None:
    block = Block(4, 8, 6, 2)
    block.experts.down_proj = torch.nn.Parameter(torch.zeros(4, 6, 8))
    assert "not [E, 2F, H] and [E, H, F]" in convert_experts(block).whole[0].why
    with pytest.raises(UsageError, match="a str was given"):
        convert_experts("model")  # type: ignore[arg-type]


def test_without_values_nothing_is_compared() -> None:
    with torch.device("meta"):
        report = convert_experts(Model())
    assert len(report.replaced) == 2 and not any(x.compared for x in report.replaced) and "not compared" in report.text


def test_weights_that_are_not_finite_are_refused() -> None:
    block = block_of(3)
    convert_experts(block)
    with pytest.raises(NotFinite):
        block(torch.full((2, 6), float("nan"), dtype=torch.float64))


def test_buffers_without_room_are_refused_when_captured() -> None:
    """The form that plans hold; the other is `test_layer`'s."""
    model = Model()
    convert_experts(model, capacity_factor=0.01)
    x = torch.randn(8, 8)
    _, weights, index = model.blocks[0].gate(x)
    with pytest.raises(UsageError, match="rounds to a capacity of zero"):
        model.blocks[0].experts._captured(x, index, weights)


def test_layers_that_lie_over_ranks_are_refused_when_captured() -> None:
    """Their parameters are a rank's part: a plan would take it for the whole."""
    model = Model()
    convert_experts(model, group=SimpleNamespace(rank=lambda: 0, size=lambda: 2), spread=Spread(dropless="loop", spare=1, fabric="dgx-h100:1"))
    with pytest.raises(Unsupported, match="experts and their copies lie over 2 ranks already cannot be part of a training plan") as refused:
        model.blocks[0].experts._captured(torch.randn(8, 8), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
    assert "without group" in refused.value.hint
    with pytest.raises(Unsupported, match="copies of hot experts with one process"):
        convert_experts(Model(), spread=Spread(dropless="loop", spare=1))


def test_a_bias_moves_towards_the_less_loaded() -> None:
    torch.manual_seed(1)
    block = Block(6, 8, 4, 2, limited=True)
    convert_experts(block)
    loads = torch.zeros(6, dtype=torch.int64)
    for step in range(3):
        x = torch.randn(9, 8, generator=torch.Generator().manual_seed(step))
        index = block.gate(x)[2]
        loads += torch.bincount(index.view(-1), minlength=6)
        block(x).sum().backward()
    block.eval()
    block(torch.randn(4, 8))  # evaluation does not count
    found = balance_biases(block, 0.01)
    assert torch.equal(found["experts"], loads)
    assert torch.allclose(block.gate.e_score_correction_bias, 0.01 * torch.sign(loads.double().mean() - loads).float())
    with pytest.raises(UsageError, match="no converted layer with a bias"):
        balance_biases(block, 0.01)  # nothing was trained since


@pytest.mark.parametrize(("ranks", "experts"), [(2, 1), (2, 4), (4, 2)])
def test_every_choice_on_ranks_is_the_owners(pool: RankPool, ranks: int, experts: int) -> None:
    choices: list[Any] = [(r, d, "linear") for r in degrees_of(ranks, experts) for d in (1, 2)] + (["loop"] if experts >= ranks else [])
    expected, gradients = [], None
    for rank in range(ranks):
        block = block_of(experts)
        x, weights = inputs(rank)
        x.requires_grad_()
        y = block(x)
        (y * weights).sum().backward()
        expected.append((y.detach().numpy(), x.grad.numpy()))
        of = [p.grad if p.grad is not None else torch.zeros_like(p) for p in (block.experts.gate_up_proj, block.experts.down_proj)]
        gradients = of if gradients is None else [a + b for a, b in zip(gradients, of, strict=True)]
    assert gradients is not None and sum(TOKENS[:ranks])
    for rank, found in enumerate(pool.run(every_choice, ranks, experts, choices)):
        for one in found:
            for have, want in zip((one["y"], one["x"], one["gate_up_proj"], one["down_proj"]), (*expected[rank], *gradients), strict=True):
                np.testing.assert_allclose(have, want, rtol=1e-9, atol=1e-12)
            assert one["loaded"] and one["apart"] and one["own"] == 2 * INNER * experts // ranks
            for name, value in block_of(experts).state_dict().items():
                np.testing.assert_array_equal(one["state"][name], value)


# ---- transformers' classes ----------------------------------------------------------------------------------------
BASE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "max_position_embeddings": 64,
    "attn_implementation": "eager",
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
SIX = {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 2}
CLASSES = {
    "Mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "num_key_value_heads": 2, "output_router_logits": True},
        "top 2 by softmax, normalised",
    ),
    "Qwen2Moe": (
        {**SIX, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "norm_topk_prob": False,
         "output_router_logits": True},
        "top 3 by softmax, beside",
    ),
    "Qwen3Moe": ({**SIX, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8}, "top 3 by softmax, normalised"),
    "Olmoe": ({**SIX, "intermediate_size": 24}, "top 3 by softmax"),
    "DeepseekV2": (
        {**LATENT, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
        "top 3 by softmax, times 2, 2 of 4 groups, beside",
    ),
    "DeepseekV3": (
        {**LATENT, "n_shared_experts": 1}, "top 3 by sigmoid, normalised, times 2.5, 2 of 4 groups, balanced by e_score_correction_bias, beside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_classes(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    options, told = CLASSES[kind]
    config = getattr(transformers, f"{kind}Config")(**BASE, **options)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model, ours, report = both(getattr(transformers, f"{kind}ForCausalLM")(config).double().train())
    assert report.replaced and not report.whole and all(told in x.text for x in report.replaced)
    assert all(isinstance(ours.get_submodule(x.path), StackedExperts) for x in report.replaced)
    tokens = torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(0))
    same(model, ours, input_ids=tokens, labels=tokens, loss=lambda out: out.loss + out.logits.square().mean())
