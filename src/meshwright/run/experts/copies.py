"""Copies of hot experts beside their homes, in a run: their weights, the tokens that go to them, their gradients, and when they move.

Cite: `decide.experts.replicas`, which places them; J. He and others, "FasterMoE" (PPoPP 2022), section 4.2, for weights that travel in every training
step ("shadowed experts") and gradients that come home.
Left open by the papers: when copies move. Our answer: after every so many calls all ranks add up loads and decide alike (`best_move`), with the time
of a row as measured, and of bytes as the fabric says.
Deviations: an expert keeps its home, so no optimizer state moves, and checkpoints know nothing of copies.
Invariant: outputs and gradients are those without copies, but for the order of sums: a copy has the weights of its home in every step, its gradient
is added to that of its home, and every row goes to one rank with its expert. Own copies take a rank's rows first, others as is left.
Cost: in training the weights of every copy there and their gradients back; in inference weights travel when they change or copies move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from ...decide.experts.replicas import best_move, with_copies
from ...errors import GroupFailed, UsageError
from ...plan.copies import own_first
from ..executor.held_groups import holds_group
from .ragged import exchange_rows

__all__ = ["CopyPrices", "ExpertCopies", "tied"]

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class CopyPrices:
    """expert_bytes: weights of one expert; row_bytes: of a token's way to its expert and back, once; rate_Bps: between ranks."""

    expert_bytes: int
    row_bytes: int
    rate_Bps: int


class _Tied(torch.autograd.Function):  # type: ignore[misc]
    """The first argument; the second gets a gradient of zeros, so that its backward runs on every rank, whatever rows came there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(beside)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (beside,) = ctx.saved_tensors
        return grad, torch.zeros_like(beside)


def tied(x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Tied.apply(x, beside)
    return found


@dataclass(eq=False)
class ExpertCopies:
    """Of one layer on one rank. spare: places for copies on every rank; every: calls between two decisions. All ranks call all methods alike.

    `made`: which copies there are now; `loads` [E]: rows of this rank's tokens since the last decision; `moves`: (call, copies, seconds that they are
    expected to save in `every` calls, seconds of weights on their way). Raises: UsageError for places that no copy fits in.
    """

    group: Any
    rank: int
    ranks: int
    experts: int
    spare: int
    every: int
    prices: CopyPrices
    calls: int = 0
    rows: int = 0  # multiplied on this rank since the last decision, and the seconds of that, forward
    rows_s: float = 0.0
    moves: list[tuple[int, tuple[tuple[int, int], ...], float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        holds_group(self)
        self.local = self.experts // self.ranks
        if not 1 <= self.spare <= self.experts - self.local or self.every < 1:
            text = f"{self.spare} places for copies beside {self.local} of {self.experts} experts, looked at every {self.every} calls"
            raise UsageError(text, where="spare", hint=f"spare=1 to {self.experts - self.local} on several ranks, replan=1 or more")
        self.loads = torch.zeros(self.experts, dtype=torch.int64)
        self._kept: torch.Tensor | None = None  # weights that came, as long as their homes stay as they are
        self.place((), [1] * self.experts)

    # ---- which copies ------------------------------------------------------------------------------------------
    def place(self, copies: Sequence[tuple[int, int]], loads: Sequence[int]) -> None:
        """Use these (expert, rank) copies from now on, tokens divided as is best for `loads`. Raises: UsageError for more than fit."""
        self.made = made = with_copies(loads, copies, self.ranks)
        self.held = [sorted(e for e, r in made.copies if r == rank) for rank in range(self.ranks)]
        if max(map(len, self.held)) > self.spare:
            most = max(range(self.ranks), key=lambda r: len(self.held[r]))
            raise UsageError(f"{len(self.held[most])} copies for {self.spare} places at rank {most}", where="copies", hint="a larger spare")
        wide = self.local + self.spare
        slot = {(e, e // self.local): e // self.local * wide + e % self.local for e in range(self.experts)}
        slot |= {(e, r): r * wide + self.local + i for r, held in enumerate(self.held) for i, e in enumerate(held)}
        rows = [dict(x or ((e // self.local, 1),)) for e, x in enumerate(made.rows)]
        self._shares = [[(slot[e, r], n) for r, n in own_first(x, self.ranks, self.rank)] for e, x in enumerate(rows)]
        mine = [(r, e % self.local) for r, held in enumerate(self.held) for e in held if e // self.local == self.rank]
        self._order = torch.tensor([e for _, e in mine], dtype=torch.int64)
        self._sends = [sum(r == to for r, _ in mine) for to in range(self.ranks)]
        self._receives = [sum(e // self.local == r for e in self.held[self.rank]) for r in range(self.ranks)]
        self._kept = None

    def after_call(self, counts: torch.Tensor, *, training: bool) -> None:
        """Counts [E] of this rank's rows; after every `every` calls the ranks decide about copies. Raises: GroupFailed."""
        self.loads += counts.cpu()
        self.calls += 1
        if self.calls % self.every:
            return
        numbers = torch.cat([self.loads, torch.tensor([self.rows, int(self.rows_s * 1e9)])])
        try:
            self.group.allreduce([numbers]).wait()
        except RuntimeError as error:
            raise GroupFailed(f"rank {self.rank} lost the others while loads were added up: {str(error)[:200]}", where="experts") from error
        *loads, rows, rows_ns = numbers.tolist()
        self.loads.zero_()
        self.rows, self.rows_s = 0, 0.0
        p, passes = self.prices, 3 if training else 1  # backward takes twice the work of forward, and its messages are as large; own rows stay
        sent_bytes = (2 if training else 1) * p.row_bytes
        row_s = Fraction(passes * rows_ns, 10**9 * max(1, rows)) + Fraction(sent_bytes * (self.ranks - 1), p.rate_Bps * self.ranks)
        then, saved, moved = best_move(
            self.made.copies, loads, self.ranks, self.spare, row_s=row_s, expert_bytes=p.expert_bytes, rate_Bps=p.rate_Bps, calls=self.every,
            step_bytes=2 * p.expert_bytes if training else 0,
        )  # fmt: skip
        if then.copies != self.made.copies:
            self.moves.append((self.calls, then.copies, float(saved), float(moved)))
        self.place(then.copies, loads)

    # ---- a step ------------------------------------------------------------------------------------------------
    def slots(self, counts: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, counts [E] of each -> the slot of each [n]: rank · (local + spare) + place there."""
        slots, rows = [], []
        for shares, n in zip(self._shares, counts.tolist(), strict=True):
            total, so_far, before = sum(x for _, x in shares), 0, 0
            for slot, x in shares:
                so_far += x
                slots.append(slot)
                rows.append(n * so_far // total - before)
                before = n * so_far // total
        return torch.repeat_interleave(torch.tensor(slots), torch.tensor(rows)).to(counts.device)

    def weights(self, params: Parameters, *, training: bool, changed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(flat, by name) weights of the copies that this rank holds, with gradients towards their homes. `training`: gradients are wanted;
        `changed`: some rank's weights are not those of the call before; both the same on all ranks. Raises: GroupFailed."""
        came = None if training or changed else self._kept
        if came is None:
            order = self._order.to(next(iter(params.values())).device)
            mine = torch.cat([p.index_select(0, order).reshape(len(order), p[0].numel()) for p in params.values()], 1)
            came = exchange_rows(self.group, mine, self._sends, self._receives)
            self._kept = None if training else came
        found, start = {}, 0
        for name, p in params.items():
            size = p[0].numel()
            found[name] = came[:, start : start + size].reshape(len(came), *p.shape[1:])
            start += size
        return came, found
