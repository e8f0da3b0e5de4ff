"""The job: what must happen. Training here; collectives, services and queues have their own records beside it."""

from __future__ import annotations

import msgspec

from .errors import UsageError

__all__ = ["GraphTraining", "Recipe", "Training"]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a training job does beyond its optimizer. Everything is off by default.

    `no_decay`: parameters without weight decay: parts of their names, patterns with `*`, or `1d` for all of at most one dimension. `schedule`: of
    the learning rate, `name:option=value,...` or a function (`run.train.schedules`). `ema`: decay of the moving average of the weights. `clip_norm`:
    gradients are scaled so that the norm of all of them is at most this; `clip_value`: each element is at most this. `precision`: "fp32",
    "bf16-autocast", "fp16-autocast" (with dynamic loss scaling): forward and loss run under torch.autocast. `casts`: of which kind of device the
    list of operators is that autocast casts: "" (processors') or "cuda", which plans for GPUs have. `batch_statistics`: "" (of each micro-batch,
    which the gate refuses where it is not all of the batch) or "global": all that looks at other samples sees the whole batch.
    `reproducible`: "run"; "tree", gradients are one fold over the step's micro-batches, so that training has equal bits at any number of ranks
    (docs/reproducibility.md).
    """

    no_decay: tuple[str, ...] = ()
    schedule: str = ""
    ema: float = 0.0
    clip_norm: float = 0.0
    clip_value: float = 0.0
    precision: str = "fp32"
    batch_statistics: str = ""
    reproducible: str = "run"
    casts: str = ""

    @property
    def autocast(self) -> str:
        """Precision and `casts` in one, as `capture.precision.casting` takes them."""
        return f"{self.precision}:{self.casts}" if self.casts and self.precision != "fp32" else self.precision


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A training job. `model` names `FILE.py:function`, `module:function` or a captured graph file; `loss` and `optimizer` likewise.

    The model function returns `(module, example_inputs)`, inputs with the batch as leading dimension and the training target last.
    """

    model: str
    global_batch: int
    loss: str = "cross-entropy"  # "cross-entropy" | "mse" | "output" (the module returns its loss) | "module:function"
    optimizer: str = "adamw"  # a name of torch.optim with options, "adamw:weight_decay=0.1,betas=0.9,0.95" | "module:function"
    learning_rate: float = 1e-3
    dtype: str = "float32"
    seed: int = 0
    recipe: Recipe | msgspec.UnsetType = msgspec.UNSET  # left out of documents where nothing is asked
    # Of one sample of every input, in the order of the example inputs (target last); left out where they are the examples' own.
    sizes: tuple[tuple[int, ...], ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def asked(self) -> Recipe:
        """The recipe, or the one that asks for nothing."""
        return self.recipe or Recipe()


class GraphTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A network trained on one whole graph whose nodes lie on several workers. The graph itself is beside it (`graph.nodes`).

    `model`: "gcn" or "sage". `layers` of them, `hidden` numbers wide; `features` in, `classes` out. `reassign`: epochs after which bits are chosen
    anew from what was traced, 0: never. Raises: UsageError.
    """

    name: str
    features: int
    classes: int
    model: str = "gcn"
    layers: int = 3
    hidden: int = 256
    learning_rate: float = 0.01
    reassign: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in ("gcn", "sage"):
            raise UsageError(f"there is no graph network {self.model[:32]!r}", where="model", hint="gcn or sage; any module takes a HaloExchange")
        for field in ("features", "classes", "layers", "hidden"):
            if getattr(self, field) < 1:
                raise UsageError(f"must be at least 1, got {getattr(self, field)}", where=field)
        if self.reassign < 0 or not self.learning_rate > 0:
            said = f"reassign {self.reassign}, learning rate {self.learning_rate}"
            raise UsageError(said, where="reassign", hint="0 or more epochs, a rate above 0")

    @property
    def dims(self) -> tuple[int, ...]:
        """Width of what enters each layer, and of what leaves the last."""
        return (self.features, *[self.hidden] * (self.layers - 1), self.classes)

    @property
    def exchanges(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, layer, forward) in the order of an epoch: all layers forward, then back down to the second; the input needs no gradient."""
        forward = [(f"forward{k}", k, True) for k in range(self.layers)]
        return (*forward, *[(f"backward{k}", k, False) for k in range(self.layers - 1, 0, -1)])
