"""Tensors through a switch for as long as it serves, then among the hosts: no call is lost, none is summed twice.

When a switch dies or gives a job up, some workers may have the result of a call that others lack, and be in the next call already (never further: a
call needs everyone). So the hosts first agree on how many calls each has finished; whoever is ahead gives its last result to those behind. From
then on every call is the hosts' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import GroupFailed, LinkLost, MeshwrightError, NotFinite, RunTimeout, Unsupported
from .client import Seat, Stream
from .sockets import Address

__all__ = ["GlooHosts", "Hosts", "Reducer"]

MAX_INT32 = 2**31 - 1
FOLDED_AT_ONCE = 1 << 20  # numbers that every worker has of all others while hosts fold


class Hosts(Protocol):
    """What hosts do without a switch, all of them together."""

    def most(self, *values: int) -> list[int]:
        """Of each value, the largest of all workers'."""
        ...

    def give(self, array: NDArray[Any], source: int) -> None:
        """Worker `source`'s array to all, in place."""
        ...

    def all_reduce(self, array: NDArray[Any]) -> None:
        """The sum, in place."""
        ...

    def gather(self, words: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Every worker's words, of which each may have as many as it likes, in order of workers."""
        ...


class GlooHosts:
    """A torch process group whose ranks are the job's workers, by `rank` (of the job, not of a switch)."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def most(self, *values: int) -> list[int]:
        import torch
        import torch.distributed as dist

        found, options = torch.tensor(values), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.group.allreduce([found], options).wait()
        return [int(x) for x in found]

    def give(self, array: NDArray[Any], source: int) -> None:
        import torch

        self.group.broadcast(torch.from_numpy(array.reshape(-1)), source).wait()

    def all_reduce(self, array: NDArray[Any]) -> None:
        import torch

        self.group.allreduce([torch.from_numpy(array.reshape(-1))]).wait()

    def gather(self, words: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        import torch

        [longest] = self.most(len(words))
        mine = torch.zeros(longest + 1, dtype=torch.int32)  # how many, then the words, as long as the longest
        mine[0], mine[1 : 1 + len(words)] = len(words), torch.from_numpy(words)
        found = [torch.empty_like(mine) for _ in range(self.group.size())]
        self.group.allgather([found], [mine]).wait()
        return [x.numpy()[1 : 1 + int(x[0])] for x in found]


class Reducer:
    """Worker `rank` of `workers`. `why`: the error for which the hosts took over, None while the switch serves. `folds`: the job's mode is `tree`."""

    def __init__(
        self, stream: Stream | None, hosts: Hosts, rank: int, workers: int, why: MeshwrightError | None = None, *, folds: bool = False
    ) -> None:
        self.stream, self.hosts, self.rank, self.workers, self.why, self.folds = stream, hosts, rank, workers, why, folds
        self.done, self.last = 0, np.zeros(0, np.int32)

    @classmethod
    def join(cls, switch: Address, seat: Seat, hosts: Hosts, rank: int) -> Reducer:
        """As `Stream.join`; where it fails for one, hosts do everything."""
        stream: Stream | None = None
        why: MeshwrightError | None = None
        try:
            stream = Stream.join(switch, seat)
        except (Unsupported, LinkLost, RunTimeout) as error:
            why = error
        if any(hosts.most(int(stream is None))):
            if stream is not None:
                stream.abandon("another worker could not join")
                why = GroupFailed("another worker could not join the switch", where=seat.job)
            stream = None
        return cls(stream, hosts, rank, seat.workers or seat.children, why, folds=seat.mode == "tree")

    def all_reduce(self, array: NDArray[Any], *, arithmetic: str = "") -> NDArray[Any]:
        """As `Stream.all_reduce`, in place, by default `tree` in a job of that mode, else `exact`. A tensor that the switch refuses, or loses, is
        summed by the hosts: in a job of mode `tree` along the same fold, to the same bits; else floats as they sum them.

        Raises: UsageError; RankFrozen; Unsupported where an int32 sum leaves 32 bits (at every worker).
        """
        arithmetic = arithmetic or ("tree" if self.folds else "exact")
        if self.stream is None:
            self._by_hosts(array)
        else:
            stream = self.stream
            self._through(stream, array, lambda: stream.all_reduce(array, arithmetic=arithmetic))
        self.done += 1
        return array

    def _through(self, stream: Stream, array: NDArray[Any], call: Callable[[], object]) -> None:
        """Make a call that changes `array`; where that loses the stream, the hosts do it."""
        given = array.copy()  # a part of it may be overwritten when the switch is lost
        try:
            call()
            self.last = array.copy()
        except (GroupFailed, LinkLost, NotFinite, Unsupported) as error:
            if not stream.closed:
                raise
            array[...] = given
            if self._agree(error, array):
                self._by_hosts(array)

    def close(self) -> None:
        """Wait until all have their results; where the switch is lost before, give what others lack. Raises: RunTimeout."""
        if self.stream is None:
            return
        try:
            self.stream.close()
        except (GroupFailed, LinkLost) as error:
            self._agree(error, self.last)
        self.stream = None

    def _agree(self, why: MeshwrightError, array: NDArray[Any]) -> bool:
        """Leave the switch. Whether the call in hand is still to be done: a worker that was behind has its result now."""
        self.stream, self.why = None, why
        most, behind = self.hosts.most(self.done, -self.done)
        if most == -behind:
            return True
        ahead = self.done == most
        [source] = self.hosts.most(self.rank if ahead else -1)
        self.hosts.give(self.last if ahead else array, source)
        return ahead

    def _by_hosts(self, array: NDArray[Any]) -> None:
        if array.dtype != np.int32:
            (self._fold if self.folds and array.dtype == np.float32 else self.hosts.all_reduce)(array)
            return
        wide = array.astype(np.int64)
        self.hosts.all_reduce(wide)
        if wide.size and max(int(wide.max()), -int(wide.min()) - 1) > MAX_INT32:
            raise Unsupported("the sum leaves 32 bits", hint="send it as float32, or in parts")
        array[...] = wide

    def _fold(self, array: NDArray[np.float32]) -> None:
        """Everybody gets all contributions, and adds them up along the tree over workers."""
        flat = array.reshape(-1)
        for first in range(0, flat.size, FOLDED_AT_ONCE):
            part = flat[first : first + FOLDED_AT_ONCE]
            rows = [words.view(np.float32) for words in self.hosts.gather(part.view(np.int32))]
            while len(rows) > 1:
                with np.errstate(all="ignore"):  # as the switch: infinite and other numbers are added as floats do
                    rows = [sum(rows[i + 1 : i + 2], rows[i]) for i in range(0, len(rows), 2)]
            part[:] = rows[0]
