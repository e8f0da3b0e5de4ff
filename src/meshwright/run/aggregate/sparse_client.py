"""A worker's sparse sums through switches: pairs of an index and a float32 go up, the sum's pairs come down (see `sparse_rounds`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import GroupFailed, Unsupported, UsageError
from .client import ARITHMETIC, Stream
from .frames import signature
from .protocol import MAX_CHUNK
from .sparse_rounds import MAX_INDEX, span_of
from .worker_loop import BLOCKS, CALL, END, FIRST, LEFT, PAIRS, SPAN, tensor_of

__all__ = ["SparseStream", "pairs_of"]


def pairs_of(array: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(ascending places, values) of the elements that are not zero, of the array laid flat."""
    flat = array.reshape(-1)
    keys = np.flatnonzero(flat).astype(np.int32)
    return keys, flat[keys]


class SparseStream(Stream):
    """As `Stream`, of a job whose seat has `mode=sparse_mode(span)`. Equal bits on every run with an equal tree, span and packet size."""

    def all_reduce_pairs(self, keys: NDArray[Any], values: NDArray[np.float32], elements: int) -> NDArray[np.float32]:
        """The sum, [elements] float32, of all workers' ascending `keys` below `elements` with a value each.

        Floats are added as floats do: NaN and infinity pass. Raises: UsageError (the stream goes on), and as `Stream.all_reduce`.
        """
        if self.closed:
            raise GroupFailed("the stream is closed", hint="join again")
        span = span_of(self.seat.mode)
        if not span:
            raise UsageError(f"a job of mode {self.seat.mode!r} takes no pairs", where="all_reduce_pairs", hint="mode=sparse_mode(span)")
        if not 0 <= elements < MAX_INDEX or keys.dtype.kind not in "iu" or values.dtype != np.float32 or keys.ndim != 1 or keys.shape != values.shape:
            raise UsageError(f"whole keys and as many float32 values, of 0 to {MAX_INDEX - 1} elements", where="all_reduce_pairs")
        if len(keys) and not (keys[0] >= 0 and keys[-1] < elements and bool((keys[1:] > keys[:-1]).all())):
            raise UsageError(f"keys are not ascending places below {elements}", where="keys")
        total = np.zeros(elements, np.float32)
        if elements:
            self._exchange(np.array(keys, np.int32), np.array(values), total, span)
        self.calls += 1
        return total

    def _exchange(self, keys: NDArray[np.int32], values: NDArray[np.float32], total: NDArray[np.float32], span: int) -> None:
        if int(self.flow.due.max()) + 4 * len(total) + self.slots >= MAX_CHUNK:  # rounds of a slot: fewer than its numbers, of all workers
            raise Unsupported(f"a stream has at most {MAX_CHUNK} chunks", hint="join again")
        blocks, numbers = -(-len(total) // span), self.flow.numbers
        first = np.searchsorted(keys, np.minimum(np.arange(blocks + 1, dtype=np.int64) * span, MAX_INDEX - 1)).astype(np.int64)
        first[-1] = len(keys)
        numbers[[FIRST, END]] = 0
        numbers[[LEFT, BLOCKS, SPAN]] = blocks, blocks, span
        numbers[CALL] = signature(self.calls, len(total), len(ARITHMETIC) + 2)
        self._collect(tensor_of(values, total, keys, first), PAIRS)
