"""K-FAC against per-sample gradients, the exact natural gradient, another implementation, and itself in pieces."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.errors import FormatError, RunError, UsageError
from meshwright.second_order import KFAC, Conventions, Refresh
from meshwright.second_order.capture import linear_layers
from meshwright.second_order.factors import damped_inverse, damping_split, pack, unpack

D = torch.float64


def model(seed: int = 0, dims: tuple[int, ...] = (5, 7, 4)) -> nn.Sequential:
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(dims):
        parts += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*parts[:-1]).to(D)


def batch(n: int = 12, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, 5, dtype=D), torch.randint(4, (n,))


def kfac(net: nn.Module, **options: Any) -> KFAC:
    return KFAC(net, torch.optim.SGD(net.parameters(), lr=options.pop("lr", 0.1)), **options)


def factors(optimizer: KFAC) -> list[torch.Tensor]:
    return [f for x in optimizer.layers.values() for f in (x.input_factor, x.gradient_factor) if f is not None]


def close(a: Any, b: Any, rel: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=rel, atol=rel)


# ---- factors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_factors_equal_per_sample_gradients(reduction: str) -> None:
    net, (x, y) = model(), batch()
    parameters = {k: v.detach() for k, v in net.named_parameters()}

    def loss_of_one(p: dict[str, torch.Tensor], xi: torch.Tensor, yi: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(net, p, (xi.unsqueeze(0),)), yi.unsqueeze(0))

    per_sample = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(parameters, x, y)
    optimizer = kfac(net, lr=0.0, conventions=Conventions(reduction=reduction), decay=0.0)
    F.cross_entropy(net(x), y, reduction=reduction).backward()
    optimizer.step()
    a = x
    for name, layer in optimizer.layers.items():
        e = per_sample[f"{name}.bias"]  # the gradient of a bias is that of the output
        ones = torch.cat([a, torch.ones(len(a), 1, dtype=D)], 1)
        close(layer.input_factor, ones.T @ ones / len(x))
        close(layer.gradient_factor, e.T @ e / len(x))
        close(per_sample[f"{name}.weight"], torch.einsum("ni,nj->nij", e, a))
        a = torch.tanh(a @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]) if name == "0" else a


def test_one_sample_gives_the_exact_fisher_block() -> None:
    net, (x, y) = model(), batch(1)
    optimizer = kfac(net, lr=0.0)
    F.cross_entropy(net(x), y).backward()
    g = torch.cat([net[0].weight.grad, net[0].bias.grad.unsqueeze(1)], 1)
    optimizer.step()
    layer = optimizer.layers["0"]
    close(torch.kron(layer.gradient_factor, layer.input_factor), torch.outer(g.flatten(), g.flatten()))


@pytest.mark.parametrize("cut", [(12,), (4, 4, 4), (1, 5, 6), (2, 10)])
def test_micro_batches_and_replicas_do_not_matter(cut: tuple[int, ...]) -> None:
    whole, (x, y) = kfac(net := model()), batch()
    F.cross_entropy(net(x), y).backward()
    whole.step()
    replicas = [kfac(model(), conventions=Conventions(scale=1 / 3)) for _ in range(2)]
    at = 0
    for m, n in enumerate(cut):  # micro-batches of different sizes, shared out to two replicas
        own = replicas[m % 2]
        net = own.layers["0"].module, own.layers["2"].module
        out = net[1](torch.tanh(net[0](x[at : at + n])))
        (F.cross_entropy(out, y[at : at + n]) / 3).backward()
        at += n
    for own in replicas:
        for name in own.layers:
            own.curvature(name, "input")
            own.curvature(name, "gradient")
    for name, layer in replicas[0].layers.items():
        for what in ("input", "gradient"):
            layer.take_sum(what, layer.packed_sum(what) + replicas[1].layers[name].packed_sum(what))
        layer.average(0.95)
    for f, g in zip(factors(replicas[0]), factors(whole), strict=True):
        close(f, g)


def test_sequences_count_tokens_or_samples() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False).to(D)
    net = nn.Sequential(layer)
    x = torch.randn(4, 6, 3, dtype=D)
    for terms, of_terms in (("rows", 24), ("samples", 4)):
        optimizer = kfac(net, lr=0.0, conventions=Conventions(terms=terms))
        losses = net(x).square().sum(-1)
        (losses.mean() if terms == "rows" else losses.sum(1).mean()).backward()
        optimizer.step()
        e = 2 * net(x).detach().reshape(-1, 2)
        close(optimizer.layers["0"].input_factor, x.reshape(-1, 3).T @ x.reshape(-1, 3) / 24)
        close(optimizer.layers["0"].gradient_factor, e.T @ e / of_terms)
        optimizer.close()


@pytest.mark.parametrize("tokens", [0, 3])
def test_factors_equal_those_of_curvlinops(tokens: int) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    from curvlinops_factors import factors_of

    net = model(dims=(5, 7, 6, 4))
    torch.manual_seed(2)
    shape = (8, tokens) if tokens else (24,)
    x, y = torch.randn(*shape, 5, dtype=D), torch.randint(4, shape)
    optimizer = kfac(net, lr=0.0)
    F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    optimizer.close()
    for name, (a, b) in factors_of(curvlinops, net, x, y).items():
        close(optimizer.layers[name].input_factor, a, 1e-8)
        close(optimizer.layers[name].gradient_factor, b, 1e-8)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_count_once(reentrant: bool) -> None:
    (x, y), plain, again = batch(), kfac(a := model()), kfac(b := model())
    x.requires_grad_()
    F.cross_entropy(a(x), y).backward()
    F.cross_entropy(b[2](checkpoint(b[:2], x, use_reentrant=reentrant)), y).backward()
    plain.step()
    again.step()
    assert [x.rows for x in again.layers.values()] == [0, 0]
    for f, g in zip(factors(plain), factors(again), strict=True):
        close(f, g)


def test_uses_of_one_layer_add_up_and_a_second_walk_through_the_graph_does_not() -> None:
    net = model(dims=(5, 5))
    optimizer = kfac(net, lr=0.0)
    x = batch()[0]
    y = net(torch.tanh(net(x)))
    loss = y.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.curvature("0", "input")
    optimizer.curvature("0", "gradient")
    assert optimizer.layers["0"].rows == 24 and optimizer.layers["0"].terms == 24 and optimizer.capture.held_bytes() == 0


def test_what_is_not_trained_leaves_nothing() -> None:
    net, (x, y) = model(), batch()
    optimizer = kfac(net)
    with torch.no_grad():
        net(x)
    net.eval()
    net(x)
    net.train()
    with optimizer.without_capture():
        net(x)
    assert optimizer.capture.held_bytes() == 0
    net(x)  # no backward comes
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    close(optimizer.layers["0"].input_factor[-1, -1].item(), 1.0)
    assert optimizer.capture.held_bytes() == 0


# ---- damping and inverses --------------------------------------------------------------------------------------------
def test_damping_is_split_by_mean_eigenvalues() -> None:
    a, b = torch.diag(torch.tensor([1.0, 3.0], dtype=D)), torch.diag(torch.tensor([0.1, 0.2, 0.3], dtype=D))
    pi = math.sqrt(2.0 / 0.2)
    assert damping_split(a, b, 1e-2) == pytest.approx((0.1 * pi, 0.1 / pi))
    assert damping_split(a, b * 0, 1e-2) == pytest.approx((0.1, 0.1)) and damping_split(a, b, 1e-30) == (1e-7, 1e-7)
    assert damping_split(a, torch.tensor([0.1, 0.2, 0.3]), 1e-2) == pytest.approx((0.1 * pi, 0.1 / pi))


def test_an_inverse_that_fails_gets_more_damping() -> None:
    bad = torch.diag(torch.tensor([1.0, -0.5], dtype=D))
    inverse, gamma = damped_inverse(bad, 1e-3, where="x")
    assert gamma == pytest.approx(1.0) and float(inverse[1, 1]) == pytest.approx(1 / (gamma - 0.5))
    with pytest.raises(RunError, match="cannot be inverted"):
        damped_inverse(bad * 1e9, 1e-3, where="x")
    with pytest.raises(RunError, match="not finite") as found:
        damped_inverse(bad * math.inf, 1e-3, where="layer 3")
    assert found.value.where == "layer 3"


def test_triangles_hold_everything() -> None:
    f = torch.randn(6, 6, dtype=D)
    f = f + f.T
    assert pack(f).numel() == 21 and torch.equal(unpack(pack(f), f.shape), f) and torch.equal(unpack(pack(f[0]), f[0].shape), f[0])


def test_a_zero_factor_is_not_inverted() -> None:
    net, (x, _) = model(), batch()
    optimizer = kfac(net, lr=0.1)
    before = copy.deepcopy(net.state_dict())
    (net(x).sum() * 0).backward()
    optimizer.step()
    assert optimizer.layers["0"].input_inverse is None and all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_large_outputs_keep_a_diagonal() -> None:
    net, (x, y) = model(), batch()
    whole, cut = kfac(net, lr=0.0), kfac(net, lr=0.0, diagonal_above=6)
    F.cross_entropy(net(x), y).backward()
    g = net[0].weight.grad.clone(), net[0].bias.grad.clone()
    whole.step()
    net[0].weight.grad.copy_(g[0])
    net[0].bias.grad.copy_(g[1])
    cut.step()
    b = cut.layers["0"].gradient_factor
    close(b, whole.layers["0"].gradient_factor.diagonal())
    gamma_a, gamma_b = damping_split(cut.layers["0"].input_factor, b, 1e-3)
    a = torch.linalg.inv(cut.layers["0"].input_factor + gamma_a * torch.eye(6, dtype=D))
    close(net[0].weight.grad, ((torch.cat([g[0], g[1].unsqueeze(1)], 1) / (b + gamma_b).unsqueeze(1)) @ a)[:, :-1])


def test_the_natural_gradient_of_a_linear_gaussian_model() -> None:
    """Fisher = A ⊗ I exactly. Gradients of unit terms stand for the model's own distribution; the damping is as good as none."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 3)).to(D)
    x, y = torch.randn(30, 4, dtype=D), torch.randn(30, 3, dtype=D)
    optimizer = kfac(net, lr=1.0, damping=1e-30, deferred=True)
    for c in range(3):
        net(x)[:, c].mean().backward()
    optimizer.curvature("0", "input")
    optimizer.curvature("0", "gradient")
    layer = optimizer.layers["0"]
    layer.terms //= 3  # three passes over the same rows, one per output
    optimizer.average("0")
    close(layer.gradient_factor, torch.eye(3, dtype=D))
    optimizer.invert("0", "input")
    optimizer.invert("0", "gradient")
    optimizer.zero_grad()
    with optimizer.without_capture():
        (0.5 * (net(x) - y).square().sum(1).mean()).backward()
    a = torch.cat([x, torch.ones(30, 1, dtype=D)], 1)
    fisher = torch.kron(torch.eye(3, dtype=D), a.T @ a / 30)
    g = torch.cat([net[0].weight.grad, net[0].bias.grad.unsqueeze(1)], 1).flatten()
    before = torch.cat([net[0].weight, net[0].bias.unsqueeze(1)], 1).flatten().detach().clone()
    optimizer.step()
    after = torch.cat([net[0].weight, net[0].bias.unsqueeze(1)], 1).flatten().detach()
    close(before - after, torch.linalg.solve(fisher, g), 1e-5)
    close(after.reshape(3, 5).T, torch.linalg.lstsq(a, y).solution, 1e-5)  # one step to the least-squares solution


