"""A captured graph of one rank's positions: what is divided, what is refused and by which name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from captured import captured
from meshwright.decide.layout.context import context_graph
from meshwright.errors import Unsupported
from meshwright.graph.graph import OpGraph
from meshwright.plan.context import EXCHANGES, exchanges_in

LLAMA, GPT = "examples/llama.py:tiny", "examples/gpt.py:tiny"


@pytest.mark.parametrize("exchange", [*EXCHANGES])
@pytest.mark.parametrize("parts", [2, 4])
def test_work_and_memory_are_a_ranks(exchange: str, parts: int) -> None:
    """Flops divide exactly; what is kept for backward does, but for what an exchange holds of others."""
    whole = captured(GPT)
    mine = context_graph(whole, parts, exchange)

    def flops(g: OpGraph) -> int:
        return sum(n.forward.flops + n.backward.flops for n in g.nodes)

    assert abs(flops(mine) * parts - flops(whole)) <= 0.01 * flops(whole)
    assert whole.saved_bytes / parts < mine.saved_bytes < 1.6 * whole.saved_bytes / parts + whole.saved_bytes / 4
    assert context_graph(whole, parts, exchange) is mine and context_graph(whole, 1, "") is whole


def test_only_key_value_heads_travel_round_the_ring() -> None:
    graph = context_graph(captured(LLAMA), 2, "ring")
    shapes = {n.name: n.outputs[0].shape for n in graph.nodes if n.outputs}
    first = exchanges_in(graph)[0]
    assert first.kind == "shift" and shapes[first.source] == shapes[first.target] == (4, 2, 16, 2 * 16)  # 2 heads of 4, half of 32 positions


def test_heads_that_do_not_divide_name_what_does() -> None:
    with pytest.raises(Unsupported, match="4 query and 2 key-value heads do not divide by 8 ranks; ring does, or --context 4"):
        context_graph(captured(LLAMA), 8, "ulysses")
    assert exchanges_in(context_graph(captured(LLAMA), 4, "ulysses"))  # two ranks share a key-value head


@pytest.mark.parametrize(("parts", "near"), [(3, "30 or 36"), (64, "128")])
def test_sequences_that_do_not_divide_name_the_nearest(parts: int, near: str) -> None:
    with pytest.raises(Unsupported, match="sequences of 32 positions do not divide") as error:
        context_graph(captured(GPT), parts, "ring")
    assert near in str(error.value.hint)


class _Mixing(nn.Module):
    """Attention, then something that is refused."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.qkv, self.out = what, nn.Linear(8, 24), nn.Linear(8, 8)
        self.mix, self.scan = nn.Conv1d(8, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.what == "mask" else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1 if self.what == "dropout" else 0.0, is_causal=mask is None)
        y = self.out(y.transpose(1, 2).flatten(2))
        if self.what == "convolution":
            y = self.mix(y.transpose(1, 2)).transpose(1, 2)
        if self.what == "softmax":
            y = y.softmax(1)
        if self.what == "mean":
            y = y - y.mean(1, keepdim=True)
        if self.what == "shift":
            y = torch.cat([y[:, 1:], y[:, :1]], 1)
        if self.what == "square":
            return (y.square().mean().sqrt()).view(())
        return y.square().mean() if self.what != "penalty" else y.square().mean() + self.out.weight.square().mean()


def model_of(what: str):
    return lambda: (_Mixing(what), (torch.randn(2, 8, 8),))


mask, dropout, convolution, softmax, mean, shift, square, penalty = (
    model_of(x) for x in ("mask", "dropout", "convolution", "softmax", "mean", "shift", "square", "penalty")
)  # fmt: skip


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("mask", "its mask of shape [8, 8] is not of all pairs"),
        ("dropout", "drops attention weights"), ("convolution", "conv1d"), ("softmax", "softmax over the split"),
        ("mean", "mean.dim over the split dimension"), ("shift", "slice"), ("square", "sqrt"), ("penalty", "adds what every rank has whole"),
    ],
)  # fmt: skip
def test_what_brings_positions_together_is_refused_by_name(what: str, names: str) -> None:
    from meshwright.capture.graph import capture

    graph = capture(f"{__file__}:{what}", loss="output", batch_size=2, scalable=False)
    with pytest.raises(Unsupported, match="context degree 2") as error:
        context_graph(graph, 2, "ring")
    assert names in error.value.message and "--context 1" in str(error.value.hint)


@pytest.mark.parametrize(("model", "names"), [("convnet", "no scaled_dot_product_attention"), ("encoder_decoder", "positions of one sequence")])
def test_models_without_a_sequence_to_divide(model: str, names: str) -> None:
    with pytest.raises(Unsupported, match=names):
        context_graph(captured(f"examples/{model}.py:tiny"), 2, "ring")
