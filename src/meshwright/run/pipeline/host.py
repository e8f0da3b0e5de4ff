"""What a stage saves for its backward, moved to the host's memory and back at the plan's places.

Autograd keeps a `Waiting` in place of each saved tensor of such a forward: the tensor while it is on the device, its copy while it is not.
Left where they are: parameters and buffers of the stage, and the stage's input, which is the border's.
"""

from __future__ import annotations

import torch
from torch import nn

from ...capture.torch_private import storage_key
from ...errors import CheckFailed
from ..steps.stand_in import StandIn
from ..steps.variants import Packed, host, unpacked

__all__ = ["Waiting", "WaitingTensors"]


class Waiting(StandIn):
    """A saved tensor that is on the device or in the host's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.here: torch.Tensor | None = tensor
        self.there: Packed | None = None
        self.device = tensor.device

    def tensor(self) -> torch.Tensor:
        if self.here is None:
            raise CheckFailed("a backward asks for what is still in the host's memory", where="offload", hint="make the plan again")
        return self.here

    def leave(self) -> None:
        if self.here is not None:
            self.there, self.here = host(self.here), None

    def come(self) -> None:
        if self.there is not None:
            self.here, self.there = unpacked(self.there, self.device), None


class WaitingTensors:
    """Those of one stage and micro-batch. `refer`: what autograd keeps (`SegmentModule.refer`); a tensor that is saved twice is moved once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: dict[tuple[object, ...], Waiting] = {}
        self.stays: set[object] = set()

    def begin(self, *inputs: torch.Tensor) -> None:
        self.found.clear()
        self.stays = {storage_key(x) for x in (*self.module.parameters(), *self.module.buffers(), *inputs)}

    def refer(self, x: torch.Tensor) -> object:
        if storage_key(x) in self.stays:
            return x
        key = (storage_key(x), tuple(x.shape), x.stride(), x.storage_offset())
        return self.found.setdefault(key, Waiting(x))

    def leave(self) -> None:
        for w in self.found.values():
            w.leave()

    def come(self) -> None:
        """Back on the device; from here on autograd alone keeps them."""
        for w in self.found.values():
            w.come()
        self.found.clear()

    @property
    def here_bytes(self) -> int:
        """On the device."""
        return sum(w.here.numel() * w.here.element_size() for w in self.found.values() if w.here is not None)
