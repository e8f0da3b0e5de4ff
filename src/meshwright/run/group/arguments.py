"""What torch hands a process group, looked at before anything is sent: is the call right by itself, and do all ranks exchange equal blocks?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...errors import UsageError
from .builtin_calls import builtin_call
from .engine import Engine
from .routes import dense

__all__ = ["Arguments"]


class Arguments:
    """Of one group. A call that is wrong by itself is an error at this rank alone: the others wait for its right call, and the group goes on."""

    def __init__(self, engine: Engine, builtin: Any) -> None:
        self.engine, self.builtin, self.ranks, self.rank = engine, builtin, engine.size, engine.rank

    def require(self, op: str, fits: bool, what: str) -> None:
        """Raises: UsageError unless it fits; what ended the group."""
        if fits:
            return
        self.engine.raise_if_failed()
        hint = "nothing was sent: the other ranks wait for this rank's right call"
        raise UsageError(f"{what} do not fit", where=op, hint=hint, data={"rank": self.rank})

    def require_one(self, op: str, tensors: list[torch.Tensor], root: int) -> None:
        """Raises: UsageError."""
        self.require(op, len(tensors) == 1, f"{len(tensors)} tensors at once")
        self.require(op, root < self.ranks, f"root {root} among {self.ranks} ranks")

    def require_pair(self, op: str, source: torch.Tensor, target: torch.Tensor, fits: bool) -> None:
        """`fits`: their lengths do. Raises: UsageError."""
        if not fits or source.dtype != target.dtype:
            what = f"{source.numel()} elements of {source.dtype} in, {target.numel()} of {target.dtype} out, among {self.ranks} ranks"
            self.require(op, False, what)

    def require_splits(self, *sides: tuple[torch.Tensor, list[int]]) -> None:
        """Input and output of an all-to-all with their splits. Raises: UsageError."""
        (source, _), (target, _) = sides
        self.require("all-to-all", source.dtype == target.dtype, f"{source.dtype} in, {target.dtype} out")
        for tensor, splits in sides:
            told = f"splits {splits}" if splits else f"{self.ranks} equal splits"
            self.require("all-to-all", self.fit(tensor, splits), f"{told} of a tensor of shape {tuple(tensor.shape)} among {self.ranks} ranks")

    def require_rows(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Lists of an all-to-all: one tensor per rank, of one type. Raises: UsageError."""
        for word, row in (("inputs", inputs), ("outputs", outputs)):
            self.require("all-to-all", len(row) == self.ranks, f"{len(row)} {word} among {self.ranks} ranks")
        tensors = [*inputs, *outputs]
        plain = len({t.dtype for t in tensors}) == 1 and all(map(dense, tensors))
        self.require("all-to-all", plain, "tensors of several types, or sparse ones")

    def require_lists(self, op: str, own: list[torch.Tensor], lists: list[list[torch.Tensor]], word: str, root: int = -1) -> None:
        """One tensor of one's own, and a list of one per rank: at all ranks, or at the root only. Raises: UsageError."""
        self.require(op, root < self.ranks, f"root {root} among {self.ranks} ranks")
        here = lists[0] if lists and root in (-1, self.rank) else None
        needed = self.ranks if root in (-1, self.rank) else 0
        self.require(op, len(own) == 1 and len(lists) <= 1 and len(here or ()) == needed, f"{len(here or ())} {word} among {self.ranks} ranks")

    def fit(self, tensor: torch.Tensor, splits: list[int]) -> bool:
        """Are these parts of the tensor's first dimension, one per rank? None given: equal ones."""
        rows = tensor.size(0) if tensor.dim() else -1
        return (len(splits) == self.ranks and sum(splits) == rows and min(splits) >= 0) if splits else rows % self.ranks == 0

    def all_exchange(self, elements: int) -> bool:
        """Do all ranks exchange equal blocks of the same `elements` in all? -1: this one does not.

        Splits are a rank's own: those of one may happen to be equal where the others' are not. So the ranks tell each other first.
        """
        if self.ranks < 2:
            return elements >= 0
        least = dist.AllreduceOptions()
        least.reduceOp, least.asyncOp = dist.ReduceOp.MIN, False
        told = torch.tensor([elements, -elements])
        builtin_call(self.engine, "all-reduce", self.builtin.allreduce, [0])([told], least)
        return 0 <= int(told[0]) == -int(told[1])
