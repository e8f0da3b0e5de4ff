"""A process group whose sums have the bits that were asked for: the fold of a tree, or exact sums; and a record of them for `run doctor`.

`tree`: every sum of floating-point numbers runs by a program whose contract says so, made for the group's fabric, or where none is known for an
ordinary switch: the bits are the same. What no such program can run is refused; the built-in backend adds in an order of its own. Integers wrap
around alike in any order, so their sums may go anywhere.
`exact`: sums become sums of integers (`integers`), which may go anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import Unsupported
from .bits import BitsRecord
from .engine import Engine
from .group import MeshwrightGroup, Tensors
from .integers import Encoded, exponents, from_integers, is_finite, to_integers
from .reductions import operator_name
from .routes import Builtin, alike, in_a_row
from .signatures import REDUCING, Signature
from .work import JoinedWork

__all__ = ["ReproducibleGroup"]

ORDERLESS = ("one rank", "no elements")  # why nothing is added


class ReproducibleGroup(MeshwrightGroup):
    """See the module's docstring. `engine.settings.reproducible`: "tree", "exact", or another where sums are only recorded."""

    def __init__(self, engine: Engine, builtin: Any) -> None:
        super().__init__(engine, builtin)
        self._quick.uninstall(self)  # every sum is looked at
        folder, world = engine.settings.record_bits, dist.get_world_size() if dist.is_initialized() else engine.size
        self.record = BitsRecord.of(folder, tuple(engine.global_ranks), engine.rank, world) if folder else None

    def _recorded(self, op: str, given: torch.Tensor, result: Callable[[], torch.Tensor | None], builtin: Builtin) -> Callable[[], None] | None:
        """What writes down a sum of floating-point numbers when it is done."""
        if self.record is None or op not in REDUCING or not _rounds(builtin.args):
            return None
        return self.record.begin(op, operator_name(builtin.args[-1].reduceOp), given, result)

    @property
    def level(self) -> str:
        return self.engine.settings.reproducible

    # ---- tree --------------------------------------------------------------------------------------------------
    def _fall(self, op: str, reason: str, builtin: Builtin, signed: Signature | None = None, *, lasting: bool = False) -> Any:
        """Raises: Unsupported, equally at all ranks, for a sum whose order would be the built-in backend's."""
        if self.level == "tree" and op in REDUCING and reason not in ORDERLESS and _rounds(builtin.args):
            hint = "give float16, bfloat16, float32 or float64 on the CPU with SUM, AVG, PRODUCT, MIN or MAX; or MESHWRIGHT_REPRODUCIBLE=run"
            raise Unsupported(f"no program folds this {op} ({reason}), and the built-in backend adds in an order of its own", where=op, hint=hint)
        return super()._fall(op, reason, builtin, signed, lasting=lasting)

    # ---- exact -------------------------------------------------------------------------------------------------
    def _in_place(self, op: str, tensors: Tensors, root: int, builtin: Builtin) -> Any:
        end = self._recorded(op, tensors[0], lambda: tensors[0] if op == "all-reduce" or self.rank() == root else None, builtin)
        work = self._sum_in_place(op, tensors, root, builtin)
        return work if end is None else JoinedWork(tensors, [work], end)

    def _between(self, op: str, source: torch.Tensor, target: torch.Tensor, builtin: Builtin, fits: bool = True) -> Any:
        end = self._recorded(op, source, lambda: target, builtin)
        work = self._sum_between(op, source, target, builtin, fits)
        return work if end is None else JoinedWork([target], [work], end)

    def _sum_in_place(self, op: str, tensors: Tensors, root: int, builtin: Builtin) -> Any:
        average = self._as_integers(op, tensors, builtin)
        if average is None:
            return super()._in_place(op, tensors, root, builtin)
        self._arguments.require_one(op, tensors, root)
        tensor = tensors[0]
        rows = in_a_row(tensor).view(1, -1)
        agreed = self._agreed(op, rows)
        sums = to_integers(rows, agreed, self._ranks)
        options = _options(builtin.args[-1], dist.AllreduceOptions() if op == "all-reduce" else dist.ReduceOptions())
        if op == "reduce":
            options.rootRank = root
        work = (self.allreduce if op == "all-reduce" else self.reduce)([sums], options)

        def finish() -> None:
            if op == "all-reduce" or self.rank() == root:
                tensor.detach().copy_(from_integers(sums, agreed, self._ranks, average=average).view(tensor.shape))

        return JoinedWork(tensors, [work], finish)

    def _sum_between(self, op: str, source: torch.Tensor, target: torch.Tensor, builtin: Builtin, fits: bool) -> Any:
        average = self._as_integers(op, [source], builtin)
        if average is None:
            return super()._between(op, source, target, builtin, fits)
        self._arguments.require_pair(op, source, target, fits)
        rows = in_a_row(source).view(self._ranks, -1)
        agreed = self._agreed(op, rows)
        given = to_integers(rows, agreed, self._ranks)
        sums = given.new_empty(given.numel() // self._ranks)
        work = self.reduce_scatter_single(sums, given, _options(builtin.args[-1], dist.ReduceScatterOptions()))

        def finish() -> None:
            found = from_integers(sums, agreed, self._ranks, row=self.rank(), average=average)
            target.detach().copy_(found.view(target.shape))

        return JoinedWork([target], [work], finish)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if (self.level != "exact" and self.record is None) or not alike([*inputs[0], outputs[0]]):
            return super().reduce_scatter(outputs, inputs, opts)
        self._arguments.require_lists("reduce-scatter", outputs, inputs, "inputs")
        return self.reduce_scatter_single(outputs[0], torch.cat([in_a_row(t) for t in inputs[0]]), opts)

    def _as_integers(self, op: str, tensors: Tensors, builtin: Builtin) -> bool | None:
        """Is the result divided by the ranks; None where the operation is none that adds up numbers that round.

        Raises: Unsupported for products, which integers with a common exponent do not have, and for complex numbers.
        """
        if self.level != "exact" or op not in REDUCING or self._ranks < 2 or not tensors[0].numel() or not _rounds(builtin.args):
            return None
        operator = operator_name(builtin.args[-1].reduceOp)
        if operator in ("min", "max"):
            return None
        if operator not in ("sum", "avg") or tensors[0].is_complex():
            text = f"exact sums are of SUM and AVG over real numbers, not {operator or 'this operator'} over {tensors[0].dtype}"
            raise Unsupported(text, where=op, hint="MESHWRIGHT_REPRODUCIBLE=tree folds products too")
        return operator == "avg"

    def _agreed(self, op: str, rows: torch.Tensor) -> Encoded:
        """The exponents of all ranks' blocks. Raises: Unsupported, equally at all ranks, where some number is not finite."""
        own = exponents(rows)
        most = dist.AllreduceOptions()
        most.reduceOp = dist.ReduceOp.MAX
        self.allreduce([own.exponent], most).wait()
        if not is_finite(own):
            text = "some rank's numbers are infinite or not numbers, which no integer stands for; nothing was sent"
            raise Unsupported(text, where=op, hint="MESHWRIGHT_REPRODUCIBLE=tree adds them as floating point does")
        return own


def _rounds(args: tuple[Any, ...]) -> bool:
    """Do sums of these arguments' tensors depend on their order? Those of integers do not."""
    first: Any = args[0]
    while isinstance(first, (list, tuple)):
        if not first:
            return False
        first = first[0]
    return bool(first.is_floating_point() or first.is_complex())


def _options(given: Any, made: Any) -> Any:
    """Options of a sum of integers in the place of another sum."""
    made.reduceOp = dist.ReduceOp.SUM
    made.asyncOp = given.asyncOp
    return made
