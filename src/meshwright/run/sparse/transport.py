"""One rank of a sparse all-reduce over a torch process group: its port, and the waits for what it posted.

Any group whose tensors may lie in host memory: gloo, or "meshwright", which names the rank at fault when one is lost. Every wait has the
deadline; a rank that loses a connection ends its other waits too (`messages.end_waits`), so that no survivor waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import torch

from ...errors import GroupFailed, MeshwrightError, RunTimeout
from ..group.messages import end_waits
from ..group.walk import Wait
from .protocol import Protocol, Request
from .walk import Place, Words

__all__ = ["TorchRunner"]

MESSAGES = 32  # of a channel in a step that tags tell apart
T = TypeVar("T")
_END_TAG = (1 << 31) - 11


class TorchRunner:
    """`run(step of a rank, its number)` to its end; the port of its messages. After a failure the group is unusable and every later call raises the
    same error."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.size = group.rank(), group.size()
        self.engine = getattr(group, "engine", None)  # of a "meshwright" group
        self.messages = getattr(group, "builtin", group)
        self.failed: MeshwrightError | None = None
        self.step = 0
        self.phase, self.peers = "", [self.rank]  # of what is posted or waited for

    def send(self, data: Words, peer: int, tag: int, at: Place) -> Any:
        self.phase, self.peers = at.phase, [peer]
        return self.messages.send([torch.from_numpy(data)], peer, self._tag(tag))

    def receive(self, data: Words, peer: int, tag: int, at: Place) -> Any:
        self.phase, self.peers = at.phase, [peer]
        return self.messages.recv([torch.from_numpy(data)], peer, self._tag(tag))

    def run(self, protocol: Protocol[T], step: int, phase: Callable[[int], str] = lambda step: "") -> T:
        """`phase`: of a program's step, for messages."""
        if self.failed is not None:
            raise self.failed
        self.step = step
        deadline_s = monotonic() + self.timeout_s
        try:
            while True:
                request = next(protocol)
                self._wait(request, phase, timedelta(seconds=max(0.001, deadline_s - monotonic())))
        except StopIteration as end:
            result: T = end.value
            return result
        except MeshwrightError:
            raise
        except RuntimeError as error:
            self.failed = self._explained(error)
            raise self.failed from error

    def _wait(self, request: Request, phase: Callable[[int], str], limit: timedelta) -> None:
        if isinstance(request, Wait):
            self.phase, self.peers = phase(request.step), [request.peer]
            request.work.wait(limit)
        elif self.size > 1:
            self.phase, self.peers = request.phase, []
            self.messages.allreduce([torch.from_numpy(request.data)]).wait(limit)

    def _tag(self, number: int) -> int:
        return (self.step * MESSAGES + number % MESSAGES) % _END_TAG

    def _explained(self, error: RuntimeError) -> MeshwrightError:
        """What a lost connection or deadline is called; the other waits of this rank's group end with it."""
        late = "timed out" in str(error).lower()
        if self.engine is not None:
            return self.engine.lost_builtin("deadline" if late else "closed")  # type: ignore[no-any-return]
        end_waits(self.messages, self.rank, self.size, _END_TAG)
        what = f"no answer within {self.timeout_s:g} s" if late else "a connection was closed"
        text = f"rank {self.rank} gave up in step {self.step} ({self.phase}, with rank {', '.join(map(str, self.peers)) or 'all'}): {what}"
        data = {"rank": self.rank, "peers": self.peers, "step": self.step, "phase": self.phase, "error": str(error)[:300]}
        hint = "the residual is that of the last complete step; use the meshwright backend to hear which rank is at fault"
        return (RunTimeout if late else GroupFailed)(text, where="sparse all-reduce", hint=hint, data=data)
