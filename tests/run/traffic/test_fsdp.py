"""Compressed reduce-scatters under FSDP2 on real processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from traffic_rig import sharded

from meshwright.codec.codec import parse_codec
from meshwright.errors import UnknownName, Unsupported
from meshwright.run.traffic.fsdp import CompressedReduceScatter, compress_fsdp

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def plain(pool, tmp_path_factory):
    return pool.run(sharded, 2, 2, str(tmp_path_factory.mktemp("plain") / "store"), None, 4)


@pytest.mark.parametrize("codec", ["none", "topk:density=1.0", "fp16", "topk:density=0.3"])
def test_training_is_fsdps_own_where_nothing_is_lost_and_near_where_little_is(pool, tmp_path, plain, codec):
    found = pool.run(sharded, 2, 2, str(tmp_path / "store"), codec, 4)
    exact = codec in ("none", "topk:density=1.0")
    for (expected, _, _), (losses, steps, owed) in zip(plain, found, strict=True):
        assert losses == expected if exact else losses == pytest.approx(expected, rel=0.1)
        assert steps and set(steps) == {4}
        assert (owed > 0) == (codec == "topk:density=0.3")


def test_what_cannot_be_compressed_is_refused():
    with pytest.raises(Unsupported, match="whole matrices"):
        compress_fsdp(nn.Linear(2, 2), "powersgd")
    with pytest.raises(Unsupported, match="no module of it is sharded"):
        compress_fsdp(nn.Linear(2, 2), "topk")
    empty = torch.empty(0)
    with pytest.raises(Unsupported, match="is not compressed"):
        CompressedReduceScatter(parse_codec("topk"), "m")(empty, empty, None, torch.distributed.ReduceOp.MAX)
    with pytest.raises(UnknownName, match="no codec"):
        compress_fsdp(nn.Linear(2, 2), "zip")
