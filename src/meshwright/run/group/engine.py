"""What runs behind a process group: its plans, its thread, its messages, its recorder, and what happens when a wait fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...errors import GroupFailed, MeshwrightError
from ...fabric import Fabric
from .messages import GlooMessages
from .plans import Chosen, GroupPlans
from .recorder import Recorder
from .settings import Settings
from .worker import Lost, Task, Worker

__all__ = ["Engine"]


class Engine:
    """Made with the group; thread and connections only when the first planned collective comes."""

    def __init__(
        self, settings: Settings, store: Any, rank: int, size: int, timeout_s: float, *, global_ranks: Sequence[int], devices: Sequence[str],
        fabric: Fabric | None,
    ) -> None:  # fmt: skip
        self.settings, self.store, self.rank, self.size = settings, store, rank, size
        self.global_ranks = tuple(global_ranks)
        self.timeout_s = settings.timeout_s or timeout_s
        own = dist.PrefixStore("meshwright", store)
        self.plans = GroupPlans(settings, own, rank, size, devices=devices, fabric=fabric, timeout_s=self.timeout_s)
        if size > 1:
            self.plans.agree()
        self.recorder = Recorder()
        self._worker: Worker | None = None
        self._messages: GlooMessages | None = None
        self._closed: MeshwrightError | None = None

    def choose(self, op: str, root: int, size_bytes: int) -> Chosen | str:
        return self.plans.choose(op, root, size_bytes)

    def submit(self, task: Task) -> None:
        if self._worker is None:
            self._messages = GlooMessages(dist.PrefixStore("meshwright/messages", self.store), self.rank, self.size, self.timeout_s)
            self._worker = Worker(self._messages, self.recorder, self.timeout_s, self._diagnose)
        self._worker.submit(task)

    def raise_if_failed(self) -> None:
        error = self._closed or (self._worker.failed if self._worker is not None else None)
        if error is not None:
            raise error

    def set_timeout(self, timeout_s: float) -> None:
        if self.settings.timeout_s is None:
            self.timeout_s = timeout_s
            if self._worker is not None:
                self._worker.timeout_s = timeout_s

    def _diagnose(self, lost: Lost, task: Task) -> MeshwrightError:
        code = task.session.code
        step = code.unrolled.describe(lost.step)
        return GroupFailed(f"lost rank {self.global_ranks[lost.peer]}: {lost.__cause__}", where=step, data={"rank": lost.peer, "step": lost.step})

    def abort(self) -> None:
        if self._messages is not None:
            self._messages.abort()

    def close(self) -> None:
        """Ends the thread. A collective still under way is given up."""
        self._closed = GroupFailed("the process group was destroyed", hint="make a new one with init_process_group or new_group")
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(0.2)
            if worker.alive:
                self.abort()
                worker.close()
        self._messages = None
