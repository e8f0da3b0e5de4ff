"""Optimizers on what a rank holds of the parameters, in the groups that they have in one process.

A function of the user's sees the whole model's named parameters: its groups may depend on shapes, or on how many layers there are. What a rank does
not hold whole stands there as a tensor of the whole shape without data, and is replaced afterwards by the rank's part, or taken out. Groups stay in
their order, also those of which a rank has nothing: schedules and checkpoints count on their numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...capture.resolve import resolve_function, shown, user_code
from ...errors import Choice, Hint, UnknownName, Unsupported, UsageError
from ...plan.optimizers import OPTIMIZERS, Kind, Named, named, optimizer_kind, undecayed

__all__ = ["OPTIMIZERS", "make_optimizer"]

def make_optimizer(
    text: str, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], learning_rate: float, *,
    whole: Mapping[str, torch.Tensor] | None = None, no_decay: Sequence[str] = (),
) -> Any:  # fmt: skip
    """The optimizer that `text` names (`plan.optimizers.named`), for what this rank updates: a name of torch.optim with options, or
    `module:function`, called as function(named_parameters, learning_rate, **options).

    `whole`: the model's trained parameters by name, of their whole shapes; None where those given are all, and whole. `no_decay`: see `Recipe`.
    Raises: UnknownName for a name, or an option, that does not exist; UsageError for a value that torch refuses, a pattern that no parameter's name
    fits, and a function that does not return a torch optimizer; Unsupported for an optimizer that cannot be used, or needs parameters whole.
    """
    held = list(named_parameters)
    shapes = {n: tuple(p.shape) for n, p in (whole.items() if whole is not None else held)}
    asked = named(text, where="--optimizer")
    if asked.is_function:
        return _given(text, asked, held, learning_rate, whole or dict(held), no_decay)
    kind = optimizer_kind(text)
    assert kind is not None
    _refuse_parts(kind, text, [n for n, p in held if tuple(p.shape) != shapes[n]])
    options = _options(kind.torch_name, asked, text)
    groups = _groups(held, shapes, no_decay)
    try:
        return getattr(torch.optim, kind.torch_name)(groups, **{"lr": learning_rate, **options})
    except (TypeError, ValueError) as error:
        raise UsageError(f"torch refuses these options: {error}", where=text) from None


def _options(torch_name: str, asked: Named, text: str) -> Mapping[str, Any]:
    known = [n for n in inspect.signature(getattr(torch.optim, torch_name)).parameters if n != "params"]
    for option in asked.options:
        if option not in known:
            raise UnknownName(f"{torch_name} has no option {option!r}", where=text, hint=f"it has {', '.join(known)}")
    return asked.options


def _groups(held: Sequence[tuple[str, torch.nn.Parameter]], shapes: Mapping[str, Sequence[int]], no_decay: Sequence[str]) -> list[Any]:
    """Parameters as one list, or in two groups, of which the second has no weight decay."""
    if not no_decay:
        return [{"params": [p for _, p in held]}]
    free = undecayed(shapes, no_decay)
    return [{"params": [p for n, p in held if n not in free]}, {"params": [p for n, p in held if n in free], "weight_decay": 0.0}]


def _given(
    text: str, asked: Named, held: Sequence[tuple[str, torch.nn.Parameter]], learning_rate: float, whole: Mapping[str, torch.Tensor],
    no_decay: Sequence[str],
) -> torch.optim.Optimizer:  # fmt: skip
    """A function's optimizer, changed to update what this rank holds."""
    if no_decay:
        raise UsageError("a function makes its own groups", where="--no-decay", hint="leave --no-decay out, or name an optimizer of torch.optim")
    own = dict(held)
    shown = {
        n: own[n] if n in own and own[n].shape == p.shape else torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
        for n, p in whole.items()
    }  # fmt: skip
    function, given = resolve_function(asked.name, what="optimizer"), (list(shown.items()), learning_rate)
    try:
        inspect.signature(function).bind(*given, **asked.options)
    except TypeError as error:
        hint = "def make(named_parameters, learning_rate, **options): return torch.optim.SGD(named_parameters, learning_rate)"
        raise UsageError(f"{asked.name} is called with the named parameters, the rate and its options: {error}", where=text, hint=hint) from None
    with user_code(asked.name, asked.name.rpartition(":")[0]):
        made = function(*given, **asked.options)
    if not isinstance(made, torch.optim.Optimizer):
        several = isinstance(made, (tuple, list)) and len(made) > 1
        hint = "one optimizer with several groups, or two jobs (the two nets of a GAN)" if several else "return the optimizer"
        raise UsageError(f"{text} returned a {type(made).__name__}, not a torch.optim.Optimizer", where=text, hint=hint)
    if type(made).__name__ == "LBFGS":
        _refuse_parts(OPTIMIZERS["lbfgs"], text, ())
    require_no_closure(made)
    if all(own.get(n) is p for n, p in shown.items()):
        return made
    name_of = {id(p): n for n, p in shown.items()}
    if (odd := next((p for g in made.param_groups for p in g["params"] if id(p) not in name_of), None)) is not None:
        raise UsageError(f"{text} updates a tensor of shape {tuple(odd.shape)} that is no parameter of the model", where=text)
    groups = [{**g, "params": [own[n] for p in g["params"] if (n := name_of[id(p)]) in own]} for g in made.param_groups]
    kind = next((k for k in OPTIMIZERS.values() if type(made) is getattr(torch.optim, k.torch_name, None)), None)
    if kind is not None:
        _refuse_parts(kind, text, [n for n, p in own.items() if shown[n] is not p])
        return type(made)(groups)  # anew: some make state when they are constructed
    if made.state:
        raise Unsupported(
            f"{type(made).__name__} makes state of parameters before its first step, and this rank does not hold all of them", where=text,
            hint=Hint("make the state in the first step, or plan with {} and {}", Choice("pipeline", 1), Choice("tensor", 1)),
        )  # fmt: skip
    for group, found in zip(made.param_groups, groups, strict=True):
        group["params"] = found["params"]
    return made


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises: Unsupported for an optimizer whose step must be given the loss as a function."""
    step = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        code = getattr(inspect.unwrap(step), "__code__", None)
        raise Unsupported(
            f"{type(optimizer).__name__} evaluates the loss again while it updates", hint="an optimizer that needs no closure",
            where=f"{shown(code.co_filename)}:{code.co_firstlineno}" if code is not None else "optimizer",
        )  # fmt: skip


def _refuse_parts(kind: Kind, text: str, cut: Sequence[str]) -> None:
    if kind.refused:
        raise Unsupported(f"{kind.torch_name} {kind.refused}", where=text, hint="an optimizer that updates once per step")
    if not kind.cut and cut:
        raise Unsupported(
            f"{kind.torch_name} would be given a part of parameter {cut[0]!r}", where=text,
            hint=Hint(
                "plan with {} and {}, or use an optimizer that updates every element by itself", Choice("tensor", 1), Choice("zero", 0)
            ),
        )  # fmt: skip
