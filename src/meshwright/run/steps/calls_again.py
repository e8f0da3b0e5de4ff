"""Running an ATen call a second time: what it makes, where its tensors lie, and the random numbers that it drew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...capture.torch_private import storage_key
from ...capture.work import tensors_in

__all__ = ["Piece", "generator_state", "makes_storage", "random_state", "restore_generator"]


@dataclass(frozen=True)
class Piece:
    """A tensor as a place in a storage that is made again."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(number: int, x: torch.Tensor) -> Piece:
        return Piece(number, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def within(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor, in the storage of `x`."""
        return torch.empty(0, dtype=self.dtype, device=x.device).set_(x.untyped_storage(), self.offset, self.size, self.stride)


def makes_storage(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a call makes or changes a storage; views and detaches do not."""
    if func._schema.is_mutable:
        return True
    given = {storage_key(x) for x in tensors_in((args, kwargs))}
    return any(storage_key(x) not in given for x in tensors_in(result))


def random_state(func: Any, args: Any, kwargs: Any) -> tuple[str, torch.Tensor] | None:
    """(device, state of its generator) for a call that draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    device = next((str(x.device) for x in tensors_in((args, kwargs))), str(kwargs.get("device") or "cpu"))
    return device, generator_state(device)


def generator_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def restore_generator(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
