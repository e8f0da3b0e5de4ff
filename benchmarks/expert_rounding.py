"""How far a plain loop in float32 is from the same loop in float64, for the models of `expert_models.py`: the yardstick for its float32 rows.

Run: `python benchmarks/expert_rounding.py` (needs transformers 5; a minute). One process, the owner's own layers, twenty AdamW steps from equal
weights. Rows: largest relative difference of losses, and of each weight over its largest element, as there: against the float64 loop, and against the
same float32 loop with another order of sums (two micro-batches of half the batch). `worst`: the weight that differs most.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import machine
import torch
from expert_models import STEPS, batches, loss_of, model_of


def trained(name: str, dtype: torch.dtype, parts: int = 1) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, weights, and gradients of the first step; the loss is the mean over `parts` micro-batches."""
    model = model_of(name, torch.float32, converted=False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = [], dict[str, torch.Tensor]()
    for b in batches():
        optimizer.zero_grad()
        total = 0.0
        for piece in zip(*(x.chunk(parts) for x in b.values()), strict=True):
            given = dict(zip(b, piece, strict=True))
            loss = loss_of(model(**given), given) / parts
            loss.backward()
            total += float(loss.detach())
        first = first or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict(), first


def apart(one: Any, two: Any) -> tuple[float, float, str, float]:
    """(losses, weights, the weight that differs most, its smallest first gradient in units of the largest)."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(one[0], two[0], strict=True))
    each = {n: float((one[1][n].double() - x.double()).abs().max() / x.double().abs().max()) for n, x in two[1].items()}
    worst = max(each, key=each.__getitem__)
    gradient = two[2].get(worst)
    tiny = float(gradient.abs()[gradient != 0].min() / gradient.abs().max()) if gradient is not None and (gradient != 0).any() else 0.0
    return losses, each[worst], worst, tiny


def main() -> None:
    rows = []
    for name in ("mixtral", "qwen"):
        exact, plain = trained(name, torch.float64), trained(name, torch.float32)
        for what, found in (("float32 loop", plain), ("float32 loop, two micro-batches", trained(name, torch.float32, parts=2))):
            for against, other in (("the float64 loop", exact), ("the float32 loop", plain)):
                if found is other:
                    continue
                losses, weights, worst, tiny = apart(found, other)
                row = {"what": f"{name}, {what} against {against}", "value": max(losses, weights), "unit": "relative", "losses": losses,
                       "weights": weights, "worst": worst, "smallest_gradient_share": tiny}  # fmt: skip
                print(f"{row['what']}: losses {losses:.2g}, weights {weights:.2g} ({worst}, least gradient {tiny:.1g} of the largest)", flush=True)
                rows.append(row)
    machine.record("expert_rounding", rows, steps=STEPS)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
