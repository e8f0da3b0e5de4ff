"""What may run an operation of a process group, and the small tests on tensors that decide it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import WrongCall
from .call import Session
from .plans import Chosen
from .trials import Trials

__all__ = ["Builtin", "Route", "Routes", "Trial", "alike", "copier", "dense", "in_a_row", "packed", "side_by_side", "unpack"]

MAX_ROUTES = 512  # of distinct calls that are kept: one with its code and staging takes some 44 kB, and lengths of tokens never repeat


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


class Routes(dict[Any, "Route | Trial | str"]):
    """The routes of the latest distinct calls, `MAX_ROUTES` at most: the one asked for the longest time ago goes first. `forget(session)` hears of
    a program's, `over()` of one to the built-in backend, whose calls are not asked about each time (`quick_calls`), so those go in the order in
    which they came.

    A trial under way stays: all ranks must take its turns together.
    """

    def __init__(self, forget: Callable[[Session], None], over: Callable[[], None]) -> None:
        super().__init__()
        self.forget, self.over = forget, over

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key)
        if found is None:
            return default
        if not isinstance(found, str):
            super().__setitem__(key, self.pop(key))  # last again: a dictionary keeps the order in which keys came
        return found

    def __setitem__(self, key: Any, route: Route | Trial | str) -> None:
        super().__setitem__(key, route)
        while len(self) > MAX_ROUTES:
            old = next((k for k, r in self.items() if not isinstance(r, Trial) and k != key), None)
            if old is None:
                return
            gone = self.pop(old)
            if isinstance(gone, Route):
                self.forget(gone.session)
            else:
                self.over()


class Builtin(NamedTuple):
    """The built-in backend's own call, made where no program runs. The last argument is torch's options."""

    run: Callable[..., Any]
    args: tuple[Any, ...]


def dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(dense(t) and t.numel() == first.numel() and t.dtype == first.dtype and t.device == first.device for t in tensors)


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in row-major order, side by side: a view where they lie so, else a copy.

    `reshape` alone would keep the gaps of a view with one dimension.
    """
    return tensor.detach().contiguous().view(-1)


def copier(targets: Sequence[torch.Tensor], flat: torch.Tensor) -> Callable[[], None]:
    """Puts the parts of `flat` into the targets. Raises: WrongCall where elements of one share memory."""
    for target in targets:
        require_own_places(target)

    def copy() -> None:
        first = 0
        for target in targets:
            target.detach().copy_(flat[first : first + target.numel()].view(target.shape))
            first += target.numel()

    return copy


def side_by_side(given: Any) -> bool:
    """Do the elements of all tensors among these arguments, in lists or not, lie side by side? Sparse ones count as such."""
    if isinstance(given, torch.Tensor):
        return not dense(given) or given.is_contiguous()
    return all(map(side_by_side, given)) if isinstance(given, (list, tuple)) else True


def packed(given: Any, back: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> Any:
    """The argument with copies side by side of its tensors that have gaps; `back` takes (tensor, copy), for `unpack`.

    Raises: WrongCall where the tensor is to be written and its elements share memory.
    """
    if isinstance(given, (list, tuple)):
        return [packed(x, back) for x in given]
    if side_by_side(given):
        return given
    copy = given.detach().contiguous()
    if back is not None:
        require_own_places(given)
        back.append((given, copy))
    return copy


def unpack(back: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, copy in back:
        tensor.detach().copy_(copy)


def require_own_places(target: torch.Tensor) -> None:
    """Raises: WrongCall where elements of a tensor that is to be written share memory (`expand`)."""
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        hint = "hand over `tensor.contiguous()`, and use what it then holds"
        raise WrongCall(f"elements of a tensor of shape {tuple(target.shape)} share memory, so it cannot hold a result", hint=hint)
