"""What torch hands a process group, looked at before anything is sent: is the call right by itself, and does what ranks exchange fit?"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions  # torch 2.13 leaves it out of `dist`

from ...errors import RankDiverged, WrongCall
from .builtin_calls import builtin_call
from .engine import Engine
from .record_file import call_text
from .routes import dense
from .signatures import Signature

__all__ = ["Arguments"]

MAX_SHOWN_SPLITS = 8  # of a rank's, in a message


class Arguments:
    """Of one group. A call that is wrong by itself is an error at this rank alone: the others wait for its right call, and the group goes on."""

    def __init__(self, engine: Engine, builtin: Any) -> None:
        self.engine, self.builtin, self.ranks, self.rank = engine, builtin, engine.size, engine.rank

    def require(self, op: str, fits: bool, what: str) -> None:
        """Raises: WrongCall unless it fits; what ended the group."""
        if fits:
            return
        self.engine.raise_if_failed()
        hint = "nothing was sent: the other ranks wait for this rank's right call"
        raise WrongCall(f"{what} do not fit", where=op, hint=hint, data={"rank": self.rank})

    def require_one(self, op: str, tensors: list[torch.Tensor], root: int) -> None:
        """Raises: WrongCall."""
        self.require(op, len(tensors) == 1, f"{len(tensors)} tensors at once")
        self.require(op, root < self.ranks, f"root {root} among {self.ranks} ranks")

    def require_pair(self, op: str, source: torch.Tensor, target: torch.Tensor, fits: bool) -> None:
        """`fits`: their lengths do. Raises: WrongCall."""
        if not fits or source.dtype != target.dtype:
            what = f"{source.numel()} elements of {source.dtype} in, {target.numel()} of {target.dtype} out, among {self.ranks} ranks"
            self.require(op, False, what)

    def require_splits(self, *sides: tuple[torch.Tensor, list[int]]) -> None:
        """Input and output of an all-to-all with their splits. Raises: WrongCall."""
        (source, _), (target, _) = sides
        self.require("all-to-all", source.dtype == target.dtype, f"{source.dtype} in, {target.dtype} out")
        for tensor, splits in sides:
            told = f"splits {splits}" if splits else f"{self.ranks} equal splits"
            self.require("all-to-all", self.fit(tensor, splits), f"{told} of a tensor of shape {tuple(tensor.shape)} among {self.ranks} ranks")

    def require_rows(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Lists of an all-to-all: one tensor per rank, of one type. Raises: WrongCall."""
        for word, row in (("inputs", inputs), ("outputs", outputs)):
            self.require("all-to-all", len(row) == self.ranks, f"{len(row)} {word} among {self.ranks} ranks")
        tensors = [*inputs, *outputs]
        plain = len({t.dtype for t in tensors}) == 1 and all(map(dense, tensors))
        self.require("all-to-all", plain, "tensors of several types, or sparse ones")

    def require_lists(self, op: str, own: list[torch.Tensor], lists: list[list[torch.Tensor]], word: str, root: int = -1) -> None:
        """One tensor of one's own, and a list of one per rank: at all ranks, or at the root only. Raises: WrongCall."""
        self.require(op, root < self.ranks, f"root {root} among {self.ranks} ranks")
        here = lists[0] if lists and root in (-1, self.rank) else None
        needed = self.ranks if root in (-1, self.rank) else 0
        self.require(op, len(own) == 1 and len(lists) <= 1 and len(here or ()) == needed, f"{len(here or ())} {word} among {self.ranks} ranks")

    def fit(self, tensor: torch.Tensor, splits: list[int]) -> bool:
        """Are these parts of the tensor's first dimension, one per rank? None given: equal ones."""
        rows = tensor.size(0) if tensor.dim() else -1
        return (len(splits) == self.ranks and sum(splits) == rows and min(splits) >= 0) if splits else rows % self.ranks == 0

    def counts(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Elements of the parts, one per rank."""
        if not splits:
            return [tensor.numel() // self.ranks] * self.ranks
        of_a_row = tensor.numel() // max(tensor.size(0), 1)
        return [of_a_row * rows for rows in splits]

    def all_exchange(self, sends: list[int], takes: list[int], signed: Signature) -> bool:
        """Do all ranks exchange equal blocks? `sends[j]`: elements from here to rank j; `takes[j]`: those that this rank expects of it.

        Splits are a rank's own: those of one may happen to be equal where the others' are not, and what one sends another may not expect, which
        would end gloo's process. So all ranks first tell each other what they are about to exchange (2 n numbers of each).
        Raises: RankDiverged, the same at all ranks, where they do not fit.
        """
        n = self.ranks
        if n > 1:
            options = AllgatherOptions()
            options.asyncOp = False
            told = torch.empty(n * 2 * n, dtype=torch.int64)
            tell = builtin_call(self.engine, "all-to-all", self.builtin._allgather_base, [0])
            tell(told, torch.tensor([*sends, *takes]), options, signed=signed)
            sent, taken = told.view(n, 2, n).unbind(1)
        else:
            sent, taken = torch.tensor([sends]), torch.tensor([takes])
        wrong = (sent != taken.t()).nonzero().tolist()
        if wrong:
            source, target = wrong[0]
            self._unlike(sent.tolist(), taken.tolist(), source, target, signed)
        return bool((sent == sent[0, 0]).all())

    def _unlike(self, sent: list[list[int]], taken: list[list[int]], source: int, target: int, signed: Signature) -> None:
        """Raises: RankDiverged. Whose splits fit no other rank's is to blame, else the receiver."""
        names, call = self.engine.global_ranks, call_text(signed[0])
        unfit = [sum((sent[r][o] != taken[o][r]) + (sent[o][r] != taken[r][o]) for o in range(self.ranks)) for r in range(self.ranks)]
        odd = max((target, source), key=lambda r: unfit[r])
        what = f"rank {names[source]} calls {call} with splits {_short(sent[source])} and sends {sent[source][target]} elements"
        what += f" to rank {names[target]}, which calls it with splits {_short(taken[target])} of what comes and expects {taken[target][source]}"
        hint = "what rank i sends to rank j (its input split j) is what j expects of i (its output split i): exchange the counts first"
        error = RankDiverged(what, where=f"rank {names[odd]}", hint=hint, data={"rank": names[odd], "group_rank": odd})
        raise self.engine.diverged(error, "all-to-all")


def _short(splits: list[int]) -> str:
    return str(splits) if len(splits) <= MAX_SHOWN_SPLITS else f"[{', '.join(map(str, splits[:MAX_SHOWN_SPLITS]))}, ...]"
