"""The halo exchange: rows to bytes and back, and training on several workers equal to one process, or to PyTorch Geometric."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from halo_cases import NODES, gradients, graph_of, input_gradient, inputs, lost, refusals, shares_of, training

from effort import few
from meshwright.codec.rows import message_bytes, noise_factor
from meshwright.errors import NotFinite
from meshwright.run.halo import GraphNet
from meshwright.run.halo.messages import RowMessage, spreads


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(few(8)))
def test_rows_come_back_between_their_levels(seed):
    rng = np.random.default_rng(seed)
    dim, rows = int(rng.integers(1, 40)), int(rng.integers(1, 30))
    x = (rng.standard_normal((rows + 5, dim)) * 10.0 ** rng.integers(-6, 6, (rows + 5, 1)) + rng.integers(-3, 4)).astype(np.float32)
    widths, chosen = rng.choice([2, 4, 8, 32], rows), rng.permutation(rows + 5)[:rows]
    message = RowMessage(widths, dim)
    wire = message.encode(x, chosen, (seed, 1), "here")
    kinds, counts = np.unique(widths, return_counts=True)
    assert len(wire) == message.size_bytes == message_bytes(dict(zip(kinds.tolist(), counts.tolist(), strict=True)), dim)
    out = np.full((rows, dim), np.nan, np.float32)
    message.decode(wire, out)
    asked = x[chosen]
    assert (out[widths == 32] == asked[widths == 32]).all()
    step = np.sqrt(spreads(x, chosen)) / np.array([1 if b == 32 else 2.0**b - 1 for b in widths]) * (1 + 2.0**-6)
    assert (np.abs(out - asked) <= step[:, None] + np.abs(asked) * 1e-6 + 1e-30).all()
    assert (wire == message.encode(x, chosen, (seed, 1), "here")).all() and message.size_bytes == len(message.encode(x, chosen, (seed, 2), "here"))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_unbiased_with_the_stated_variance(bits):
    rng = np.random.default_rng(bits)
    x = (rng.standard_normal((64, 16)) + 0.7).astype(np.float32)
    message, rows = RowMessage(np.full(64, bits), 16), np.arange(64)
    times, out = 400, np.empty((64, 16), np.float32)
    error, square = np.zeros((64, 16)), 0.0
    for turn in range(times):
        message.decode(message.encode(x, rows, (turn,), "here"), out)
        error += out - x
        square += float(((out - x).astype(np.float64) ** 2).sum())
    stated = float(spreads(x, rows).sum()) * 16 / 6 * noise_factor(bits)
    assert square / times == pytest.approx(stated, rel=0.25), "a sixth of a step squared, where numbers lie anywhere between levels"
    deviation = np.sqrt(spreads(x, rows)[:, None]) / (2**bits - 1) / 2 / np.sqrt(times)  # at most, of a mean
    assert (np.abs(error / times) < 6 * deviation).all()


def test_constant_rows_come_back_as_bfloat16_has_them():
    x = np.array([[1.5] * 4, [0.0] * 4, [-2.0] * 4], np.float32)
    message = RowMessage(np.array([2, 4, 8]), 4)
    out = np.empty_like(x)
    message.decode(message.encode(x, np.arange(3), (0,), "here"), out)
    assert (out == x).all()


@pytest.mark.parametrize(("bits", "value"), [(4, np.nan), (8, np.inf), (32, np.nan), (2, -3.4e38)])
def test_rows_that_are_not_finite_are_refused(bits, value):
    x = np.ones((3, 4), np.float32)
    x[1, 2], x[1, 3] = value, 3.4e38
    with pytest.raises(NotFinite, match="local row 1"):
        RowMessage(np.full(3, bits), 4).encode(x, np.arange(3), (0,), "forward0")


# ---- training ----------------------------------------------------------------------------------------------------------
def alone(model):
    """Loss and gradients of one process, by dense matrices."""
    graph, (x, labels) = graph_of(model), inputs()
    matrix = torch.zeros(NODES, NODES)
    weights = torch.from_numpy(graph.coefficients("gcn" if model == "gcn" else "mean"))
    matrix.index_put_((torch.from_numpy(graph.rows), torch.from_numpy(graph.indices)), weights, accumulate=True)
    net = GraphNet(training(model), shares_of(model, 1)[0])
    for k, layer in enumerate(net.layers):
        own = 0 if layer.own is None else layer.own(x)
        x = layer.lin(matrix @ x) + own
        x = torch.relu(x) if k < 2 else x
    loss = torch.nn.functional.cross_entropy(x, labels, reduction="sum")
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.reshape(-1) for p in net.parameters()]).double().numpy(), x.detach().numpy()


def together(found):
    return sum(r["loss"] for r in found), sum(r["gradient"] for r in found)


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_several_workers_train_as_one_process_does(pool, model):
    loss, gradient, _ = alone(model)
    for workers, empty in ((2, False), (4, False), (3, True)):
        got = together(pool.run(gradients, workers, model, workers, 32, 1, empty))
        assert got[0] == pytest.approx(loss, rel=1e-5) and np.abs(got[1] - gradient).max() <= 1e-5 * np.abs(gradient).max()


def test_any_module_gets_the_gradient_of_what_it_did(pool):
    shares, x = shares_of("sage", 3), inputs()[0].double().requires_grad_()
    total = sum((x[torch.from_numpy(s.nodes)].sum(0) * torch.arange(1.0, 7.0)).prod() for s in shares)
    total.backward()
    for share, got in zip(shares, pool.run(input_gradient, 3, 3), strict=True):
        assert got == pytest.approx(x.grad.numpy()[share.nodes[: share.own]], rel=1e-3, abs=1e-3)


def test_planned_bits_are_unbiased_and_their_bytes_counted(pool):
    _, gradient, _ = alone("sage")
    found = pool.run(gradients, 3, "sage", 3, 8, 12)
    assert np.abs(together(found)[1] - gradient).max() <= 0.02 * np.abs(gradient).max()
    shares, job = shares_of("sage", 3), training("sage")
    for (name, src, dst), counted in ((key, n) for r in found for key, n in r["sent"].items()):
        rows = len(shares[src].send[dst]) if name.startswith("forward") else len(shares[dst].send[src])
        assert counted == 12 * message_bytes({8: rows}, job.dims[int(name[-1])])
    assert {key[0] for r in found for key in r["sent"]} == {name for name, _, _ in job.exchanges}, "no gradient goes back to the input"


def test_what_does_not_fit_is_refused(pool):
    for said in pool.run(refusals, 2):
        kinds = [text.partition(":")[0] for text in said]
        assert kinds == ["unsupported", "unsupported", "plan-mismatch", "plan-mismatch"], said


def test_a_worker_that_never_answers_ends_in_an_error(pool):
    said = pool.run(lost, 2)[0]
    assert said.startswith(("group-failed: forward0 on worker 0", "run-timeout: forward0 on worker 0"))


def test_equal_to_pytorch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    for model in ("gcn", "sage"):
        graph, (x, _) = graph_of("sage"), inputs()
        ends = torch.from_numpy(np.stack([graph.indices, graph.rows]))
        net = GraphNet(training(model), shares_of(model, 1)[0])
        theirs = x
        for k, layer in enumerate(net.layers):
            dims = layer.lin.in_features, layer.lin.out_features
            peer = geometric.GCNConv(*dims) if model == "gcn" else geometric.SAGEConv(*dims)
            with torch.no_grad():
                (peer.lin if model == "gcn" else peer.lin_l).weight.copy_(layer.lin.weight)
                (peer.bias if model == "gcn" else peer.lin_l.bias).copy_(layer.lin.bias)
                if model == "sage":
                    peer.lin_r.weight.copy_(layer.own.weight)
            theirs = peer(theirs, ends)
            theirs = torch.relu(theirs) if k < 2 else theirs
        assert np.abs(alone(model)[2] - theirs.detach().numpy()).max() < 1e-5
