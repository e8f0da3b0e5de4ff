"""When a device did what: events on its stream, as seconds of this process's clock.

A host that hands work to an accelerator is long done when the work begins, so its clock says nothing. `now` puts an event on the device's current
stream and gives its number; when the device has come to them all, numbers become seconds (`perf_counter`). One moment of both clocks is known:
that of `begin`, when the device was idle.
"""

from __future__ import annotations

import time
from collections.abc import MutableSequence
from typing import Any

import torch

__all__ = ["DeviceTime", "device_time"]

MS = 1e-3  # unit of `elapsed_time`


class DeviceTime:
    """Of one device. `module`: what `torch.get_device_module` gives for it: streams, events, `synchronize`."""

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module: Any = module or torch.get_device_module(device.type)
        self._events: list[Any] = []  # used again from `begin` to `begin`
        self._used, self._base, self._zero_s = 0, self._event(), 0.0

    def _event(self) -> Any:
        return self.module.Event(enable_timing=True)

    def begin(self) -> None:
        """Forget earlier moments. Waits until the device is idle."""
        self._used = 0
        self.module.synchronize(self.device)
        self._base.record(self.module.current_stream(self.device))
        self._zero_s = time.perf_counter()

    def now(self) -> float:
        """The number of a moment, which comes after all that the current stream has been given."""
        if self._used == len(self._events):
            self._events.append(self._event())
        self._events[self._used].record(self.module.current_stream(self.device))
        self._used += 1
        return float(self._used - 1)

    def settle(self, *columns: MutableSequence[float]) -> None:
        """Numbers of moments become seconds, in place. Waits until the device has come to them."""
        self.module.synchronize(self.device)
        for column in columns:
            for i, number in enumerate(column):
                column[i] = self._zero_s + MS * self._base.elapsed_time(self._events[int(number)])


def device_time(device: torch.device) -> DeviceTime | None:
    """None for processors: there the host's clock is right."""
    return None if device.type == "cpu" else DeviceTime(device)
