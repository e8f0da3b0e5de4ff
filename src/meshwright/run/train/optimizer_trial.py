"""Whether an optimizer of the owner's updates parts of a model as it would update the whole: found out by trial.

A rank gives its optimizer what it holds: the parameters of its stages, its shards of those that tensor parallelism splits, and with a sharding level
one-dimensional pieces, or some of the parameters whole. An optimizer that looks at one element at a time cannot tell; one that takes the norm of a
parameter (LARS, LAMB), factors a matrix (Adafactor), makes it orthogonal (Muon, Shampoo) or clips the norm of all gradients can. The trial makes both
updates on random gradients, of the model's own shapes where they are small, and compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from ...capture.resolve import place_of, resolve_function
from ...errors import Choice, Hint, Unsupported
from ...plan.optimizers import named
from ...plan.plan import ParamShard, TrainingLayout
from ...plan.shards import expert_shards
from .optimizers import make_optimizer

__all__ = ["Beyond", "copy_for", "looks_beyond", "own_looks_beyond", "refuse_optimizer", "refused"]

TENSOR, PIPELINE, EXPERT, ZERO = Choice("tensor", 1), Choice("pipeline", 1), Choice("expert", 1), Choice("zero", 0)

MAX_DIM = 256  # of a parameter in the trial: beyond the sizes from which factoring optimizers factor
MAX_PARAMETERS = 16  # in the trial, of unlike shapes first
STEPS = 2  # the second sees the state that the first left
TOLERANCE = 1e-6  # of the largest update; the trial is in double precision
Tensors = Mapping[str, torch.Tensor]
Make = Callable[[list[tuple[str, torch.nn.Parameter]], Tensors], Any]  # an optimizer of what is held, of the whole model's parameters


@dataclass(frozen=True)
class Beyond:
    """What an optimizer was given a part of, and noticed. `degree`: the choice that keeps it whole."""

    what: str
    degree: Choice



def looks_beyond(name: str, parameters: Mapping[str, torch.Tensor], learning_rate: float, layout: TrainingLayout) -> Beyond | None:
    """The first split of the layout that changes what the optimizer called `name` does; None where none does."""
    if not named(name, where="--optimizer").is_function:  # what torch's own look at is known (`plan.optimizers`)
        return None
    return _tried(lambda held, whole: make_optimizer(name, held, learning_rate, whole=whole), parameters, layout)


def own_looks_beyond(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], layout: TrainingLayout) -> Beyond | None:
    """The same of the owner's optimizer object, of which copies are tried. What fails on such a copy is taken to look at all of a parameter."""

    try:
        return _tried(lambda held, _: copy_for(optimizer, parameters, dict(held)), parameters, layout)
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        split = ((TENSOR, layout.tensor), (EXPERT, layout.expert), (ZERO, layout.zero_level + 1), (PIPELINE, layout.pipeline))
        return Beyond(f"what a copy of it can be tried with ({line})", next(x for x, degree in split if degree > 1))


def copy_for(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], held: Mapping[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:  # fmt: skip
    """A copy of the owner's optimizer of `parameters` for those of the same names in `held`, without state, hooks and the parameters not there."""
    memo: dict[int, Any] = {id(p): held.get(n, p) for n, p in parameters.items()}
    found = object.__new__(type(optimizer))
    fields = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step") and not k.endswith("_hooks")}
    found.__dict__.update(deepcopy(fields, memo), state=defaultdict(dict), **{k: {} for k in vars(optimizer) if k.endswith("_hooks")})
    mine = {id(p) for p in held.values()}
    for group in found.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in mine]
    return found


def _tried(make: Make, parameters: Mapping[str, torch.Tensor], layout: TrainingLayout) -> Beyond | None:
    chosen = _chosen({n: p for n, p in parameters.items() if p.requires_grad})
    if not chosen:
        return None
    generator = torch.Generator().manual_seed(0)
    start = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in chosen.items()}

    def draw() -> Tensors:
        """Of unlike size from one parameter to the next, as gradients are."""
        return {n: torch.randn(s, generator=generator, dtype=torch.float64) * 10.0 ** (i % 3 - 1) for i, (n, s) in enumerate(chosen.items())}

    gradients = [draw() for _ in range(STEPS)]
    whole = _updated(make, start, gradients, start)

    def apart_by(groups: Iterable[Sequence[str]]) -> bool:
        """Whether ranks with some of the parameters each update them otherwise."""
        return any(_apart(_updated(make, {n: start[n] for n in held}, gradients, start), whole) for held in groups)

    if layout.pipeline > 1 and len(start) > 1 and apart_by(_stages(layout, start)):
        return Beyond("one parameter: what other stages hold changes its update", PIPELINE)
    for degree, cuts, choice in ((layout.tensor, layout.shards, TENSOR), (layout.expert, expert_shards(layout), EXPERT)):
        shards = {s.param: s for s in cuts if degree > 1 and s.param in start and start[s.param].shape[s.axis] > 1}
        if shards and _apart(_by_shards(make, start, gradients, shards), whole):
            return Beyond("a shard of a parameter: the rest of it changes its update", choice)
    if layout.zero_level and layout.whole_parameters:
        if len(start) > 1 and apart_by(([*start][::2], [*start][1::2])):
            return Beyond("one parameter: what other replicas update changes its update", ZERO)
    elif layout.zero_level and _apart(_by_pieces(make, start, gradients), whole):
        return Beyond("one element: the rest of its parameter changes its update", ZERO)
    return None