# ---- the optimizer ---------------------------------------------------------------------------------------------------
def test_refresh() -> None:
    assert [s for s in range(17) if Refresh(every=4, first=8).due(s)] == [*range(8), 11, 15]
    assert [s for s in range(9) if Refresh(every=4).due(s)] == [0, 4, 8]
    with pytest.raises(UsageError, match="every 0"):
        Refresh(every=0)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, y = batch(32)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    return seen


def test_it_trains_faster_than_its_base_and_schedulers_reach_the_base() -> None:
    sgd = train(a := model(), torch.optim.SGD(a.parameters(), lr=0.3), 30)
    optimizer = kfac(b := model(), lr=0.3, damping=1e-2)
    assert train(b, optimizer, 30)[-1] < 0.5 * sgd[-1]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    train(b, optimizer, 1)
    scheduler.step()
    assert optimizer.base.param_groups[0]["lr"] == pytest.approx(0.03)


def test_state_goes_through_a_file(tmp_path: Path) -> None:
    optimizer = kfac(net := model(), inverses=Refresh(every=3))
    train(net, optimizer, 4)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt")
    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    other = model(5)
    other.load_state_dict(saved["net"])
    resumed = kfac(other, inverses=Refresh(every=3))
    resumed.load_state_dict(saved["optimizer"])
    assert train(other, resumed, 4) == train(net, optimizer, 4)
    with pytest.raises(FormatError, match="no state"):
        resumed.load_state_dict({"state": {}})
    with pytest.raises(FormatError, match="other layers"):
        kfac(model(dims=(5, 4))).load_state_dict(saved["optimizer"])


