"""Does it pay to drop no token? A byte-level decoder of four layers with eight experts each, trained dropless and at capacity factor 1.

Run: `python benchmarks/expert_training.py [STEPS] [FOLDER]` (1,000 steps: four minutes of processor time; with a folder, each call makes one of
the six trainings that is not there yet, and the last puts them together; `float64`: the last comparison alone, half a minute). Text: the
sources of Python's standard library, the last tenth held out. Three seeds; for each the loss of held-out text at the end, and the mean of the last
fifth of the steps.
Then the same model in float64, dropless beside buffers padded to the largest demand (f = 0): 20 steps of Adam, losses and weights.
Targets: dropless not above dropping, in the mean over seeds; dropless equal to padded to 1e-12.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import experts
import machine

from meshwright.nn import Spread

STEPS, SEEDS, ROWS, SEQUENCE = 1000, (0, 1, 2), 8, 64
WAYS = {"dropless": (0.0, Spread(dropless="loop")), "dropping, f = 1": (1.0, Spread(choice=(1, 1, "linear")))}


def text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8).long()


def batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - SEQUENCE - 1, (ROWS,), generator=generator)
    rows = torch.stack([data[s : s + SEQUENCE + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, generator: torch.Generator) -> float:
    x, y = batch(data, generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def trained(seed: int, way: str, steps: int, data: torch.Tensor, held: torch.Tensor) -> dict[str, Any]:
    factor, spread = WAYS[way]
    torch.manual_seed(seed)
    model = experts.ExpertGPT(factor=factor, spread=spread)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator, losses, dropped, chosen = torch.Generator().manual_seed(seed), [], 0, 0
    begin = time.process_time()
    for _ in range(steps):
        losses.append(step(model, optimizer, data, generator))
        dropped += sum(b.experts.dropped for b in model.blocks)
        chosen += ROWS * SEQUENCE * sum(b.k for b in model.blocks)
    spent = time.process_time() - begin
    model.eval()
    generator, found = torch.Generator().manual_seed(99), []
    with torch.no_grad():
        for _ in range(16):
            x, y = batch(held, generator)
            found.append(float(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())))
    return {
        "what": f"{way}, seed {seed}", "steps": steps, "value": mean(found), "last_fifth_loss": mean(losses[-(steps // 5) :]),
        "dropped_share": dropped / chosen, "cpu_s": spent, "unit": "nats a byte, held out",
    }  # fmt: skip


def padded_apart(data: torch.Tensor, steps: int = 20) -> dict[str, Any]:
    """Losses and weights of dropless and padded training in float64: largest difference, over the largest of each tensor."""
    found = {}
    for way, spread in {"dropless": Spread(dropless="loop"), "padded, f = 0": Spread(choice=(1, 1, "linear"))}.items():
        torch.manual_seed(0)
        model = experts.ExpertGPT(factor=0.0, spread=spread).double()
        optimizer, generator, losses = torch.optim.Adam(model.parameters(), lr=2e-3), torch.Generator().manual_seed(0), []
        losses += [step(model, optimizer, data, generator) for _ in range(steps)]
        found[way] = losses, [p.detach() for p in model.parameters()]
    (a, b), (c, d) = found.values()
    first = abs(a[0] - c[0])
    losses = max(abs(x - y) for x, y in zip(a, c, strict=True))
    weights = max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(b, d, strict=True))
    return {"what": f"dropless beside padded f = 0, float64, {steps} steps", "value": losses, "unit": "nats, largest difference of a loss",
            "first_loss_apart": first, "weights_apart": weights, "limit": 1e-12}  # fmt: skip


def equal_alone() -> None:
    """The comparison in float64, which takes half a minute."""
    torch.set_num_threads(1)
    data = text()
    row = padded_apart(data[: len(data) * 9 // 10])
    print(f"{row['what']}: losses {row['value']:.1e}, weights {row['weights_apart']:.1e}")
    machine.record("expert_training_float64", [row], command="python benchmarks/expert_training.py float64")


def main() -> None:
    if sys.argv[1:] == ["float64"]:
        return equal_alone()
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    torch.set_num_threads(1)
    data = text()
    cut = len(data) * 9 // 10
    rows, folder = [], Path(sys.argv[2]) if len(sys.argv) > 2 else None
    for number, (seed, way) in enumerate((seed, way) for seed in SEEDS for way in WAYS):
        kept = folder / f"{number}.json" if folder is not None else None
        if kept is not None and kept.exists():
            rows.append(json.loads(kept.read_text()))
            continue
        rows.append(trained(seed, way, steps, data[:cut], data[cut:]))
        if kept is not None:
            kept.write_text(json.dumps(rows[-1]))
            if number + 1 < len(SEEDS) * len(WAYS):
                return
    for row in rows:
        print(f"{row['what']:<26} held out {row['value']:.4f}, last fifth {row['last_fifth_loss']:.4f}, "
              f"dropped {100 * row['dropped_share']:.1f} %, {row['cpu_s']:.0f} s")  # fmt: skip
    means = {way: mean(r["value"] for r in rows if r["what"].startswith(way)) for way in WAYS}
    print({way: round(x, 4) for way, x in means.items()})
    rows.append(padded_apart(data[:cut]))
    print(f"{rows[-1]['what']}: losses {rows[-1]['value']:.1e}, weights {rows[-1]['weights_apart']:.1e}")
    machine.record("expert_training", rows, steps=steps, means=means, target="dropless <= dropping")


if __name__ == "__main__":
    main()
