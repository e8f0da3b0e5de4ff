"""What ranks of an expert layer do together, in threads over gloo: rows to experts and back, weights in slices, agreements, copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.decide.experts.replicas import best_move, with_copies
from meshwright.errors import FormatError, GroupFailed, NotFinite, RankDiverged, UsageError
from meshwright.run.experts.agreement import Facts, agree, number_of
from meshwright.run.experts.copies import CopyPrices, ExpertCopies, tied
from meshwright.run.experts.ragged import exchange_rows, ragged_exchange
from meshwright.run.experts.weights import WeightLayout

PRICES = CopyPrices(expert_bytes=4000, row_bytes=64, rate_Bps=10**6)


def of_ranks(ranks: int, work: Callable[[Any, int], Any]) -> list[Any]:
    """Results of `work(group, rank)` of all ranks at once, or what they raised."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        return work(dist.ProcessGroupGloo(store, rank, ranks, options), rank)

    with ThreadPoolExecutor(ranks) as pool:
        found = [pool.submit(one, rank) for rank in range(ranks)]
        return [f.exception() or f.result() for f in found]


def broken() -> Any:
    def fails(*_: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    return SimpleNamespace(allreduce=fails, alltoall_base=fails)


# ---- rows ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "local"), [(1, 3), (2, 2), (3, 1)])
def test_rows_pass_through_their_experts_and_come_back(ranks: int, local: int) -> None:
    experts, width = ranks * local, 3
    draw = torch.Generator().manual_seed(ranks)
    scales = torch.randn(experts, generator=draw, dtype=torch.float64)
    counts = torch.randint(0, 4, (ranks, experts), generator=draw)
    inputs = [torch.randn(int(n.sum()), width, generator=draw, dtype=torch.float64) for n in counts]

    def work(group: Any, rank: int) -> Any:
        x, seen = inputs[rank].clone().requires_grad_(), []

        def run(rows: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
            seen.append(each.tolist())
            own = scales[rank * local : (rank + 1) * local].repeat_interleave(each)
            return torch.cat([rows * own[:, None], own[:, None]], 1)

        out = ragged_exchange(group, ranks, x, counts[rank], run)
        (out[:, :width] * (rank + 1)).sum().backward()
        return out.detach(), x.grad, seen

    for rank, (out, grad, seen) in enumerate(of_ranks(ranks, work)):
        own = scales.repeat_interleave(counts[rank])[:, None]
        assert torch.allclose(out[:, :width], inputs[rank] * own) and torch.equal(out[:, width:], own)
        assert torch.allclose(grad, own.expand(-1, width) * (rank + 1))
        assert seen == [counts[:, rank * local : (rank + 1) * local].sum(0).tolist()]


def test_an_expert_that_fails_lets_nobody_wait() -> None:
    def work(group: Any, rank: int) -> Any:
        def run(rows: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
            if rank:
                raise ValueError("no such expert")
            return rows

        return ragged_exchange(group, 2, torch.ones(2, 1), torch.tensor([1, 1]), run)

    kept, failed = of_ranks(2, work)
    assert isinstance(failed, ValueError) and isinstance(kept, GroupFailed) and "an exchange of rows was given up" in kept.message
    with pytest.raises(GroupFailed, match="given up: connection closed by peer") as caught:
        exchange_rows(broken(), torch.ones(2, 1), [2], [2])
    assert caught.value.data == {"error": "connection closed by peer"}


# ---- weights ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "experts"), [(2, 2), (4, 2), (2, 6), (6, 3), (3, 1)])
def test_parts_are_the_whole_for_any_number_of_ranks(ranks: int, experts: int) -> None:
    sliced, whole = {"up": (12, 2), "down": (12, 3)}, {"bias": (5,), "scale": (1, 2)}
    layout = WeightLayout(ranks, experts, sliced, whole)
    full = {n: torch.randn(experts, *s) for n, s in {**sliced, **whole}.items()}
    parts = [layout.part(full, rank) for rank in range(ranks)]
    assert {(len(a), len(b)) for a, b in parts} == {(layout.slice_elements, layout.whole_part)}
    again = layout.full([a for a, _ in parts], [b for _, b in parts])
    assert list(again) == list(full) and all(torch.equal(again[n], full[n]) for n in full)
    shares, local = layout.shares, layout.local
    for first in range(0, ranks, shares):  # neighbours that share experts gather these
        some = slice(first // shares * local, first // shares * local + local)
        here = parts[first : first + shares]
        found = layout.sliced_of(torch.stack([a for a, _ in here]), local) | layout.whole_of(torch.stack([b for _, b in here]), local)
        assert all(torch.equal(found[n], full[n][some]) for n in full) or shares > 1
        assert all(found[n].shape == full[n][some].shape for n in full)
    with pytest.raises(FormatError, match="is missing") as caught:
        layout.part({n: t for n, t in full.items() if n != "bias"}, 0)
    assert caught.value.where == "experts.bias"
    with pytest.raises(FormatError, match=r"must be .*, got .*") as caught:
        layout.part(full | {"up": full["up"][:, :-1]}, 0)
    assert caught.value.where == "experts.up"


# ---- agreements ---------------------------------------------------------------------------------------------------------
FACTS = Facts(demand=3, tokens=10, finite=True, time_s=0.5, equal=(1, number_of(1.25), 4, 8, 0, 2), changed=False)


def test_all_agree_on_the_most_of_each() -> None:
    said = [replace(FACTS, demand=5, time_s=0.25), replace(FACTS, tokens=40, changed=True), FACTS]
    found = of_ranks(3, lambda group, rank: agree(said[rank], group, rank, 3))
    assert {(x.demand, x.tokens, x.time_s, x.changed) for x in found} == {(5, 40, 0.5, True)}
    alone = agree(FACTS, None, 0, 1)
    assert (alone.demand, alone.tokens, alone.time_s, alone.changed) == (3, 10, 0.5, False)


@pytest.mark.parametrize(("odd", "error", "match"), [
    ({"finite": False}, NotFinite, "rank 1"), ({"equal": (2, *FACTS.equal[1:])}, RankDiverged, "k"),
    ({"equal": (*FACTS.equal[:1], number_of(2.0), *FACTS.equal[2:])}, RankDiverged, "capacity factor"),
    ({"equal": (*FACTS.equal[:5], 1)}, RankDiverged, "passes"),
])  # fmt: skip
def test_what_is_wrong_at_one_is_an_error_at_all(odd: dict[str, Any], error: type[Exception], match: str) -> None:
    said = [FACTS, replace(FACTS, **odd), FACTS]
    found = of_ranks(3, lambda group, rank: agree(said[rank], group, rank, 3))
    assert all(isinstance(x, error) and match in str(x) for x in found), found
    with pytest.raises(GroupFailed, match="connection closed"):
        agree(FACTS, broken(), 0, 2)


# ---- copies -------------------------------------------------------------------------------------------------------------
def copies_of(group: Any, rank: int, *, ranks: int = 3, experts: int = 6, spare: int = 2, every: int = 2) -> ExpertCopies:
    return ExpertCopies(group, rank, ranks, experts, spare, every, PRICES)


COPIES, LOADS = ((0, 1), (0, 2), (3, 0), (5, 0)), [60, 4, 5, 30, 6, 20]


def test_every_row_goes_to_a_rank_with_its_expert() -> None:
    made = with_copies(LOADS, COPIES, 3)
    arrived = [0] * 3
    for rank in range(3):
        c = copies_of(broken(), rank)
        c.place(COPIES, LOADS)
        assert c.held == [[3, 5], [0], [0]] and c.made == made
        holds = {r * 4 + i: e for r in range(3) for i, e in enumerate([*range(2 * r, 2 * r + 2), *c.held[r]])}
        counts = torch.tensor([n // 3 for n in LOADS])
        slots = c.slots(counts)
        owner = torch.repeat_interleave(torch.arange(6), counts)
        assert [holds[int(s)] for s in slots] == owner.tolist()
        rank_of = slots // 4
        arrived = [a + int((rank_of == r).sum()) for r, a in enumerate(arrived)]
        if rank == 1:
            zero = rank_of[owner == 0].tolist()
            assert zero[0] == 1 and zero == sorted(zero, key=lambda r: r != 1), "a rank's own copy takes its rows first"
    assert max(arrived) <= made.busiest + 6 < made.before, "as the shares say, up to a row for each expert and rank"
    with pytest.raises(UsageError, match="3 copies for 2 places at rank 0"):
        copies_of(broken(), 0).place(((2, 0), (3, 0), (4, 0)), LOADS)
    for wrong in ({"spare": 0}, {"spare": 5}, {"every": 0}):
        with pytest.raises(UsageError, match="places for copies beside 2 of 6 experts"):
            copies_of(broken(), 0, **wrong)


def test_copies_have_the_weights_of_their_homes_and_gradients_go_back() -> None:
    full = {"up": torch.arange(24.0).view(6, 2, 2), "bias": 100 + torch.arange(6.0).view(6, 1)}

    def work(group: Any, rank: int) -> Any:
        c = copies_of(group, rank)
        c.place(COPIES, LOADS)
        params = {n: p[2 * rank : 2 * rank + 2].clone().requires_grad_() for n, p in full.items()}
        flat, found = c.weights(params, training=True, changed=False)
        assert c._kept is None and len(flat) == len(c.held[rank])
        for n, p in found.items():
            assert torch.equal(p, full[n][c.held[rank]]) and p.shape[1:] == full[n].shape[1:]
        tied(sum((p.sum() for p in found.values()), torch.zeros(())), flat).backward()
        first, _ = c.weights(params, training=False, changed=True)
        again, _ = c.weights(params, training=False, changed=False)
        moved, _ = c.weights(params, training=False, changed=True)
        assert again is first and moved is not first
        c.place(COPIES, LOADS)
        return params["bias"].grad.flatten().tolist(), c._kept

    found = of_ranks(3, work)
    assert [x[0] for x in found] == [[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]], "one from every copy"
    assert all(x[1] is None for x in found), "placed anew: weights travel again"


@pytest.mark.parametrize("training", [True, False])
def test_copies_move_where_it_pays(training: bool) -> None:
    rows = [torch.tensor([n // 3 for n in LOADS]) * 1000 for _ in range(3)]

    def work(group: Any, rank: int) -> Any:
        c = copies_of(group, rank)
        c.rows, c.rows_s = 1000, 0.5
        c.after_call(rows[rank], training=training)
        before = (c.calls, c.made.copies, [*c.moves], c.loads.tolist())
        c.after_call(rows[rank], training=training)
        return before, c.made.copies, c.moves, (c.calls, c.rows, c.rows_s, c.loads.tolist())

    found = of_ranks(3, work)
    loads = [2 * 3 * 1000 * (n // 3) for n in LOADS]
    passes, sent = (3, 2 * PRICES.row_bytes) if training else (1, PRICES.row_bytes)
    row_s = Fraction(passes * int(1.5e9), 10**9 * 3000) + Fraction(sent * 2, PRICES.rate_Bps * 3)
    then, saved, moved = best_move(
        (), loads, 3, 2, row_s=row_s, expert_bytes=PRICES.expert_bytes, rate_Bps=PRICES.rate_Bps, calls=2,
        step_bytes=2 * PRICES.expert_bytes if training else 0,
    )  # fmt: skip
    assert then.copies
    for before, copies, moves, after in found:
        assert before == (1, (), [], rows[0].tolist()) and copies == then.copies
        assert moves == [(2, then.copies, float(saved), float(moved))] and after == (2, 0, 0.0, [0] * 6)
    c = copies_of(broken(), 1, every=1)
    with pytest.raises(GroupFailed, match="rank 1 lost the others while loads were added up: connection closed"):
        c.after_call(rows[1], training=training)
