"""K-FAC: the gradients of Linear layers preconditioned by the Kronecker-factored inverse Fisher, then any optimizer of torch.

Cite: Martens, Grosse, ICML 2015; Osawa, Li, Hoefler, "PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher
    Information Matrices", MLSys 2023 (arXiv 2211.14133) for doing it in a pipeline's idle time.
Left open by the papers: the first steps. A first factor sees one batch only and its inverse is soon wrong: `Refresh(first=8, every=4)` inverts
    at each of the first 8 steps, then at every 4th. Float32: a Cholesky that fails is tried again with ten times the damping.
Invariant: factors do not depend on how a batch is cut into micro-batches and replicas; parameters outside Linear layers get their plain gradient.
Cost: per step O(rows·d²) for factors and O(d³) for the inverses of the layers that are due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..cite import Cite
from ..errors import FormatError, UsageError
from .capture import EXCLUDED, Capture, Conventions, linear_layers
from .layer import FACTORS, Factor, LinearCurvature

__all__ = ["CITE", "KFAC", "Refresh"]

CITE = Cite(
    key="osawa2023pipefisher", title="PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher Information Matrices",
    year=2023, venue="MLSys", authors="Osawa, Li, Hoefler", url="https://arxiv.org/abs/2211.14133",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """At which steps (0, 1, ...) something is done: each of the `first` steps, then every `every`-th."""

    every: int = 1
    first: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.first < 0:
            raise UsageError(f"every {self.every} steps after {self.first} first ones", where="refresh", hint="every >= 1, first >= 0")

    def due(self, step: int) -> bool:
        return step < self.first or (step - max(0, self.first - 1)) % self.every == 0


class KFAC(torch.optim.Optimizer):  # type: ignore[misc]
    """Wraps `base`, an optimizer over the parameters of `module` (all of them: those outside Linear layers get their plain gradient).

    Learning-rate schedulers, `zero_grad`, `param_groups` and `state_dict` work as with any optimizer; rates and momentum are those of `base`.

    Args:
        damping: lambda, split between the two factors of a layer by the ratio of their mean eigenvalues.
        decay: of the exponential average of the factors over steps.
        inverses: at which steps the inverses are renewed. factors: at which steps curvature is collected.
        conventions: how the loss is made; see `Conventions`.
        exclude: patterns of name parts of layers to leave alone. diagonal_above: outputs beyond which B is kept as a diagonal.
        clip_norm: largest norm of all preconditioned gradients together, None = any.
        deferred: `step` collects and inverts nothing: whoever runs the pipeline calls `curvature`, `average` and `invert` when there is time, and
            `step` takes the latest inverses.
        group: a torch.distributed process group of replicas; sums are added over it, and layers are shared out for inversion.
    Raises: UsageError.
    """

    def __init__(
        self, module: torch.nn.Module, base: torch.optim.Optimizer, *, damping: float = 1e-3, decay: float = 0.95,
        inverses: Refresh = Refresh(), factors: Refresh = Refresh(), conventions: Conventions = Conventions(),  # noqa: B008 - frozen
        exclude: tuple[str, ...] = EXCLUDED, diagonal_above: int = 10_000, clip_norm: float | None = None, deferred: bool = False, group: Any = None,
    ) -> None:  # fmt: skip
        if not damping > 0:
            raise UsageError(f"must be > 0, got {damping}", where="damping", hint="1e-3 to 1e-2 to begin with")
        if not 0 <= decay < 1:
            raise UsageError(f"must be in [0, 1), got {decay}", where="decay")
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"must be > 0, got {clip_norm}", where="clip_norm")
        self.layers = {n: LinearCurvature(n, m, diagonal_above=diagonal_above) for n, m in linear_layers(module, exclude).items()}
        owned = {id(p) for g in base.param_groups for p in g["params"]}
        missing = [n for n, layer in self.layers.items() if any(id(p) not in owned for p in layer.module.parameters())]
        if missing:
            raise UsageError(f"the base optimizer does not have the parameters of {missing[0]}", where="base", hint="give it model.parameters()")
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.damping, self.decay, self.clip_norm = damping, decay, clip_norm
        self.inverses, self.factors, self.deferred, self.group = inverses, factors, deferred, group
        self.steps = 0
        self.capture = Capture(self.layers, conventions)
        self.capture.on = deferred or factors.due(0)

    # ---- pieces --------------------------------------------------------------------------------------------------
    @property
    def microbatch(self) -> int:
        """Number of the micro-batch that the next forward belongs to; needed only where pieces are called one by one."""
        return self.capture.microbatch

    @microbatch.setter
    def microbatch(self, number: int) -> None:
        self.capture.microbatch = number

    def curvature(self, layer: str, what: Factor, microbatch: int | None = None) -> int:
        """Collect A or B of one layer from a micro-batch whose forward or backward is done (None: all). Returns: uses of the layer collected."""
        return self.capture.take(self._layer(layer), what, microbatch)

    def average(self, layer: str) -> None:
        """What was collected (over all replicas, once `synchronise` was called) goes into the layer's factors."""
        self._layer(layer).average(self.decay)

    def invert(self, layer: str, what: Factor) -> None:
        """Renew one damped inverse from the layer's factors. Raises: RunError when it cannot be inverted."""
        found = self._layer(layer)
        (found.invert_input if what == "input" else found.invert_gradient)(self.damping)

    def synchronise(self) -> None:
        """Add what was collected over the replicas: one all-reduce per layer, of triangles."""
        if self.group is None:
            return
        import torch.distributed as dist

        for layer in self.layers.values():
            both = [layer.packed_sum("input"), layer.packed_sum("gradient")]
            packed = torch.cat(both)
            dist.all_reduce(packed, group=self.group)
            layer.take_sum("input", packed[: len(both[0])])
            layer.take_sum("gradient", packed[len(both[0]) :])

    def _layer(self, name: str) -> LinearCurvature:
        if name not in self.layers:
            raise UsageError(f"K-FAC has no layer {name!r}", where="layer", hint=f"it has: {', '.join(list(self.layers)[:8])}")
        return self.layers[name]

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """Forwards in here leave nothing behind, e.g. for evaluation in training mode."""
        with self.capture.paused():
            yield

    # ---- the step ------------------------------------------------------------------------------------------------
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Collect and invert what is due (unless deferred), precondition, clip, and take a step of the base optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.deferred:
            self._collect()
            if self.inverses.due(self.steps):
                self._invert_all()
        self.precondition()
        self.base.step()
        self.steps += 1
        if not self.deferred:
            self.capture.clear()
            self.capture.on = self.factors.due(self.steps)
        return loss

    def _collect(self) -> None:
        if not self.factors.due(self.steps):
            return
        self.capture.drop_open()
        for name in self.layers:
            self.curvature(name, "input")
            self.curvature(name, "gradient")
        self.synchronise()
        for name in self.layers:
            self.average(name)

    def _invert_all(self) -> None:
        """Replicas invert layers in turn and send each other the results."""
        if self.group is None:
            for name in self.layers:
                self.invert(name, "input")
                self.invert(name, "gradient")
            return
        import torch.distributed as dist

        size, own = dist.get_world_size(self.group), dist.get_rank(self.group)
        ready = [(i % size, layer) for i, layer in enumerate(self.layers.values()) if layer.usable]
        for owner, layer in ready:
            if owner == own:
                self.invert(layer.name, "input")
                self.invert(layer.name, "gradient")
        for owner, layer in ready:
            for what in FACTORS:
                packed = layer.packed_inverse(what, room=owner != own)
                dist.broadcast(packed, src=dist.get_global_rank(self.group, owner), group=self.group)
                layer.take_inverse(what, packed)

    def precondition(self) -> None:
        """Gradients of all treated layers, in place, by their latest inverses; then clipping."""
        for layer in self.layers.values():
            layer.precondition()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.clip_norm)

    # ---- state ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """`base`: of the base optimizer; `kfac`: steps done, factors and inverses by layer."""
        return {"base": self.base.state_dict(), "kfac": {"steps": self.steps, "layers": {n: x.state() for n, x in self.layers.items()}}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises: FormatError when it belongs to other layers."""
        try:
            own, layers = state_dict["kfac"], dict(state_dict["kfac"]["layers"])
            wrong = set(layers) ^ set(self.layers)
        except (KeyError, TypeError):
            raise FormatError("is no state of K-FAC", where="state_dict", hint="give what state_dict() returned") from None
        if wrong:
            raise FormatError(f"has other layers than this optimizer: {sorted(wrong)[0]}", where="state_dict", hint="build the same model first")
        self.base.load_state_dict(state_dict["base"])
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.steps = int(own["steps"])
        for name, layer in self.layers.items():
            layer.load(layers[name])
        self.capture.clear()
        self.capture.on = self.deferred or self.factors.due(self.steps)

    def close(self) -> None:
        """Take the hooks off the module."""
        self.capture.remove()