def refuse_optimizer(name: str, parameters: Mapping[str, torch.Tensor], learning_rate: float, layout: TrainingLayout) -> None:
    """Raises: Unsupported where a split of the layout changes what the optimizer does."""
    beyond = looks_beyond(name, parameters, learning_rate, layout)
    if beyond is not None:
        raise refused(f"optimizer {name}", beyond, where=place_of(resolve_function(named(name, where="--optimizer").name, what="optimizer")))


def refused(what: str, beyond: Beyond, where: str) -> Unsupported:
    return Unsupported(
        f"{what} looks beyond {beyond.what}", where=where, hint=Hint("plan with {}, so that a rank gives it the whole", beyond.degree),
        data={"cause": "optimizer", "beyond": beyond.what, "degree": beyond.degree.said("command")},
    )  # fmt: skip


def _chosen(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Names and shapes for the trial: at first one parameter of each shape, then others."""
    first: dict[tuple[int, ...], str] = {}
    for n, p in parameters.items():
        first.setdefault(tuple(p.shape), n)
    order = [*first.values(), *(n for n in parameters if n not in set(first.values()))]
    return {n: tuple(min(d, MAX_DIM) for d in parameters[n].shape) for n in order[:MAX_PARAMETERS]}


def _updated(make: Make, start: Tensors, gradients: Sequence[Tensors], whole: Tensors) -> dict[str, torch.Tensor]:
    """What all steps together add to what is held of the `whole` parameters."""
    held = {n: torch.nn.Parameter(x.clone()) for n, x in start.items()}
    optimizer = make(list(held.items()), whole)
    for step in gradients:
        for n, p in held.items():
            p.grad = step[n].clone()
        optimizer.step()
    return {n: p.detach() - start[n] for n, p in held.items()}


def _apart(found: Tensors, whole: Tensors) -> bool:
    return any(bool(((x - whole[n]).abs() > TOLERANCE * whole[n].abs().max().clamp(min=1e-30)).any()) for n, x in found.items() if x.numel())


def _stages(layout: TrainingLayout, start: Tensors) -> list[list[str]]:
    found = [[n for n in layout.held(p).params if n in start] for p in range(layout.pipeline)]
    return [x for x in found if x]


def _halves(
    make: Make, start: Tensors, gradients: Sequence[Tensors], cut: Callable[[str, torch.Tensor], Sequence[torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Two ranks, each with its part of `cut`."""

    def own(tensors: Tensors, rank: int) -> dict[str, torch.Tensor]:
        return {n: cut(n, x)[rank] for n, x in tensors.items()}

    return [_updated(make, own(start, rank), [own(g, rank) for g in gradients], start) for rank in (0, 1)]


def _by_shards(make: Make, start: Tensors, gradients: Sequence[Tensors], shards: Mapping[str, ParamShard]) -> dict[str, torch.Tensor]:
    """Two tensor-parallel ranks, each with half of what is split."""

    def cut(n: str, x: torch.Tensor) -> Sequence[torch.Tensor]:
        first, second = x.tensor_split(2, shards[n].axis) if n in shards else (x, x)
        return first, second

    halves = _halves(make, start, gradients, cut)
    return {n: torch.cat([h[n] for h in halves], shards[n].axis) if n in shards else halves[0][n] for n in start}


def _by_pieces(make: Make, start: Tensors, gradients: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Two data replicas, the border anywhere within a parameter."""

    def cut(n: str, x: torch.Tensor) -> Sequence[torch.Tensor]:
        flat, border = x.reshape(-1), (2 * x.numel()) // 3
        return flat[:border], flat[border:]

    halves = _halves(make, start, gradients, cut)
    return {n: torch.cat([h[n] for h in halves]).view(start[n].shape) for n in start}
