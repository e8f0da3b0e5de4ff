"""One rank of a sparse all-reduce over a torch process group: requests of its protocol become messages and collectives.

Any group whose tensors may lie in host memory: gloo, or "meshwright", which names the rank at fault when one is lost. Every wait has the
deadline; a rank that loses a connection ends its other waits too (`messages.end_waits`), so that no survivor waits for one that has left.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch

from ...errors import GroupFailed, MeshwrightError, RunTimeout
from ..group.messages import end_waits
from .protocol import AllGather, Message, Post, Protocol, Request, Wait

__all__ = ["TorchRunner"]

TAGS = {"regions": 1, "balance": 2, "gather": 3, "tree": 4, "control": 5}
PHASES = 8
SMALL_BYTES = 1 << 18  # sums up to here are made in two rounds of direct messages: the backend's ring takes 2(P-1), each a wait for somebody's turn
T = TypeVar("T")
_END_TAG = (1 << 31) - 11


class TorchRunner:
    """`run(protocol, step)` to its end. After a failure the group is unusable and every later call raises the same error."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self.rank, self.size = group.rank(), group.size()
        self.engine = getattr(group, "engine", None)  # of a "meshwright" group
        self.messages = getattr(group, "builtin", group)
        self.failed: MeshwrightError | None = None

    def run(self, protocol: Protocol[T], step: int) -> T:
        if self.failed is not None:
            raise self.failed
        answer: Any = None
        request: Request | None = None
        deadline_s = monotonic() + self.timeout_s
        try:
            while True:
                request = protocol.send(answer)
                answer = self._do(request, step, timedelta(seconds=max(0.001, deadline_s - monotonic())))
        except StopIteration as end:
            result: T = end.value
            return result
        except MeshwrightError:
            raise
        except RuntimeError as error:
            self.failed = self._explained(error, request, step)
            raise self.failed from error

    def _do(self, request: Request, step: int, limit: timedelta) -> Any:
        if isinstance(request, Post):
            return request, self._post(request, step)
        if isinstance(request, Wait):
            for work in request.ticket[1]:
                work.wait(limit)
            return None
        if self.size == 1:
            return request.row[None] if isinstance(request, AllGather) else None
        if isinstance(request, AllGather):
            rows = np.empty((self.size, len(request.row)), np.int64)
            rows[self.rank] = request.row
            self._exchange([request.row] * self.size, list(rows), step, limit)
            return rows
        if request.data.nbytes > SMALL_BYTES:
            self.messages.allreduce([torch.from_numpy(request.data)]).wait(limit)
        else:
            self._add_up(request.data, step, limit)
        return None

    def _exchange(self, outgoing: list[Any], incoming: list[Any], step: int, limit: timedelta) -> None:
        """An array to every other rank and one from each, all under way at once."""
        turn = [(self.rank + i) % self.size for i in range(1, self.size)]
        sends, receives = (tuple(Message(p, side[p]) for p in turn) for side in (outgoing, incoming))
        for work in self._post(Post("control", sends, receives), step):
            work.wait(limit)

    def _add_up(self, data: Any, step: int, limit: timedelta) -> None:
        """Each rank adds up one part of everybody's `data`, by rank, and sends it to all."""
        parts = np.array_split(data, self.size)
        room = np.empty((self.size, len(parts[self.rank])), data.dtype)
        room[self.rank] = parts[self.rank]
        self._exchange(parts, list(room), step, limit)
        parts[self.rank][:] = room.sum(0, dtype=data.dtype)
        self._exchange([parts[self.rank]] * self.size, parts, step, limit)

    def _post(self, request: Post, step: int) -> list[Any]:
        tag = (step * PHASES + TAGS[request.phase]) % _END_TAG
        works = [self.messages.recv([torch.from_numpy(m.data)], m.peer, tag) for m in request.receives if len(m.data)]
        return works + [self.messages.send([torch.from_numpy(m.data)], m.peer, tag) for m in request.sends if len(m.data)]

    def _explained(self, error: RuntimeError, request: Request | None, step: int) -> MeshwrightError:
        """What a lost connection or deadline is called; the other waits of this rank's group end with it."""
        late = "timed out" in str(error).lower()
        if self.engine is not None:
            return self.engine.lost_builtin("deadline" if late else "closed")  # type: ignore[no-any-return]
        end_waits(self.messages, self.rank, self.size, _END_TAG)
        waited = request.ticket[0] if isinstance(request, Wait) else request
        peers = sorted({m.peer for m in _messages(waited)})
        phase = getattr(waited, "phase", "")
        what = f"no answer within {self.timeout_s:g} s" if late else "a connection was closed"
        text = f"rank {self.rank} gave up in step {step} ({phase}, with rank {', '.join(map(str, peers)) or 'all'}): {what}"
        data = {"rank": self.rank, "peers": peers, "step": step, "phase": phase, "error": str(error)[:300]}
        hint = "the residual is that of the last complete step; use the meshwright backend to hear which rank is at fault"
        return (RunTimeout if late else GroupFailed)(text, where="sparse all-reduce", hint=hint, data=data)


def _messages(request: Any) -> tuple[Message, ...]:
    return request.sends + request.receives if isinstance(request, Post) else ()
