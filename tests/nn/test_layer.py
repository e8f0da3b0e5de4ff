"""The layer against its equations, token by token in one process; on real ranks with every choice; and what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent / "run"))
from moe_ranks import (  # noqa: E402
    TOKENS,
    H,
    copied,
    dropless,
    every_choice,
    form_of,
    inputs,
    layer_of,
    lost,
    moved,
    planned,
    refused,
    refused_copies,
    saved,
    searching,
    step_of,
)
from processes import RankPool  # noqa: E402

from meshwright.decide.experts import ExpertProblem, ExpertShape, Tutel, degrees_of  # noqa: E402
from meshwright.decide.experts.search import TableSearch  # noqa: E402
from meshwright.drive.experts import plan_experts, table_of  # noqa: E402
from meshwright.drive.plans import read_fabric, write_plan  # noqa: E402
from meshwright.errors import FormatError, NotFinite, PlanMismatch, Unsupported, UsageError  # noqa: E402
from meshwright.nn import CosineRouter, FeedForward, MoELayer  # noqa: E402

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()


def plain(
    name: str, experts: int, ranks: int, *, k: int = 2, factor: float = 1.0, prioritised: bool = False, alignment: int = 1
) -> list[dict[str, Any]]:
    """All ranks' outputs and gradients, from the equations: every token through each of its experts that has a place for it."""
    layer = layer_of(None, name, experts)
    weights = {n: t.clone().requires_grad_() for n, t in layer.layout.full([layer.slices.detach()], [layer.whole.detach()]).items()}
    router = layer.router.linear.weight.detach().clone()
    routed, most = [], 0
    for rank in range(ranks):
        x = inputs(rank, TOKENS[rank])[0].requires_grad_()
        w = router.clone().requires_grad_()
        scores = torch.softmax(x @ w.T, 1)
        order = torch.argsort(-scores.max(1).values, stable=True).tolist() if prioritised else list(range(len(x)))
        chosen = [torch.topk(row, k).indices.tolist() for row in scores]
        taken, places = [0] * experts, {}
        for j in range(k):
            for t in order:
                places[t, j] = taken[chosen[t][j]]
                taken[chosen[t][j]] += 1
        most = max(most, *taken)
        routed.append((x, w, scores, chosen, places, taken))
    each = -(-max(TOKENS[:ranks]) // experts)
    capacity = k * int(abs(factor) * each) if factor > 0 else most if not factor else min(most, k * int(-factor * each))
    capacity = -(-capacity // alignment) * alignment
    found, total = [], torch.zeros(())
    for rank, (x, _, scores, chosen, places, _) in enumerate(routed):
        rows = []
        for t, row in enumerate(chosen):
            gates = scores[t, row]
            gates = gates / gates.sum() if k > 1 else gates
            y = torch.zeros(layer.form.output, dtype=torch.float64)
            for j, e in enumerate(row):
                if places[t, j] < capacity:
                    y = y + gates[j] * layer.form.run(x[t].view(1, 1, -1), {n: p[e : e + 1] for n, p in weights.items()}, 1.0)[0, 0]
            rows.append(y)
        y = torch.stack(rows) if rows else torch.zeros(0, layer.form.output, dtype=torch.float64)
        first = torch.bincount(torch.tensor([r[0] for r in chosen], dtype=torch.int64), minlength=experts)
        aux = (scores.sum(0) * first).sum() * experts / max(len(x), 1) ** 2
        total = total + (y * inputs(rank, TOKENS[rank])[1][:, : y.shape[1]]).sum() + aux
        dropped = sum(places[t, j] >= capacity for t in range(len(x)) for j in range(k))
        found.append({"y": y.detach().numpy(), "l_aux": aux.item(), "capacity": capacity, "dropped": dropped})
    total.backward()
    for rank, (x, w, _, _, _, taken) in enumerate(routed):
        found[rank] |= {"x": x.grad.numpy(), "router": w.grad.numpy(), "counts": taken, "weights": {n: p.grad for n, p in weights.items()}}
    return found


def compare(found: dict[str, Any], wanted: dict[str, Any], layout: Any, rank: int) -> None:
    for name in ("y", "x", "router", "l_aux"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-9, atol=1e-10, err_msg=name)
    for name in ("capacity", "dropped", "counts"):
        assert found[name] == wanted[name], name
    slices, whole = layout.part(wanted["weights"], rank)
    np.testing.assert_allclose(found["slices"], slices.numpy(), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found["whole"], whole.numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (2, 0.5), (3, 0), (4, -1.0), (2, 1.25)])
def test_one_process(k: int, factor: float, prioritised: bool) -> None:
    layer = layer_of(None, "plain", 4, k=k, capacity_factor=factor, prioritised=prioritised, chunks=(1,))
    wanted = plain("plain", 4, 1, k=k, factor=factor, prioritised=prioritised)[0]
    compare(step_of(layer, 0), wanted, layer.layout, 0)
    assert factor != 0.5 or wanted["dropped"]


CASES = [  # ranks, experts, form, options
    (2, 1, "plain", {"k": 1, "capacity_factor": 0}),
    (2, 4, "narrow", {"k": 2, "capacity_factor": -1.0}),
    (2, 1, "gated", {"k": 1, "capacity_factor": 1.0}),
    (4, 2, "plain", {"k": 2, "capacity_factor": 0.5, "prioritised": True}),
    (2, 1, "module", {"k": 1, "capacity_factor": 0}),
    (4, 1, "plain", {"k": 1, "capacity_factor": 1.0}),
    (2, 4, "plain", {"k": 3, "capacity_factor": 1.0}),
]


@pytest.mark.parametrize(("ranks", "experts", "name", "options"), CASES)
def test_every_choice_gives_the_same_on_real_ranks(pool: RankPool, ranks: int, experts: int, name: str, options: dict[str, Any]) -> None:
    """Forward and backward, unlike numbers of tokens and a rank without any; each choice twice, on the same layer, without moving a weight."""
    divisible = bool(form_of(name).inner)
    algorithms = ("linear", "2dh") if ranks == 4 else ("linear",)
    chunks = (1, 4) if ranks == 2 else (2,)
    choices = [(r, d, a) for r in degrees_of(ranks, experts, divisible=divisible) for d in (chunks if r else (1,)) for a in algorithms]
    found = pool.run(every_choice, ranks, name, experts, options, choices)
    layer = layer_of(None, name, experts)
    layout = type(layer.layout)(ranks, experts, layer.form.sliced, layer.form.whole)
    k, factor, prioritised = options["k"], options["capacity_factor"], options.get("prioritised", False)
    wanted = plain(name, experts, ranks, k=k, factor=factor, prioritised=prioritised, alignment=4 * layout.shares)
    for rank, of_rank in enumerate(found):
        for one in of_rank:
            compare(one, wanted[rank], layout, rank)


@pytest.mark.parametrize(
    ("ranks", "name", "ways"),
    [(1, "gated", ["loop", "padded", "sparse", "auto"]), (4, "gated", ["sparse", "loop", "auto"]), (2, "plain", ["padded"]), (2, "module", ["auto"])],
)
def test_dropless_is_the_layer_that_drops_nothing(pool: RankPool, ranks: int, name: str, ways: list[str]) -> None:
    """Padded f = 0 in float64: equal to rounding; on ranks with unequal splits, one rank without tokens."""
    found = pool.run(dropless, ranks, name, 4, ways, 2) if ranks > 1 else [dropless(0, None, name, 4, ways, 2)]
    layer = layer_of(None, name, 4)
    layout = type(layer.layout)(ranks, 4, layer.form.sliced, layer.form.whole)
    wanted = plain(name, 4, ranks, k=2, factor=0)
    for rank, of_rank in enumerate(found):
        for one in of_rank:
            compare(one, wanted[rank], layout, rank)


def test_the_choices_of_a_plan(pool: RankPool, tmp_path: Path) -> None:
    fabric = read_fabric("laptop:2")
    ranks = tuple(d.name for d in fabric.devices)
    shape = ExpertShape(ranks=2, experts=1, model=H, inner=8)
    problem = ExpertProblem(fabric=fabric, ranks=ranks, shape=shape, capacities=(8, 304))
    plan, ranked = plan_experts(problem, Tutel(chunks=(1, 2), algorithms=("linear",)))
    write_plan(tmp_path / "plan.json", plan)
    for used in pool.run(planned, 2, str(tmp_path / "plan.json")):
        assert used == [tuple(rows[0].choice) for rows in ranked]
    with pytest.raises(PlanMismatch, match="the plan is for inner = 8, the layer has 16"):
        table_of(plan, ExpertShape(ranks=2, experts=1, model=H, inner=16))
    with pytest.raises(PlanMismatch, match="a collective plan"):
        table_of(replace(plan, kind="collective"), shape)
    with pytest.raises(UsageError, match="no choice"):
        TableSearch({}, window=1)


def test_the_search_decides_alike_on_all_ranks(pool: RankPool) -> None:
    """By the time of the slowest rank, which is no rank's own best choice; and when one rank alone gets slow, all try again."""
    first, second = pool.run(searching, 2, 30, True)
    assert (first["used"], first["settled"]) == (second["used"], second["settled"])
    slowest = {choice: max(first["times"][choice], second["times"][choice]) for choice in first["times"]}
    best = min(slowest, key=slowest.__getitem__)
    assert best not in (min(f["times"], key=f["times"].__getitem__) for f in (first, second))
    assert len(set(first["used"][:14])) > 3 and first["used"][14] == best, "several choices are tried, and one is settled on"
    slowest[best] *= 10
    assert first["settled"] == {1: min(slowest, key=slowest.__getitem__)}


def test_the_search_decides_alike_by_the_clock(pool: RankPool) -> None:
    """What is chosen depends on the machine; that it is the same on all ranks does not, nor that every degree is tried."""
    first, second = pool.run(searching, 2, 12, False)
    assert (first["used"], first["settled"]) == (second["used"], second["settled"])
    assert {degree for degree, _, _ in first["used"]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("nan", "NotFinite", "NaN or infinity at rank 1"), ("k", "RankDiverged", "ranks differ in k: between 1 and 2"),
        ("factor", "RankDiverged", "ranks differ in capacity factor"), ("all k", "UsageError", r"k must be 1..2"),
        ("zero", "UsageError", "rounds to a capacity of zero"), ("router", "RankDiverged", "ranks differ in experts"),
        ("both routers", "UsageError", "the router scores 3 experts, the layer has 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_at_one_rank_is_an_error_at_all(pool: RankPool, what: str, kind: str, text: str) -> None:
    for found, message in pool.run(refused, 2, what):
        assert found == kind and text in message


@pytest.mark.parametrize(
    ("options", "texts"),
    [({}, ("rank 0 gave up in the forward pass", "waiting for rank 1")), ({"dropless": "loop", "spare": 1}, ("an exchange of rows was given up",))],
)
def test_a_rank_that_is_lost(options: dict[str, Any], texts: tuple[str, ...]) -> None:
    """Nobody hangs. Rank 1's own error is its own; its process group ends with it, which the others are told."""
    broken = RankPool(2, timeout_s=100)
    try:
        first, second = broken.run(lost, 2, options)
    finally:
        broken.close()
    assert "GroupFailed: experts: " in first and all(text in first for text in texts)
    assert second == "ValueError: rank 1 breaks"


@pytest.mark.parametrize(("ranks", "name", "way", "copies"), [
    (4, "gated", "loop", [(0, 1), (0, 2), (0, 3), (3, 0)]), (2, "plain", "padded", [(0, 1), (1, 1)]), (2, "gated", "sparse", [(2, 0)]),
])  # fmt: skip
def test_copies_change_no_output_and_no_gradient(pool: RankPool, ranks: int, name: str, way: str, copies: list[tuple[int, int]]) -> None:
    """Beside the layer without copies; homes change between steps, one rank has no tokens, and weights travel only when they have changed."""
    for found in pool.run(copied, ranks, name, way, copies):
        for a, b in zip(found["plain"], found["copied"], strict=True):
            for key in ("y", "x", "slices", "whole", "router", "l_aux"):
                np.testing.assert_allclose(b[key], a[key], rtol=1e-9, atol=1e-12, err_msg=key)
        assert max(found["served"]) < 1e-12 and found["sent"] == [1, 0, 1]


def test_copies_come_where_they_pay_and_all_ranks_decide_alike(pool: RankPool) -> None:
    """400 rows of 48 bytes of every rank for one expert, some 440 bytes of weights: copies come over slow links."""
    slow, fast = pool.run(moved, 2, 1000), pool.run(moved, 2, 1 << 60)
    for found in slow:
        (call, copies, saved_s, moved_s), *_ = found["moves"]
        assert found["same"] and (call, copies) == (2, ((found["hot"], 1 - found["hot"] // 2),))
        assert saved_s > moved_s > 0 and found["made"] == (800, 800)
        assert found["moves"] == slow[0]["moves"]
    assert all(found["same"] and found["moves"] == fast[0]["moves"] for found in fast)


@pytest.mark.parametrize(("options", "kind", "text", "hint"), [
    ({"dropless": "loop", "spare": 3}, "UsageError", "3 places for copies beside 2 of 4", "spare=1 to 2"),
    ({"spare": 1}, "Unsupported", "with buffers", "dropless='auto'"),
    ({"dropless": "loop", "spare": 1, "replan": 0}, "UsageError", "every 0 calls", "replan=1 or more"),
    ({"dropless": "loop", "spare": 2, "fabric": "small"}, "Infeasible", "do not fit in a device's", "spare 1"),
])  # fmt: skip
def test_copies_that_do_not_fit_are_refused(pool: RankPool, options: dict[str, Any], kind: str, text: str, hint: str) -> None:
    if options.get("fabric"):
        fabric = read_fabric("laptop:2")
        options = options | {"fabric": replace(fabric, devices=tuple(replace(d, memory_bytes=1500) for d in fabric.devices))}
    for found in pool.run(refused_copies, 2, options):
        assert found[0] == kind and text in found[1] and hint in found[2]


@pytest.mark.parametrize("experts", [1, 2, 4])
def test_checkpoints_load_on_other_numbers_of_ranks(pool: RankPool, experts: int) -> None:
    four = pool.run(saved, 4, experts)
    assert all(f["same"] for f in four)
    full = {n: torch.from_numpy(t) for n, t in four[0]["full"].items()}
    one = layer_of(None, "plain", experts)
    one.load_full_experts(full)
    for name, tensor in one.full_experts().items():
        assert torch.equal(tensor, full[name])
    with pytest.raises(FormatError, match=r"experts\.w1: must be"):
        one.load_full_experts(full | {"w1": full["w1"][:, :1]})
    with pytest.raises(FormatError, match=r"experts\.b2: is missing"):
        one.load_full_experts({n: t for n, t in full.items() if n != "b2"})


def test_routers_losses_and_gates_in_one_process() -> None:
    torch.manual_seed(0)
    layer = MoELayer(FeedForward(H, 8), 4, router=CosineRouter(H, 4, projected=5), loss="importance", noise=1.0, gate="before", seed=1)
    x = torch.randn(2, 5, H)
    y = layer(x, k=3, capacity_factor=0)
    assert y.shape == (2, 5, H) and layer.dropped == 0
    (y.sum() + layer.l_aux).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in layer.parameters())
    assert layer(torch.zeros(0, H)).shape == (0, H) and layer.capacity == 0
    scale = layer.router.temperature
    with torch.no_grad():
        scale.fill_(99.0)
        logits = layer.router(x.view(-1, H))
    assert float(logits.abs().max()) <= 100.001, "the inverse temperature is clamped"


def test_refusals_in_one_process() -> None:
    layer = layer_of(None, "plain", 2)
    with pytest.raises(NotFinite, match="at rank 0"):
        layer(torch.full((3, H), float("inf"), dtype=torch.float64))
    with pytest.raises(UsageError, match="no gate 'never'"):
        layer_of(None, "plain", 2, gate="never")
    with pytest.raises(UsageError, match="no way 'magic'"):
        layer_of(None, "plain", 2, dropless="magic")
    with pytest.raises(Unsupported, match="are shared"):
        MoELayer(FeedForward(H, 8), 4, group=EightRanks(), fabric="dgx-h100:1", dropless="loop", choice=(1, 1, "linear"))
    with pytest.raises(UsageError, match="4 devices for 8 ranks"):
        MoELayer(FeedForward(H, 8), 8, group=EightRanks(), fabric="two-islands")


class EightRanks:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 8
