"""The nets of `cost_models.lookups`, trained on measured points: Adam, seeded, the weights that are best on points held back.

Cite: NeuroShard, MLSys 2023, section 3.3: 80 % of the points are learned from, on 10 % the best weights are chosen, on 10 % the errors are told.
Deviations: the loss is the mean relative error of a time (the paper: squared seconds), batches are of 128 points, the rate falls to nothing along a
cosine; the features of a point are summed by one matrix of zeros and ones. The floor is the largest additive cost that lies below all points but the
lowest `FLOOR_MISSED`, found by linear programming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ...cost_models.lookups import LookupCosts, Net, features, floor_terms
from ...graph.embeddings import Table, Tables, uniform_histogram
from ...kernels.highs import require_optimal, solver, values
from .compute import ComputePoints

__all__ = ["additive_errors", "columns_of", "fit_compute", "fit_exchange", "fit_floor", "split_points"]

F64 = NDArray[np.float64]
MEMBERS, HEAD, EXCHANGE = (128, 32), (64,), (128, 64, 32, 16)  # units of the card's nets
BATCH, RATE = 128, 3e-3
FLOOR_MISSED = 0.01  # share of points that may lie below the floor: measurements that were lucky


def columns_of(tables: Sequence[Table], widths: Sequence[int], batch: int) -> tuple[F64, F64, F64, F64]:
    """Rows, columns, pooling and histogram of (table, columns) pairs, as the nets read them."""
    histograms = np.array([t.histogram or uniform_histogram(t.rows, t.pooling * batch) for t in tables])
    return (
        np.array([t.rows for t in tables], float), np.array(widths, float), np.array([t.pooling for t in tables]), histograms
    )  # fmt: skip


def split_points(n: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Points to learn from, to choose by and to test on."""
    order = np.random.default_rng(seed).permutation(n).astype(np.int64)
    held = max(1, n // 10)
    return order[2 * held :], order[held : 2 * held], order[:held]


def _stack(sizes: Sequence[int], last_relu: bool = False) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers.append(torch.nn.Linear(a, b))
        if last_relu or i + 2 < len(sizes):
            layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers)


def _net(stack: torch.nn.Sequential, mean: F64, spread: F64, last_relu: bool = False) -> Net:
    linear = [m for m in stack if isinstance(m, torch.nn.Linear)]
    layers = tuple((m.weight.detach().double().numpy().T.copy(), m.bias.detach().double().numpy().copy()) for m in linear)
    return Net(mean, spread, layers, last_relu)