def test_pieces_give_what_the_step_gives() -> None:
    (x, y), whole, pieces = batch(), kfac(a := model()), kfac(b := model(), deferred=True, conventions=Conventions(scale=0.5))
    F.cross_entropy(a(x), y).backward()
    whole.step()
    losses = []
    for m in (0, 1):  # both forwards before either backward, as in a pipeline
        pieces.microbatch = m
        losses.append(F.cross_entropy(b(x[6 * m : 6 * m + 6]), y[6 * m : 6 * m + 6]) / 2)
    assert pieces.curvature("0", "input", 1) == 1 and pieces.curvature("0", "input", 1) == 0 and pieces.curvature("0", "gradient", 0) == 0
    for loss in losses:
        loss.backward()
    for m in (1, 0):
        for name in pieces.layers:
            assert pieces.curvature(name, "gradient", m) == 1
            pieces.curvature(name, "input", m)
    assert pieces.capture.held_bytes() == 0
    for name in pieces.layers:
        pieces.average(name)
        pieces.invert(name, "input")
        pieces.invert(name, "gradient")
    pieces.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        close(p, q)


def test_clipping() -> None:
    net, (x, y) = model(), batch()
    optimizer = kfac(net, clip_norm=1e-3)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    assert math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters())) == pytest.approx(1e-3, rel=1e-2)


