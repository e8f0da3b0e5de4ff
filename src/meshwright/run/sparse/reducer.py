"""`SparseAllReduce`: what a training loop uses. One object per fused gradient and rank; `step(gradient)` returns the sparse mean.

    reducer = SparseAllReduce(dist.new_group(), elements=n, density=0.01)
    update = reducer.step(gradient)          # the same on every rank
    parameters[update.indices] -= lr * update.values

What is not in the result stays in `reducer.residual` and is added to the next gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import FormatError, UnknownName, UsageError
from .assumption import measured_xi
from .dense import Dense
from .exchange import Exchange
from .gtopk import GTopk
from .oktopk import OkTopk
from .programs import program_of
from .protocol import AllReduce, Protocol
from .selection import ROOM_FACTOR
from .state import RankState, StepStats, Update
from .transport import TorchRunner
from .unions import TopkA, TopkDsa, Zen
from .walk import ExchangeWalk, Port

__all__ = ["METHODS", "RankReducer", "SparseAllReduce"]

METHODS: dict[str, type[Any]] = {"oktopk": OkTopk, "topka": TopkA, "topkdsa": TopkDsa, "gtopk": GTopk, "zen": Zen, "dense": Dense}


class RankReducer:
    """One rank's part without a transport: `protocol(gradient, port)` is a step, for a runner or the twin.

    Args: elements of the gradient; k of them selected per rank (or `density`); a method of METHODS and its options (fields of its class);
    `warmup` first steps are dense; `wide`: 64-bit indices, which vectors beyond 2^31 elements need.
    Raises: UnknownName, UsageError.
    """

    def __init__(
        self, rank: int, ranks: int, elements: int, *, k: int | None = None, density: float | None = None, method: str = "oktopk", warmup: int = 0,
        wide: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if method not in METHODS:
            raise UnknownName(f"no sparse all-reduce {method!r}", where="method", hint=f"one of {', '.join(METHODS)}")
        known = {f.name for f in fields(METHODS[method])}
        for name in options:
            if name not in known:
                raise UnknownName(f"no option {name!r}", where=f"method {method}", hint=f"it has {', '.join(sorted(known)) or 'none'}")
        for name in ("period", "region_period"):
            if options.get(name, 1) < 1:
                raise UsageError(f"must be >= 1 step, got {options[name]}", where=name)
        if elements < 1:
            raise UsageError(f"must be >= 1, got {elements}", where="elements")
        if (k is None) == (density is None):
            raise UsageError("give either k or density", where="k")
        if density is not None and not 0 < density <= 1:
            raise UsageError(f"must lie in (0, 1], got {density:g}", where="density")
        k = k if k is not None else max(1, int(density * elements)) if density is not None else 0
        if not 1 <= k <= elements:
            raise UsageError(f"must be 1..{elements}, got {k}", where="k")
        if warmup < 0:
            raise UsageError(f"must be >= 0 steps, got {warmup}", where="warmup")
        self.state = RankState(rank=rank, ranks=ranks, elements=elements, k=k, wide=wide)
        self.name, self.method, self.warmup = method, METHODS[method](**options), warmup
        self.method.start(self.state)
        self.dense = Dense()
        self.dense.start(self.state)
        self.walks: dict[str, ExchangeWalk] = {}  # by kind of step, compiled when the first comes

    @property
    def residual(self) -> NDArray[np.float32]:
        """What this rank has not sent yet; the array changes with the next step."""
        return self.state.residual

    @property
    def kind(self) -> str:
        """The program of the cycle that the next step runs."""
        sparse = self.state.step - self.warmup
        return "dense" if sparse < 0 else str(self.method.kind(sparse))

    def walk(self, kind: str) -> ExchangeWalk:
        """Of the program of the cycle for such a step."""
        if kind not in self.walks:
            state, reach = self.state, 0
            if getattr(self.method, "threshold", "") in ("gaussian", "sampled"):
                reach = ROOM_FACTOR * state.k  # which end between more limits
            program = program_of(self.name, kind, ranks=state.ranks, elements=state.elements, k=state.k, wide=state.wide, reach=reach)
            self.walks[kind] = ExchangeWalk(program, state.rank, self._exchange(kind))
        return self.walks[kind]

    def _exchange(self, kind: str) -> Exchange:
        exchange: Exchange = self.dense if kind == "dense" else self.method
        return exchange

    def protocol(self, gradient: NDArray[np.float32], port: Port) -> Protocol[Update]:
        """One step. Raises: UsageError for another size or type than agreed; and as `SparseAllReduce.step`."""
        state = self.state
        if gradient.dtype != np.float32 or gradient.shape != (state.elements,):
            what = f"{state.elements} float32, got {gradient.dtype} of shape {gradient.shape}"
            raise UsageError(f"the gradient must be {what}", where="gradient", hint="flatten it and convert it to float32")
        return self._step(gradient, port, self.kind)

    def _step(self, gradient: NDArray[np.float32], port: Port, kind: str) -> Protocol[Update]:
        exchange, walk = self._exchange(kind), self.walk(kind)
        exchange.begin(gradient, StepStats(step=self.state.step, kind=kind, limit_words=self.state.limit_words))
        yield from walk.steps(port)
        if isinstance(exchange, Dense):
            vector = exchange.vector()
            yield AllReduce("dense", vector)
            return exchange.end_with(vector)
        assert exchange.result is not None
        return exchange.result

    def state_dict(self) -> dict[str, Any]:
        """What to save: the residual and the count of steps. Thresholds and regions are found anew after loading."""
        return {"residual": self.residual.copy(), "step": self.state.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Raises: FormatError when the residual does not fit or is not finite."""
        residual = np.asarray(saved["residual"])
        if residual.dtype != np.float32 or residual.shape != (self.state.elements,):
            raise FormatError(f"must be {self.state.elements} float32, got {residual.dtype} of shape {residual.shape}", where="residual")
        if not np.isfinite(residual).all():
            raise FormatError("is not finite", where="residual")
        self.state.residual[:] = residual
        self.state.step = int(saved["step"])
        self.state.given = self.state.given_size = self.state.total = 0.0
        self.method.start(self.state)


class SparseAllReduce(RankReducer):
    """A `RankReducer` on a torch process group, of which nothing else should make use: its messages must stay in order.

    `timeout_s`: deadline of a step; a rank that dies, freezes or leaves ends it for all.
    """

    def __init__(self, group: Any, elements: int, *, timeout_s: float = 300.0, **settings: Any) -> None:
        super().__init__(group.rank(), group.size(), elements, **settings)
        self.runner = TorchRunner(group, timeout_s)

    def step(self, gradient: torch.Tensor | NDArray[np.float32]) -> Update:
        """Reduce a gradient (float32, flat, in host memory), which is only read.

        Raises, on every rank alike and with nothing sent: NotFinite, PlanMismatch (other size, k, method or step). GroupFailed, RunTimeout or,
        from a "meshwright" group, the error that names the rank at fault: the residual is that of the last complete step. MessageDamaged.
        """
        if isinstance(gradient, torch.Tensor):
            if gradient.device.type != "cpu":
                raise UsageError(f"the gradient is on {gradient.device}", where="gradient", hint="copy it to host memory first")
            gradient = gradient.detach().numpy()
        return self.runner.run(self.protocol(gradient, self.runner), self.state.step, self.walk(self.kind).phase)

    def xi(self, gradient: torch.Tensor | NDArray[np.float32]) -> float:
        """Assumption 1 measured for the step that `gradient` would make; costs three dense all-reduces and changes nothing."""
        return self.runner.run(measured_xi(self.state, np.asarray(gradient)), self.state.step)
