"""What `step(batch)` returns: a number, which says what to write instead to a loop that would go on as if it were the loss of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError

__all__ = ["ACCUMULATE", "StepLoss"]

ACCUMULATE = (
    "leave it out; gradients are accumulated within a step: give step all samples of an update at once (plan with a batch of so many, "
    "microbatch= as large as fits), and do not divide the loss"
)
SCALED = frozenset((torch.Tensor.div, torch.Tensor.mul, torch.Tensor.__rmul__, torch.Tensor.to, torch.div, torch.mul))  # as loops do before backward


class StepLoss(torch.Tensor):  # type: ignore[misc]
    """Plain in all but that `backward`, of it or of a multiple of it, is refused by name. Whatever else is computed of it, and copies, are plain."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            raise UsageError("step(batch) has computed the gradients and updated the parameters already", where="loss.backward", hint=ACCUMULATE)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*(_plain(x) for x in args), **{k: _plain(v) for k, v in (kwargs or {}).items()})
        return found.as_subclass(cls) if func in SCALED and isinstance(found, torch.Tensor) and not found.dim() else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.as_subclass(torch.Tensor) if isinstance(value, StepLoss) else value