def _train(modules: Sequence[torch.nn.Module], losses: object, points: tuple[NDArray[np.int64], NDArray[np.int64]], epochs: int, seed: int) -> None:
    """Minimises `losses(indices)`; keeps the weights that are best on the second points."""
    learn, choose = (torch.from_numpy(p) for p in points)
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    best, kept = float("inf"), [p.detach().clone() for p in parameters]
    for _ in range(epochs):
        for part in learn[torch.randperm(len(learn), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            losses(part).backward()  # type: ignore[operator]
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            if (now := float(losses(choose))) < best:  # type: ignore[operator]
                best, kept = now, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)


def _relative(log2_s: torch.Tensor, log2_true: torch.Tensor) -> torch.Tensor:
    return (torch.exp2((log2_s - log2_true).clamp(-20, 20)) - 1).abs().mean()


def fit_compute(tables: Tables, points: ComputePoints, *, epochs: int = 300, seed: int = 0) -> LookupCosts:
    """The compute net and the floor; `errors["compute"]`: median relative error on points that it never saw."""
    torch.manual_seed(seed)
    pairs = sorted({pair for point in points.points for pair in point})
    at = {pair: i for i, pair in enumerate(pairs)}
    columns = columns_of([tables.tables[t] for t, _ in pairs], [w for _, w in pairs], tables.batch)
    x = features(*columns, tables.batch)
    mean, spread = x.mean(0), x.std(0) + 1e-6
    counts = np.zeros((len(points.points), len(pairs)))
    for row, point in enumerate(points.points):
        for pair in point:
            counts[row, at[pair]] += 1
    times = np.array(points.time_s)
    members, head = _stack((x.shape[1], *MEMBERS), last_relu=True), _stack((MEMBERS[-1], *HEAD, 1))
    scaled, sums = torch.tensor((x - mean) / spread, dtype=torch.float32), torch.tensor(counts, dtype=torch.float32)
    truth = torch.tensor(np.log2(times), dtype=torch.float32)
    with torch.no_grad():
        head[-1].bias.fill_(float(truth.mean()))

    def losses(part: torch.Tensor) -> torch.Tensor:
        return _relative(head(sums[part] @ members(scaled))[:, 0], truth[part])

    learn, choose, test = split_points(len(times), seed)
    _train((members, head), losses, (learn, choose), epochs, seed)
    floor, overhead_s = fit_floor(counts @ floor_terms(columns[1], columns[2], tables.batch), counts.sum(1), times)
    units = MEMBERS[-1]
    costs = LookupCosts(
        batch=tables.batch, floor=floor, overhead_s=overhead_s, table=_net(members, mean, spread, last_relu=True),
        device=_net(head, np.zeros(units), np.ones(units)),
        ranges={"rows": _range(columns[0]), "columns": _range(columns[1]), "pooling": _range(columns[2])},
    )  # fmt: skip
    found = costs.compute_s(counts[test] @ costs.embed(*columns))
    return replace(costs, errors={"compute": float(np.median(np.abs(found / times[test] - 1)))})


def _range(x: F64) -> tuple[float, float]:
    return float(x.min()), float(x.max())


def fit_floor(terms: F64, members: F64, times: F64) -> tuple[tuple[float, ...], float]:
    """Seconds per term and per table: of all additive costs that no point is below (but the luckiest), the one with the largest sum over points."""
    x = np.concatenate([terms, members[:, None]], 1)
    scale = x.mean(0)
    unit = float(times.mean())
    lucky = np.ones(len(times), bool)
    per = times / np.maximum((x / scale).sum(1), 1e-300)
    lucky[np.argsort(per)[: int(FLOOR_MISSED * len(times))]] = False
    model = solver()
    infinity = model.getInfinity()
    import highspy

    for k in range(x.shape[1]):
        model.addVar(0.0, infinity)
        model.changeColCost(k, float((x[lucky, k] / scale[k]).mean()))
    for row, t in zip(x[lucky] / scale, times[lucky] / unit, strict=True):
        model.addRow(-infinity, float(t), len(row), list(range(len(row))), row.tolist())
    model.changeObjectiveSense(highspy.ObjSense.kMaximize)
    require_optimal(model, what="the floor of lookups")
    found = np.maximum(values(model), 0.0) * unit / scale
    return tuple(found[:-1].tolist()), float(found[-1])


def fit_exchange(
    costs: LookupCosts, columns: F64, starts_s: F64, backward_s: F64, forward_s: F64, *, fabric: str, epochs: int = 400, seed: int = 0
) -> LookupCosts:  # fmt: skip
    """With both exchange nets, and their errors."""
    learn, choose, test = split_points(len(columns), seed)
    nets, errors = [], dict(costs.errors)
    for name, x, y in (("backward", columns, backward_s), ("forward", np.concatenate([columns, starts_s * 1e3], 1), forward_s)):
        torch.manual_seed(seed)
        mean, spread = x.mean(0), x.std(0) + 1e-6
        stack = _stack((x.shape[1], *EXCHANGE, y.shape[1]))
        scaled, truth = torch.tensor((x - mean) / spread, dtype=torch.float32), torch.tensor(np.log2(y), dtype=torch.float32)
        with torch.no_grad():
            stack[-1].bias.copy_(truth.mean(0))

        def losses(part: torch.Tensor, stack: torch.nn.Module = stack, scaled: torch.Tensor = scaled, truth: torch.Tensor = truth) -> torch.Tensor:
            return _relative(stack(scaled[part]), truth[part])

        _train((stack,), losses, (learn, choose), epochs, seed)
        nets.append(_net(stack, mean, spread))
        errors[name] = float(np.median(np.abs(np.exp2(nets[-1](x[test])) / y[test] - 1)))
    return replace(costs, backward=nets[0], forward=nets[1], fabric=fabric, devices=columns.shape[1], errors=errors)


def additive_errors(tables: Tables, points: ComputePoints, seed: int = 0) -> float:
    """Median relative error, on the same test points, of the best additive formula: least relative squares on lookups x columns, lookups, tables."""
    times = np.array(points.time_s)
    rows = []
    for point in points.points:
        chosen = [(tables.tables[t], w) for t, w in point]
        rows.append([
            sum(t.pooling * w for t, w in chosen), sum(t.pooling for t, _ in chosen), float(len(chosen)), sum(float(w) for _, w in chosen),
            sum(float(t.rows * w) for t, w in chosen), 1.0,
        ])  # fmt: skip
    x = np.array(rows)
    learn, choose, test = split_points(len(times), seed)
    used = np.concatenate([learn, choose])
    found, *_ = np.linalg.lstsq(x[used] / times[used, None], np.ones(len(used)), rcond=None)
    return float(np.median(np.abs(x[test] @ found / times[test] - 1)))
