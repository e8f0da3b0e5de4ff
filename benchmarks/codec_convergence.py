"""Final loss with every gradient codec that promises the dense one: digits and a byte-level language model, 4 workers, mean of 5 seeds.

Run: `pip install --no-deps scikit-learn scipy joblib threadpoolctl narwhals`, then `python benchmarks/codec_convergence.py` (`--quick`: one seed,
few steps; `--model`, `--codec` for one of them).

Digits: scikit-learn's 1,797 images, all of them; network 64-128-128-10 with tanh, cross-entropy with labels smoothed by 0.1 (its least
value is 0.500 nats, so that the ratio is not one of two numbers near 0). Language model: bytes of Python's own standard library
(`run/train/data.py`), windows of 16 bytes; embedding, one hidden layer, next byte. SGD with momentum 0.9, cosine decay of the learning rate to 0,
the same steps, samples and starts for every codec. DGC's momentum is its own, its optimizer has none and twice the learning rate, its warm-up
of densities (a tenth of the steps) counts. The gradients of all layers are one group. The final loss is taken over a fixed set (digits: all
images; text: 4,096 windows that training does not visit).
The learning rates are moderate: a gradient that waits about 1/density steps in the residual must still be of use. At ten times the rate of the
text trial the dense loss is lower and sparse codecs at density 0.01 end 2 to 5 % above it (`--rate`).
The workers live in one process (`testing/codecs_together.py`), which computes what processes compute; tests hold the two equal bit for bit for two.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import machine
import torch
from kfac import digits
from torch import nn

from meshwright.codec.codec import CodecSpec, parse_codec
from meshwright.codec.kinds import CODECS
from meshwright.run.codecs import make_codec
from meshwright.run.train.data import ByteWindows, python_source
from meshwright.testing.codecs_together import mean_together

WORKERS = 4
SEEDS = (0, 1, 2, 3, 4)
LIMIT = 1.01  # of the dense loss
OPTIONS = {"dgc": "dgc:warmup={warmup}"}
DGC_RATE = 2.0  # factor masking ends momenta early: DGC's steps are shorter than those of as large a momentum in the optimizer

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """`batch(seed, step, worker)`: what a worker trains on; `last`: what the final loss is taken over."""

    network: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    last: Batch
    steps: int
    rate: float
    smoothing: float = 0.0  # of labels

    def loss(self, net: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1], label_smoothing=self.smoothing)


def digits_trial(steps: int) -> Trial:
    x, y = digits()
    x = x.float()

    def batch(seed: int, step: int, worker: int) -> Batch:
        rows = torch.randint(0, len(x), (64,), generator=torch.Generator().manual_seed((seed * 100_003 + step) * WORKERS + worker))
        return x[rows], y[rows]

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))

    return Trial(network, batch, (x, y), steps, 0.03, smoothing=0.1)


def text_trial(steps: int) -> Trial:
    windows = ByteWindows(python_source(2_000_000), 16)

    def read(indices: range) -> Batch:
        """What `windows.sample` gives for these, at once."""
        starts = torch.tensor(indices) * windows.stride % windows.places
        rows = windows.text[starts[:, None] + torch.arange(17)].to(torch.int64)
        return rows[:, :-1], rows[:, -1]

    first = 4096

    def batch(seed: int, step: int, worker: int) -> Batch:
        start = first + ((seed * steps + step) * WORKERS + worker) * 64
        return read(range(start, start + 64))

    def network() -> nn.Module:
        return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 256))

    return Trial(network, batch, read(range(first)), steps, 0.02)


def final_loss(trial: Trial, spec: CodecSpec, seed: int) -> float:
    """Train with this codec; the loss over `trial.last` afterwards."""
    torch.manual_seed(seed)
    net = trial.network()
    parameters = list(net.parameters())
    shapes = [tuple(p.shape) for p in parameters]
    sizes = [p.numel() for p in parameters]
    codec = make_codec(spec, shapes, name="all")
    states = [codec.new_state() for _ in range(WORKERS)]
    momentum, rate = (0.0, DGC_RATE * trial.rate) if spec.name == "dgc" else (0.9, trial.rate)
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, trial.steps)
    for step in range(trial.steps):
        gradients = []
        for worker in range(WORKERS):
            found = torch.autograd.grad(trial.loss(net, trial.batch(seed, step, worker)), parameters)
            gradients.append(torch.cat([g.reshape(-1) for g in found]))
        mean = mean_together(codec, gradients, states, step)
        for p, g in zip(parameters, mean.split(sizes), strict=True):
            p.grad = g.view(p.shape)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(trial.loss(net, trial.last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a fifth of the steps; nothing is written")
    parser.add_argument("--model", choices=("digits", "text"))
    parser.add_argument("--codec", help="one codec, with options")
    parser.add_argument("--rate", type=float, help="another learning rate; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    for model, make, steps in (("digits", digits_trial, 2000), ("text", text_trial, 3000)):
        if given.model not in (None, model):
            continue
        steps = steps // 5 if given.quick else steps
        trial = make(steps)
        trial = replace(trial, rate=given.rate or trial.rate)
        texts = [OPTIONS.get(k.name, k.name).format(warmup=steps // 10) for k in CODECS if k.keeps_loss]
        dense = math.nan
        for text in [t for t in texts if not given.codec or t == "none"] + ([given.codec] if given.codec else []):
            start = time.perf_counter()
            losses = [final_loss(trial, parse_codec(text), seed) for seed in (SEEDS[:1] if given.quick else SEEDS)]
            loss = statistics.fmean(losses)
            dense = loss if text == "none" else dense
            raw.append({"model": model, "codec": text, "steps": steps, "losses": losses})
            rows.append({
                "what": f"{model}, {text}: mean final loss", "value": round(loss, 5), "unit": "nats", "limit": round(dense * LIMIT, 5),
                "of_dense": round(loss / dense, 4), "steps": steps,
            })  # fmt: skip
            print(f"{model:7s} {text:24s} {loss:.5f}  {loss / dense:.4f} of dense  {time.perf_counter() - start:6.1f} s", flush=True)
    if not (given.quick or given.codec or given.model or given.rate):
        machine.record("codec_convergence", rows, raw=raw, workers=WORKERS, seeds=list(SEEDS))
    print(json.dumps({"worst_of_dense": max(r["of_dense"] for r in rows)}))


if __name__ == "__main__":
    main()
