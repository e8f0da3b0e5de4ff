"""Optimizers by name, without torch: which there are, what each keeps per parameter, and whether it may be given a part of one.

A text names one with its options: `adamw`, `adamw:weight_decay=0.1,betas=0.9,0.95`, `module:function`, `FILE.py:function:decay=0.1`. A value may be
a list: a part without `=` belongs to the option before it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ..errors import UnknownName, Unsupported, UsageError

__all__ = ["OPTIMIZERS", "Kind", "Named", "may_be_cut", "named", "optimizer_kind", "state_copies", "state_names", "undecayed"]

STATE_COPIES = 2  # that every plan counts, in units of the parameters: Adam's two moments


@dataclass(frozen=True)
class Named:
    """A name, or the reference of a function, with options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_function(self) -> bool:
        return ":" in self.name


@dataclass(frozen=True)
class Kind:
    """`torch_name`: the class in torch.optim. `state`: tensors of a parameter's shape that it keeps of each. `cut`: every element is updated by
    itself, so a rank may hold any part of a parameter. `refused`: why it cannot be used."""

    torch_name: str
    state: int = STATE_COPIES
    cut: bool = True
    refused: str = ""


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind("AdamW"), "adam": Kind("Adam"), "sgd": Kind("SGD", 1), "adagrad": Kind("Adagrad", 1), "adadelta": Kind("Adadelta"),
    "adamax": Kind("Adamax"), "asgd": Kind("ASGD", 1), "nadam": Kind("NAdam"), "radam": Kind("RAdam"), "rmsprop": Kind("RMSprop", 3),
    "rprop": Kind("Rprop"), "adafactor": Kind("Adafactor", 1, cut=False), "muon": Kind("Muon", 1, cut=False),
    "lbfgs": Kind("LBFGS", refused="evaluates the model several times in one step (a closure)"),
    "sparseadam": Kind("SparseAdam", refused="takes sparse gradients, and gradients are dense here"),
}  # fmt: skip


def named(text: str, *, where: str) -> Named:
    """The name and options that a text says. Values are numbers, true, false, none, lists of these, or words.

    Raises: UsageError for an option without a value or that stands twice.
    """
    head, colon, rest = text.strip().rpartition(":")
    if not colon or "=" not in rest:
        return Named(text.strip())
    options: dict[str, list[str]] = {}
    last = ""
    for part in rest.split(","):
        key, equals, value = (x.strip() for x in part.partition("="))
        if equals and (not key.isidentifier() or key in options):
            raise UsageError(f"{part!r} is not option=value, or stands twice", where=where, hint="write name:option=value,option=value")
        if equals:
            last = key
            options[key] = [value]
        elif not last:
            raise UsageError(f"{part!r} is not option=value", where=where, hint="write name:option=value,option=value")
        else:
            options[last].append(key)
    found = {key: tuple(map(_value, texts)) if len(texts) > 1 else _value(texts[0]) for key, texts in options.items()}
    return Named(head, found)


def _value(text: str) -> Any:
    word = {"true": True, "false": False, "none": None}
    if text.lower() in word:
        return word[text.lower()]
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return found if isinstance(found, (int, float)) else text


def optimizer_kind(text: str) -> Kind | None:
    """What is known of the optimizer that a text names; None for a function. Raises: UnknownName, Unsupported for one that cannot be used."""
    name = named(text, where="--optimizer")
    if name.is_function:
        return None
    kind = OPTIMIZERS.get(name.name.lower())
    if kind is None:
        usable = ", ".join(n for n, k in OPTIMIZERS.items() if not k.refused)
        raise UnknownName(f"there is no optimizer {name.name!r}", where=text, hint=f"{usable}, or module:function")
    if kind.refused:
        raise Unsupported(f"optimizer {name.name} {kind.refused}", where=text, hint="adamw, sgd, or another that updates once per step")
    return kind


def may_be_cut(text: str) -> bool:
    """Whether ranks may hold parts of parameters under this optimizer: each element must be updated by itself, which of a function nobody knows."""
    kind = optimizer_kind(text)
    return kind is not None and kind.cut


def state_names(text: str, ema: float = 0.0) -> tuple[str, ...] | None:
    """Names of the tensors of a parameter's shape that are kept beside it; None where only a run can tell."""
    asked = named(text, where="--optimizer")
    name, options = asked.name.lower(), asked.options
    if name in ("adam", "adamw"):
        found = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options.get("amsgrad") else ()))
    elif name == "sgd":
        found = ("momentum_buffer",) if options.get("momentum") else ()
    else:
        return None
    return (*found, *(("weight_average",) if ema else ()))


def state_copies(text: str, ema: float = 0.0) -> int:
    """Tensors of a parameter's shape that are kept beside each, at most; what is not known counts as Adam's two."""
    kind, options = optimizer_kind(text), named(text, where="--optimizer").options
    own = STATE_COPIES if kind is None else kind.state + bool(options.get("amsgrad"))
    return max(own, STATE_COPIES) + bool(ema)


def undecayed(shapes: Mapping[str, Sequence[int]], patterns: Sequence[str]) -> set[str]:
    """Names of parameters without weight decay (`Recipe.no_decay`). Raises: UsageError for a pattern that fits none."""
    found: set[str] = set()
    for pattern in patterns:
        fits = {n for n, shape in shapes.items() if _fits(n, len(shape), pattern)}
        if not fits:
            raise UsageError(f"no parameter fits {pattern!r}", where="--no-decay", hint=f"names are like {', '.join([*shapes][:3])}")
        found |= fits
    return found


def _fits(name: str, dimensions: int, pattern: str) -> bool:
    if pattern == "1d":
        return dimensions <= 1
    return fnmatchcase(name, pattern) if "*" in pattern or "?" in pattern else pattern in name
