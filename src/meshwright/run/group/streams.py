"""Programs on tensors of an accelerator: waves of grouped messages (`waves`), on a stream of the group's own.

A collective is enqueued in the caller's thread and goes on by itself, as NCCL's own do: its stream first waits for what the caller has enqueued, and
`wait` of its work makes the caller's stream wait, not the thread. No thread of ours stands at a message, so a lost peer is noticed by the group's
control connections (a process that died) or by the transport's own watchdog (one that hangs); the group's verdict aborts the transport.
The streams are those of `torch.get_device_module`: on "cpu" they do nothing, and the same code runs there over gloo, which is how it is tested.
Limit: NCCL between several GPUs has not been run; no machine with two of them was at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import MeshwrightError
from ..executor.transport import grouped_calls, own_stream
from .call import Call, Session
from .reductions import Reduction
from .waves import Exchange, Messages, walk_waves

__all__ = ["DeviceRunner", "GroupedMessages", "StreamWork"]


class GroupedMessages:
    """`waves.Exchange` over a backend that makes calls as one group (NCCL).

    Its communicator must exist before, since a rank may have nothing to send or receive in a wave: `DeviceRunner` sees to it.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __call__(self, sends: Messages, receives: Messages) -> None:
        grouped_calls(self.backend, sends, receives).wait()  # for NCCL: the current stream waits


class DeviceRunner:
    """Runs the collectives of one group on one kind of device, in the order asked. `connect` makes the transport's connections, on all ranks at once,
    before the first; it is told the tensors' device, which a program may choose after it has made the group."""

    def __init__(self, kind: str, exchange: Exchange, ranks: int, connect: Callable[[torch.device], None], over: list[MeshwrightError]) -> None:
        self.exchange, self.ranks, self.connect, self.over = exchange, ranks, connect, over
        self.module: Any = torch.get_device_module(kind)
        self._stream: Any = None
        self._device: torch.device | None = None  # of the stream
        self._connected = set[torch.device]()

    def on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """What is enqueued within goes to the group's stream on the device, after what the caller's stream there has now. The current device may be
        another one."""
        if self._stream is None or self._device != device:
            self._stream, self._device = own_stream(device), device
        self._stream.wait_stream(self.module.current_stream(device))
        found: AbstractContextManager[Any] = self.module.stream(self._stream)
        return found

    def synchronize(self) -> None:
        """Wait, in this thread, for everything enqueued on the group's device."""
        self.module.synchronize(self._device)

    def run(self, call: Call, session: Session, reduction: Reduction | None, outputs: Any, after: Callable[[], None] | None) -> StreamWork:
        """Raises: what ended the group, what the transport raises when it is called."""
        if self.over:
            raise self.over[0]
        combine: Any = reduction.combine if reduction is not None else None
        with torch.inference_mode(), self.on_stream(call.given.device):
            if call.given.device not in self._connected:
                self.connect(call.given.device)
                self._connected.add(call.given.device)
            bound, finish = session.with_tensors(call)
            walk_waves(bound, self.exchange, combine)
            finish()
            if reduction is not None and reduction.divide and call.target is not None:
                call.target.div_(self.ranks)
            if after is not None:
                after()
            self._keep(call, outputs)
            return StreamWork(self, call.given.device, outputs)

    def _keep(self, call: Call, outputs: Any) -> None:
        """The allocator must not give these away before the group's stream is done with them."""
        if call.given.device.type != "cpu":
            for tensor in _tensors([call.source, call.target, outputs]):
                tensor.record_stream(self._stream)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


class StreamWork(dist._Work):  # type: ignore[misc]
    """Made on the group's stream; over when what is on it by then is. `wait` returns at once: the caller's stream waits."""

    def __init__(self, runner: DeviceRunner, device: torch.device, outputs: Any) -> None:
        super().__init__()
        self._runner, self._outputs, self._device = runner, outputs, device
        self._event: Any = runner.module.Event()
        self._event.record(runner.module.current_stream(device))
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type != "cpu" else None)
        self._future.set_result(outputs)  # remembers where the group's stream is, for those who read it

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._runner.over:
            raise self._runner.over[0]
        self._runner.module.current_stream(self._device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed() and not self._runner.over

    def exception(self) -> BaseException | None:
        return self._runner.over[0] if self._runner.over else None

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Any:
        return self._future
