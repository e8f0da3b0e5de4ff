"""What a module kept whole costs may depend on values: batches of other sizes have what the first batch's rows cost, and sizes that rows do not have
are not learned from two samples of values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.capture.graph import capture
from meshwright.capture.regions import REGION
from meshwright.errors import Unsupported
from meshwright.graph.scale import at_batch

HERE = "tests/capture/test_kept_counts.py"


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.outside(torch.relu(self.inside(x)))


def queries():
    return Queries(), (torch.randn(8, 7, 6), torch.randn(8, 4, 5))


def set_loss(found, wanted):
    """Each wanted entry that there is takes the nearest of those found that no other took: how many there are depends on values."""
    total = 0.0
    for y, t in zip(found, wanted, strict=True):
        t = t[t[:, 0] > 0]
        rows: list[int] = []
        for one in t:
            near = (y - one).square().sum(1).detach()
            near[rows] = float("inf")
            rows.append(int(near.argmin()))
        total = total + (F.mse_loss(y[rows], t) if rows else 0.0 * y.sum()) + 0.1 * y.square().mean()
    return total / len(found)


def looped_loss(found, wanted):
    return sum(F.mse_loss(y, t.mean()) for y, t in zip(found, wanted, strict=True)) / len(found)  # looped


def share_loss(found, wanted):
    """Of shares alone, as a loss of boxes is."""
    if (wanted < 0).any() or (wanted > 1).any():
        raise ValueError("corners are shares of the picture")
    return F.mse_loss(found[:, :4], wanted) if wanted.sum() > -1e9 else found.sum()  # a choice, which keeps it whole


def quadratic_loss(found, wanted):
    """By values in form alone: all rows are compared with all."""
    return torch.cdist(found.flatten(1), wanted.flatten(1)[:, :1].expand(-1, 35)).mean() if found.sum() > -1e9 else found.sum()


def kept(loss):
    graph = capture(f"{HERE}:queries", loss=f"{HERE}:{loss}")
    at = {b: next(n for n in (graph if b == 8 else at_batch(graph, b)).nodes if n.target == REGION) for b in (8, 1, 2, 4, 24)}
    return {b: (n.forward.flops, n.forward.bytes_read, n.backward.bytes_written) for b, n in at.items()}


def test_counts_that_depend_on_values_are_those_of_the_first_batch_row_by_row():
    counts = kept("set_loss")
    assert min(counts[8][1:]) > 0
    assert all(counts[b] == tuple(b * x // 8 for x in counts[8]) for b in counts)


def test_counts_that_depend_on_the_batch_are_measured():
    eight, more = (capture(f"{HERE}:queries", loss=f"{HERE}:quadratic_loss", batch_size=b, scalable=b == 8) for b in (8, 16))
    costs = [next(n.forward.bytes_read for n in g.nodes if n.target == REGION) for g in (eight, at_batch(eight, 16), more)]
    assert costs[1] == costs[2] > 2 * costs[0]


def test_a_loop_over_samples_is_named_with_its_line():
    graph = capture(f"{HERE}:queries", loss=f"{HERE}:looped_loss")
    line = 1 + next(i for i, text in enumerate(Path(HERE).read_text().splitlines()) if text.endswith("# looped"))
    with pytest.raises(Unsupported, match=f"the calls differ between batch 8 and 16: .* in module 'loss' .*:{line}") as found:
        at_batch(graph, 4)
    assert "no Python loop over its samples" in found.value.hint


def test_samples_are_shares_where_other_numbers_do_not_do():
    graph = capture(f"{HERE}:queries", loss=f"{HERE}:share_loss", scalable=False)
    assert [n.module for n in graph.nodes if n.target == REGION] == ["loss"]
