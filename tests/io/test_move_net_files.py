"""Nets of moves in files: out and in, and every refusal."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.cost_models.moves import LAYERS, MoveNet
from meshwright.errors import FormatError, UsageError
from meshwright.io.costs.moves import read_move_net, write_move_net
from meshwright.io.costs.tensors import write_tensors
from meshwright.io.limits import MaxBytes

SHAPES = {f"{n}.weight": s for n, s in LAYERS.items()} | {f"{n}.bias": s[:1] for n, s in LAYERS.items()}
HEAD = {"schema": "meshwright.move-net", "version": 1, "facts": {"episodes": 3.0}}


def weights():
    r = np.random.default_rng(0)
    return {n: r.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}


def test_what_is_written_is_read(tmp_path):
    net = MoveNet(weights(), {"episodes": 3.0})
    write_move_net(tmp_path / "a", net)
    write_move_net(tmp_path / "b", net)
    again = read_move_net(tmp_path / "a")
    assert again.digest == net.digest and again.trained == net.trained and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("tensors", "head", "says"),
    [
        ({"node.0.bias": None}, {}, "'node.0.bias' is missing"), ({"more": np.zeros(1, np.float32)}, {}, "'more' is unknown"),
        ({"score.1.weight": np.zeros((1, 17), np.float32)}, {}, "is no"), ({"score.1.bias": np.full(1, np.nan, np.float32)}, {}, "finite"),
        ({"score.1.bias": np.zeros(1, np.float64)}, {}, "float32"), ({}, {"schema": "meshwright.lookup-costs"}, "expected 'meshwright.move-net'"),
        ({}, {"version": 2}, "version 2"), ({}, {"facts": {"episodes": "many"}}, "facts"),
    ],
)  # fmt: skip
def test_refusals(tmp_path, tensors, head, says):
    made = {n: x for n, x in (weights() | tensors).items() if x is not None}
    write_tensors(tmp_path / "x", made, HEAD | head)
    with pytest.raises(FormatError, match=says):
        read_move_net(tmp_path / "x")


def test_what_is_no_net(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_move_net(tmp_path / "none")
    for data in (b"", b"\x08\0\0\0\0\0\0\0{}      ", json.dumps(HEAD).encode(), b"\xff" * (MaxBytes.MOVE_NET + 1)):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(FormatError):
            read_move_net(tmp_path / "x")
