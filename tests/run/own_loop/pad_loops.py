"""`zoo_loops` with a causal model and batches as long as their longest sample, under plans of two lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import zoo_loops
from torch import nn

LENGTHS = (4, 10)


class Causal(nn.Module):
    """Keys without a bias: its gradient is rounding alone, which Adam turns into full steps."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(24, 16), nn.Linear(16, 48, bias=False), nn.Linear(16, 24)

    def forward(self, input_ids=None, labels=None):
        x = self.tokens(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = self.head(x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Causal()


def dataset() -> list[dict[str, torch.Tensor]]:
    """The first batches are short ones."""
    generator, found = torch.Generator().manual_seed(1), []
    for i in range(zoo_loops.ROWS):
        row = torch.randint(24, (3 + i % 2 if i < zoo_loops.ROWS // 2 else 2 + i % 10,), generator=generator)
        found.append({"input_ids": row[:-1], "labels": row[1:]})
    return found


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pads = {"input_ids": 0, "labels": -100}
    return {k: nn.utils.rnn.pad_sequence([r[k] for r in rows], batch_first=True, padding_value=pads[k]) for k in rows[0]}


def whole(length: int) -> dict[str, torch.Tensor]:
    return {k: torch.zeros(zoo_loops.SAMPLES, length, dtype=torch.int64) for k in ("input_ids", "labels")}


def plan_for(which: str, ranks: int, **degrees: int) -> Any:
    import meshwright as mw

    options: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero": 0, "recipe": mw.Recipe(clip_norm=zoo_loops.CLIP)}
    model = mw.torch.TrainingStep(zoo_loops.lightning_module()) if which == "lightning" else make_model()
    return mw.plan(model, whole(LENGTHS[1]), shapes=[whole(LENGTHS[0])], fabric=f"laptop:{ranks}", **options | degrees)


zoo_loops.make_model, zoo_loops.dataset, zoo_loops.collate = make_model, dataset, collate
zoo_loops.PAD = {"input_ids": 0, "labels": -100}

if __name__ == "__main__":
    zoo_loops.main()
