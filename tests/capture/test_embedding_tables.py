"""Embedding bags of a user's model become tables: their sizes, lookups per sample and histograms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.capture.embedding_tables import tables_of_module
from meshwright.errors import CaptureError


class Model(nn.Module):
    def __init__(self, mode="sum"):
        super().__init__()
        self.flat, self.square, self.unseen = nn.EmbeddingBag(100, 8, mode=mode), nn.EmbeddingBag(50, 16, mode="mean"), nn.EmbeddingBag(5, 4)

    def forward(self, indices, offsets, square):
        return torch.cat([self.flat(indices, offsets), self.square(square)], 1)


def test_tables_of_a_model():
    indices = torch.tensor([7, 7, 7, 1, 2])
    found = tables_of_module(Model(), (indices, torch.tensor([0, 3, 3, 5]), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])), name="m")
    assert [(t.name, t.rows, t.dim, t.pooling, t.mode) for t in found.tables] == [
        ("flat", 100, 8, 1.25, "sum"), ("square", 50, 16, 2.0, "mean"), ("unseen", 5, 4, 1.0, "mean"),
    ]  # fmt: skip
    assert found.batch == 4 and found.tables[0].histogram[:3] == pytest.approx((2 / 3, 0, 1 / 3)) and found.tables[2].histogram == ()


def test_collections_of_torchrec_are_told_by_their_fields():
    class Config:
        name = "t1"

    class Collection(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding_bags = nn.ModuleDict({"t1": nn.EmbeddingBag(9, 4, mode="sum")})

        def embedding_bag_configs(self):
            return [Config()]

        def forward(self, x):
            return self.embedding_bags["t1"](x)

    found = tables_of_module(nn.Sequential(Collection()), (torch.tensor([[1, 2]]),))
    assert [(t.name, t.pooling) for t in found.tables] == [("0.embedding_bags.t1", 2.0)]


def test_refusals():
    with pytest.raises(CaptureError, match="has no EmbeddingBag"):
        tables_of_module(nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(CaptureError, match="takes the max"):
        tables_of_module(Model(mode="max"), (torch.tensor([1]), torch.tensor([0]), torch.tensor([[0, 1]])))
