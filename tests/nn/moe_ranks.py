"""What ranks do in `test_layer`: functions of (rank, group, ...) that give plain data."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import MeshwrightError
from meshwright.nn import FeedForward, GatedFeedForward, ModuleExpert, MoELayer

H, F = 6, 8
TOKENS = (11, 7, 0, 13)  # of every rank: unlike, and one without


def form_of(name: str) -> Any:
    if name == "gated":
        return GatedFeedForward(H, F)
    if name == "module":
        return ModuleExpert(lambda: torch.nn.Sequential(torch.nn.Linear(H, 5), torch.nn.Tanh(), torch.nn.Linear(5, H)), H)
    return FeedForward(H, F, output=4 if name == "narrow" else 0)


def layer_of(group: Any, name: str, experts: int, **more: Any) -> MoELayer:
    torch.manual_seed(5)
    return MoELayer(form_of(name), experts, group=group, seed=3, **more).double()


def inputs(rank: int, tokens: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(tokens, H, generator=g, dtype=torch.float64), torch.randn(tokens, H, generator=g, dtype=torch.float64)


def step_of(layer: MoELayer, rank: int, **more: Any) -> dict[str, Any]:
    x, weights = inputs(rank, TOKENS[rank])
    x.requires_grad_()
    for p in layer.parameters():
        p.grad = None
    y = layer(x, **more)
    ((y * weights[:, : y.shape[1]]).sum() + layer.l_aux).backward()
    none = torch.zeros(0)
    return {
        "y": y.detach().numpy(), "x": x.grad.numpy(), "slices": (none if layer.slices.grad is None else layer.slices.grad).numpy(),  # type: ignore[union-attr]
        "whole": (none if layer.whole.grad is None else layer.whole.grad).numpy(), "router": layer.router.linear.weight.grad.numpy(),
        "l_aux": layer.l_aux.item(), "capacity": layer.capacity, "dropped": layer.dropped, "counts": layer.dispatch_count.tolist(),  # type: ignore[union-attr]
    }


def every_choice(rank: int, group: Any, name: str, experts: int, options: dict[str, Any], choices: list[Any]) -> list[dict[str, Any]]:
    found = []
    layer = layer_of(group, name, experts, fabric="two-islands" if group.size() == 4 else None, choice=choices[0], **options)
    layer.alignment = 4 * layer.shape.shares
    for choice in choices:
        layer.choice = type(layer.choice)(*choice)
        for _ in range(2):  # the second time on programs and buffers that were used before
            one = step_of(layer, rank)
        found.append(one)
    return found


def searching(rank: int, group: Any, steps: int, given: bool) -> dict[str, Any]:
    """given: what the clock of each rank says, unlike at both; half way the second choice of degree 1 gets slow, at rank 1 alone."""
    layer = layer_of(group, "plain", 1, k=1, chunks=(1, 2), window=1000)
    took = layer.runner.on_time
    times = {tuple(c): (1.0 + i, 4.0 - i / 2)[rank] for i, c in enumerate(layer.searches[True].candidates)}
    first = dict(times)
    if given:
        layer.runner.on_time = lambda choice, capacity, time_s, which: took(choice, capacity, times[tuple(choice)], which)
    used = []
    for step in range(steps):
        if step == steps // 2 and rank == 1:
            times[1, 2, "linear"] *= 10
        x, _ = inputs(rank, 8, step)
        layer(x).square().sum().backward()
        used.append(tuple(layer.used))
    with torch.no_grad():
        layer(inputs(rank, 8)[0])
    return {"times": first, "used": used, "settled": {k: tuple(v) for k, v in layer.searches[True].settled.items()}}


def refused(rank: int, group: Any, what: str) -> tuple[str, str]:
    """The kind and text of the error at every rank, and that the layer still works afterwards."""
    layer = layer_of(group, "plain", 2, k=2, choice=(1, 1, "linear"))
    x, _ = inputs(rank, 4)
    more: dict[str, Any] = {}
    if what == "nan" and rank == 1:
        x[2, 3] = float("nan")
    if what == "k":
        more["k"] = 1 + rank
    if what == "factor":
        more["capacity_factor"] = 1.0 + rank
    if what == "all k":
        more["k"] = 3
    if what == "zero":
        more["capacity_factor"] = 0.01
    if what == "router" and rank == 0:
        layer.router.linear = torch.nn.Linear(H, 3, bias=False).double()
    if what == "both routers":
        layer.router.linear = torch.nn.Linear(H, 3, bias=False).double()
    try:
        layer(x, **more)
    except MeshwrightError as error:
        if "router" not in what:
            assert layer(inputs(rank, 4)[0]).shape == (4, H)
        return type(error).__name__, str(error)
    return "", ""


def lost(rank: int, group: Any, options: dict[str, Any]) -> str:
    """Rank 1 leaves within a step: the others hear of it."""
    layer = layer_of(group, "plain", 2, choice=(1, 1, "linear"), **options)
    layer(inputs(rank, 4)[0])
    if rank == 1:
        layer.runner.run_experts = layer.form.run_rows = _leave
    try:
        layer(inputs(rank, 4)[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _leave(*_: Any) -> torch.Tensor:
    raise ValueError("rank 1 breaks")


def saved(rank: int, group: Any, experts: int) -> dict[str, Any]:
    layer = layer_of(group, "plain", experts, k=1, choice=(1, 1, "linear"))
    torch.manual_seed(rank)
    with torch.no_grad():
        for p in layer.expert_parameters():
            p.add_(torch.randn_like(p))
    full: dict[str, Any] = {}
    parts: list[list[Any]] = []
    for own in layer.expert_parameters():
        every = [torch.empty_like(own) for _ in range(layer.ranks)]
        group.allgather([every], [own.detach()]).wait()
        parts.append(every)
    full = layer.layout.full(*parts)
    other = layer_of(group, "plain", experts, k=1, choice=(0, 1, "linear"))
    other.load_full_experts(full)
    assert all(torch.equal(a, b) or a.numel() == 0 for a, b in zip(layer.layout.part(full, rank), other.expert_parameters(), strict=True))
    with torch.no_grad():
        same = torch.allclose(layer(inputs(rank, 5)[0], capacity_factor=0), other(inputs(rank, 5)[0], capacity_factor=0), atol=1e-12)
    return {"same": same, "full": {n: t.numpy() for n, t in full.items()}}


def dropless(rank: int, group: Any, name: str, experts: int, ways: list[str], k: int) -> list[dict[str, Any]]:
    return [step_of(layer_of(group, name, experts, k=k, dropless=way, block=4), rank) for way in ways]


def planned(rank: int, group: Any, path: str) -> list[Any]:
    layer = MoELayer(FeedForward(H, F, bias=False), 1, k=1, capacity_factor=0, group=group, seed=3, plan=path)
    used = []
    for tokens in (4, 300):
        torch.manual_seed(rank)
        layer(torch.randn(tokens, H)).sum().backward()
        used.append(tuple(layer.used))
    return used


def copied(rank: int, group: Any, name: str, way: str, copies: list[tuple[int, int]]) -> dict[str, Any]:
    """A step without copies, and steps with them, on three calls: the second one's homes have changed."""
    plain = layer_of(group, name, 4, k=2, dropless=way, block=4)
    with_copies = layer_of(group, name, 4, k=2, dropless=way, block=4, spare=2, replan=1000)
    with_copies.copies.place(copies, [7, 1, 3, 2])  # type: ignore[union-attr]
    found: dict[str, Any] = {"plain": [], "copied": [], "served": []}
    for turn in range(2):
        for layer, into in ((plain, found["plain"]), (with_copies, found["copied"])):
            into.append(step_of(layer, rank))
            with torch.no_grad():
                for p in layer.expert_parameters():
                    p.mul_(1.1)
    sent: list[int] = []
    exchanged = torch.zeros(0)
    for turn in range(3):  # nothing changes but before the last: weights stay
        with torch.no_grad():
            if turn == 2 and rank == 1:
                with_copies.slices.mul_(0.5)
                plain.slices.mul_(0.5)
            kept = with_copies.copies._kept  # type: ignore[union-attr]
            a, b = plain(inputs(rank, TOKENS[rank])[0]), with_copies(inputs(rank, TOKENS[rank])[0])
            sent.append(int(kept is not with_copies.copies._kept))  # type: ignore[union-attr]
        exchanged = a - b
        found["served"].append(float(exchanged.abs().max()) if len(a) else 0.0)
    return found | {"sent": sent}


def moved(rank: int, group: Any, rate_Bps: int) -> dict[str, Any]:
    """All tokens choose one expert: copies come where links are slow for rows and weights are few, and tokens are the same."""
    layer = layer_of(group, "plain", 4, k=1, dropless="loop", spare=1, replan=2)
    assert layer.copies is not None
    object.__setattr__(layer.copies.prices, "rate_Bps", rate_Bps)
    with torch.no_grad():
        layer.router.linear.weight.zero_()  # type: ignore[union-attr]
    x = inputs(rank, 400)[0]
    with torch.no_grad():
        outputs = [layer(x) for _ in range(5)]
    return {
        "same": all(torch.allclose(outputs[0], y, rtol=0, atol=1e-12) for y in outputs), "moves": layer.copies.moves,
        "hot": int(layer.dispatch_count.argmax()),  # type: ignore[union-attr]
        "made": (layer.copies.made.busiest, layer.copies.made.bound),
    }


def refused_copies(rank: int, group: Any, options: dict[str, Any]) -> tuple[str, str, str]:
    try:
        layer_of(group, "plain", 4, k=1, **options)
    except MeshwrightError as error:
        return type(error).__name__, error.message, error.hint
    return "", "", ""
