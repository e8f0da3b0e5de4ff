"""Losses by name, and the module that is captured: model and loss as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.errors import UnknownName, UsageError

from .assigned_buffers import assigned_in_place
from .calling import Calling, described, loss_of, parts_of, prediction_of, scalars_in
from .live import LossModule, as_function, reduces_to
from .resolve import match_hint, place_of, resolve_function
from .user_gradients import refuse_loss_parameters

__all__ = ["CHANNELS_LAST", "LOSSES", "Objective", "has_images", "kept_tensors", "loss_function"]

LOSSES = ("cross-entropy", "mse", "output")


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the last dimension of `output`; `target` holds class indices, or probabilities of `output`'s shape."""
    classes = output.shape[-1]
    if target.is_floating_point():
        return F.cross_entropy(output.reshape(-1, classes), target.reshape(-1, classes))
    return F.cross_entropy(output.reshape(-1, classes), target.reshape(-1))


def loss_function(name: str) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """The loss called `name` as function(output, target); None for `output`, where the module returns its loss itself."""
    if name == "cross-entropy":
        return cross_entropy
    if name == "mse":
        return F.mse_loss
    if name == "output":
        return None
    if ":" in name:
        found = resolve_function(name, what="loss")
        refuse_loss_parameters(found)
        return as_function(found) if isinstance(found, nn.Module) and any(True for _ in (*found.parameters(), *found.buffers())) else found
    raise UnknownName(f"there is no loss {name!r}", where=name, hint=match_hint(name, [*LOSSES, "module:function"]))


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions


def _is_image(x: torch.Tensor) -> bool:
    return x.dim() in CHANNELS_LAST and x.is_floating_point()


def has_images(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether some input has an order of dimensions to choose: floating-point, in batches of images or volumes."""
    return any(map(_is_image, inputs))


class Objective(nn.Module):  # type: ignore[misc]
    """`model` followed by its loss: called with all example inputs, returns a scalar tensor.

    `channels_last`: images and volumes among the inputs are laid out so before the model sees them, and with them what it computes from them.
    `calling`: how the inputs become the model's arguments; None: in order. A loss by name is given the prediction among what the model returns
    (`prediction_of`), a loss function all of it.
    """

    def __init__(self, model: nn.Module, loss: str, *, channels_last: bool = False, calling: Calling | None = None) -> None:
        super().__init__()
        self.channels_last, self.calling = channels_last, calling
        self.model = model
        function = loss_function(loss)
        self.loss_name = loss
        self.returned = function is None  # by the model, which may have been reduced to a loss function's result
        self.loss = reduces_to(model) if function is None else LossModule(function)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with assigned_in_place(self.model):
            return self.computed(inputs)

    def computed(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.channels_last:
            inputs = tuple(x.contiguous(memory_format=CHANNELS_LAST[x.dim()]) if _is_image(x) else x for x in inputs)
        if self.returned or self.loss is None:
            output = self.called(inputs)
            self.refuse_losses(output)
            result = loss_of(output)
        else:
            if len(inputs) < 2:
                raise UsageError("there is one example input only, and the loss needs a target", hint="the last example input is the target")
            output = self.called(inputs[:-1])
            if output is None:
                hint = "return the prediction, or the loss with --loss output"
                raise UsageError("forward returns None", where=self.line(), hint=hint)
            result = self.loss(output if ":" in self.loss_name else prediction_of(output), inputs[-1])
        if not isinstance(result, torch.Tensor) or result.dim() != 0 or not result.is_floating_point():
            hint = "with --loss output the module returns its loss" if self.returned else "a loss returns one floating-point number"
            raise UsageError(
                f"the loss {self.loss_name!r} is {described(result)}, not a floating-point scalar", where=self.line(of_loss=True), hint=hint
            )  # fmt: skip
        return result

    def refuse_losses(self, output: Any) -> None:
        """Raises: UsageError where a module returns nothing, or several losses in a row: the first is not trained alone without a word."""
        if output is None:
            raise UsageError("forward returns None", where=self.line(of_loss=True), hint="with --loss output the module returns its loss")
        several = {} if "loss" in parts_of(output) else scalars_in(output)
        losses = {k: x for k, x in several.items() if x.requires_grad}
        if len(losses) > 1:
            raise UsageError(
                f"forward returns {len(losses)} losses with gradients ({', '.join(losses)} of {described(output)}), and a plan trains one",
                where=self.line(), data={"losses": len(losses)},
                hint="return their sum, detach those that are only looked at, or train what has a loss of its own (the two of a GAN) as two jobs",
            )  # fmt: skip
        if len(several) > 1 and "0" not in several:
            raise UsageError(
                f"which is the loss of what forward returns: {' or '.join(several)} of {described(output)}?", where=self.line(),
                hint="return it first, or by the name `loss`",
            )  # fmt: skip

    @property
    def code(self) -> Any:
        """The function that is the loss; None where the module returns it itself, or a named one takes its prediction."""
        return self.loss.function if self.loss is not None and (self.returned or ":" in self.loss_name) else None

    def line(self, *, of_loss: bool = False) -> str:
        """`file:line` of the model's forward, or of the loss function where there is one."""
        return place_of(self.code if of_loss and self.code is not None else type(self.model).forward)

    def called(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns for the inputs, or for all but the target."""
        if self.calling is None:
            return self.model(*tensors)
        args, kwargs = self.calling.arguments(tensors)
        return self.model(*args, **kwargs)


def kept_tensors(objective: Objective) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name. Not the buffers of a loss that was made a function (`as_function`): a plan has no place for them."""
    return {**dict(objective.named_buffers()), **dict(objective.named_parameters())}