def test_which_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Linear(3, 3)
            self.block = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
            self.pooler = nn.Sequential(nn.Linear(3, 3))
            self.lm_head = nn.Linear(3, 3)
            self.table = nn.Embedding(3, 3)

    net = Net()
    net.block[2].weight.requires_grad_(False)
    net.block[3].weight = net.table.weight
    assert list(linear_layers(net)) == ["block.0", "block.4"] and "lm_head" in linear_layers(net, ())
    with pytest.raises(UsageError, match="no Linear layer"):
        linear_layers(net, ("*",))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"damping": 0.0}, "damping"), ({"decay": 1.0}, "decay"), ({"clip_norm": 0.0}, "clip_norm"), ({"conventions": {"reduction": "x"}}, "reduction"),
     ({"conventions": {"terms": "x"}}, "terms"), ({"conventions": {"scale": 0}}, "scale")],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as found:
        kfac(model(), **{k: Conventions(**v) if k == "conventions" else v for k, v in options.items()})
    assert found.value.where == says


def test_the_base_must_have_the_parameters_and_layers_have_names() -> None:
    net = model()
    with pytest.raises(UsageError, match="does not have the parameters of 2"):
        KFAC(net, torch.optim.SGD(net[0].parameters(), lr=0.1))
    with pytest.raises(UsageError, match="no layer 'x'"):
        kfac(net).curvature("x", "input")
