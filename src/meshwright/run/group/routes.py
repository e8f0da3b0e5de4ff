"""What may run an operation of a process group, and the small tests on tensors that decide it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .call import Session
from .plans import Chosen
from .trials import Trials

__all__ = ["Builtin", "Route", "Trial", "alike", "copier", "dense"]


@dataclass(frozen=True)
class Route:
    session: Session
    chosen: Chosen
    name: int  # for the recorder: what of the program's hash fits 63 bits


@dataclass(frozen=True)
class Trial:
    """Programs, the predicted choice first, and the built-in backend (None), of which one is being found."""

    options: list[Route | None]
    size_bytes: int
    trials: Trials
    key: Any  # of the routes


class Builtin(NamedTuple):
    """The built-in backend's own call, made where no program runs. The last argument is torch's options."""

    run: Callable[..., Any]
    args: tuple[Any, ...]


def dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(dense(t) and t.numel() == first.numel() and t.dtype == first.dtype and t.device == first.device for t in tensors)


def copier(targets: Sequence[torch.Tensor], flat: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        first = 0
        for target in targets:
            target.detach().copy_(flat[first : first + target.numel()].view(target.shape))
            first += target.numel()

    return copy
