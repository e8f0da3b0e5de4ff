"""Layers as published models write them, split over tensor-parallel ranks on real processes, against plain eager training."""

from __future__ import annotations

import pytest
from attention_models import KEPT_WHOLE, NAMES
from rig import graph_of
from tensor_rig import as_serial

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
MODELS = "tests/run/attention_models.py:"


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", NAMES)
def test_loss_gradients_and_bytes(pool, name):
    case, _ = as_serial(pool, name, (1, 2, 1), models=MODELS)
    split = {s.param for s in case.layout.shards}
    matrices = {p.name for p in graph_of(MODELS + name, 2, "cross-entropy").parameters if len(p.shape) > 1}
    assert matrices - split == KEPT_WHOLE.get(name, set())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["normed_grouped", "multi_query", "latent", "relative"])
def test_more_ranks_than_key_value_heads(pool, name):
    case, outcomes = as_serial(pool, name, (1, 4, 1), models=MODELS)
    assert case.layout.tensor == len(outcomes) == 4 and "attention.out.weight" in {s.param for s in case.layout.shards}
