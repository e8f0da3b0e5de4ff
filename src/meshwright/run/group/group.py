"""The process group: every operation of torch.distributed, run by our programs where there is one, by the built-in backend otherwise.

torch 2.13: a creator may return a `ProcessGroup` subclass; the built-in group is registered for the device inside it, because FSDP2 and DTensor
ask for a backend by device. Every operation is overridden, so nothing falls through uncounted. FSDP2 and the functional collectives call
`all_gather_single`, `reduce_scatter_single` and `all_to_all_single`; older names are kept beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ...errors import MeshwrightError
from .call import Call, Session
from .code import compile_rank
from .engine import Engine
from .plans import Chosen
from .reductions import Reduction, reduction
from .work import JoinedWork, PlannedWork
from .worker import Task

__all__ = ["MeshwrightGroup", "Tally"]

Tensors = list[torch.Tensor]
TRIAL_ROUNDS = 4  # the first warms up
MEASURED = "measured: the built-in backend is faster"


@dataclass
class Tally:
    """What became of the collectives of a group: `planned[op, strategy]`, `builtin[op, reason]`: how often."""

    planned: Counter[tuple[str, str]]
    builtin: Counter[tuple[str, str]]


@dataclass(frozen=True)
class _Route:
    session: Session
    chosen: Chosen
    name: int  # for the recorder: what of the program's hash fits 63 bits


@dataclass
class _Trial:
    """Programs and the built-in backend (None), tried in turn; the least time of each, after a first round that warms up."""

    options: list[_Route | None]
    size_bytes: int
    calls: int = 0
    least_s: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.calls >= TRIAL_ROUNDS * len(self.options)


class MeshwrightGroup(dist.ProcessGroup):  # type: ignore[misc]
    """One process group. Collectives of one group run one after the other, those of different groups side by side."""

    def __init__(self, engine: Engine, builtin: Any) -> None:
        super().__init__(engine.rank, engine.size)
        self.engine, self.builtin = engine, builtin
        engine.attend(builtin)
        self.tally = Tally(Counter(), Counter())
        self._routes: dict[Any, _Route | _Trial | str] = {}
        self._name = ""
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, builtin)
        self.by_device: dict[str, Any] = {"cpu": builtin}

    def add_builtin(self, device: str, kind: Any, builtin: Any) -> None:
        """What runs tensors on another kind of device: NCCL on GPUs."""
        self.by_device[device] = builtin
        self._register_backend(torch.device(device), kind, builtin)

    def _for(self, tensors: Any) -> Any:
        """The built-in group for (lists of) tensors."""
        while isinstance(tensors, (list, tuple)):
            if not tensors:
                return self.builtin
            tensors = tensors[0]
        return self.by_device.get(tensors.device.type, self.builtin)

    # ---- what torch asks of any group --------------------------------------------------------------------------
    def getBackendName(self) -> str:
        return "meshwright"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def set_timeout(self, timeout: timedelta) -> None:
        self.engine.set_timeout(timeout.total_seconds())
        self.builtin._set_default_timeout(timeout)

    def forget_routes(self) -> None:
        """Choose again, because the plans are others."""
        self._routes.clear()

    def shutdown(self) -> None:
        self.engine.close()

    def abort(self) -> None:
        self.engine.abort()

    # ---- collectives in place ----------------------------------------------------------------------------------
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._in_place("all-reduce", tensors, opts.reduceOp, -1, lambda: self._for(tensors).allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()
        one = dist.AllreduceOptions()
        one.reduceOp = opts.reduceOp
        return JoinedWork(tensors, [self.allreduce([t], one) for t in tensors])

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        return self._in_place("broadcast", tensors, None, opts.rootRank, lambda: self._for(tensors).broadcast(tensors, opts))

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        return self._in_place("reduce", tensors, opts.reduceOp, opts.rootRank, lambda: self._for(tensors).reduce(tensors, opts))

    # ---- collectives between two tensors -----------------------------------------------------------------------
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        reason = "" if output.numel() == self.size() * input.numel() else "sizes do not fit"
        return self._between("all-gather", input, output, None, -1, lambda: self._for(output)._allgather_base(output, input, opts), reason)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        reason = "" if input.numel() == self.size() * output.numel() else "sizes do not fit"

        def builtin() -> Any:
            return self._for(output)._reduce_scatter_base(output, input, opts)

        return self._between("reduce-scatter", input, output, opts.reduceOp, -1, builtin, reason)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:  # fmt: skip
        opts = opts or dist.AllToAllOptions()
        even = len(set(output_splits)) <= 1 and len(set(input_splits)) <= 1
        reason = "" if even and output.numel() == input.numel() and input.numel() % self.size() == 0 else "unequal splits"

        def builtin() -> Any:
            return self._for(output).alltoall_base(output, input, output_splits, input_splits, opts)

        return self._between("all-to-all", input, output, None, -1, builtin, reason)

    alltoall_base = all_to_all_single

    # ---- collectives on lists of tensors -----------------------------------------------------------------------
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        builtin = lambda: self._for(inputs).allgather(outputs, inputs, opts)  # noqa: E731
        if len(inputs) != 1 or len(outputs) != 1 or not _alike([*outputs[0], inputs[0]]):
            return self._fall("all-gather", "several or unlike tensors", builtin)
        return self._listed("all-gather", inputs[0], outputs[0], None, -1, builtin, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        builtin = lambda: self._for(outputs).reduce_scatter(outputs, inputs, opts)  # noqa: E731
        if len(outputs) != 1 or len(inputs) != 1 or not _alike([*inputs[0], outputs[0]]):
            return self._fall("reduce-scatter", "several or unlike tensors", builtin)
        return self._listed("reduce-scatter", inputs[0], outputs[0], opts.reduceOp, -1, builtin, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        builtin = lambda: self._for(outputs).alltoall(outputs, inputs, opts)  # noqa: E731
        if len(inputs) != self.size() or len(outputs) != self.size() or not _alike([*outputs, *inputs]):
            return self._fall("all-to-all", "unlike tensors", builtin)
        return self._listed("all-to-all", inputs, outputs, None, -1, builtin, outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        builtin = lambda: self._for(inputs).gather(outputs, inputs, opts)  # noqa: E731
        here = outputs[0] if opts.rootRank == self.rank() and outputs else None
        if len(inputs) != 1 or not _alike([*(here or []), inputs[0]]):
            return self._fall("gather", "several or unlike tensors", builtin)
        return self._listed("gather", inputs[0], here, None, opts.rootRank, builtin, outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        builtin = lambda: self._for(outputs).scatter(outputs, inputs, opts)  # noqa: E731
        here = inputs[0] if opts.rootRank == self.rank() and inputs else None
        if len(outputs) != 1 or not _alike([*(here or []), outputs[0]]):
            return self._fall("scatter", "several or unlike tensors", builtin)
        return self._listed("scatter", here, outputs[0], None, opts.rootRank, builtin, outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        rows = [[row[i] for row in outputs] for i in range(len(inputs))]
        return JoinedWork(outputs, [self.allgather([row], [tensor], opts) for row, tensor in zip(rows, inputs, strict=True)])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return JoinedWork(outputs, [self.all_gather_single(out, tensor, opts) for out, tensor in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return JoinedWork(outputs, [self.reduce_scatter_single(out, tensor, opts) for out, tensor in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- not collectives of data -------------------------------------------------------------------------------
    def barrier(self, opts: Any = None) -> Any:
        self.engine.raise_if_failed()
        return self.engine.builtin("barrier", lambda: self.builtin.barrier(opts or dist.BarrierOptions()))

    def send(self, tensors: Tensors, peer: int, tag: int) -> Any:
        self.engine.raise_if_failed()
        return self._for(tensors).send(tensors, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Any:
        self.engine.raise_if_failed()
        return self._for(tensors).recv(tensors, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        self.engine.raise_if_failed()
        return self._for(tensors).recv_anysource(tensors, tag)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> Any:
        return self.builtin.monitored_barrier(opts or dist.BarrierOptions(), wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations inside `_coalescing_manager` are asked for one by one; each is a work of its own."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return JoinedWork([], [])

    # ---- routing -----------------------------------------------------------------------------------------------
    def _fall(self, op: str, reason: str, builtin: Callable[[], Any]) -> Any:
        self.engine.raise_if_failed()
        self.tally.builtin[op, reason] += 1
        return self.engine.builtin(op, builtin)

    def _in_place(self, op: str, tensors: Tensors, operator: Any, root: int, builtin: Callable[[], Any]) -> Any:
        if len(tensors) != 1 or self.engine.plans.never:
            return self._fall(op, self.engine.plans.never or "several tensors", builtin)
        tensor = tensors[0]
        if not _dense(tensor):
            return self._fall(op, "sparse", builtin)
        flat = tensor.detach().reshape(-1)
        after = None if tensor.is_contiguous() else _copier([tensor], flat)
        return self._go(Call(op, flat, flat, root), operator, builtin, tensors, after)

    def _between(
        self, op: str, source: torch.Tensor, target: torch.Tensor, operator: Any, root: int, builtin: Callable[[], Any], reason: str
    ) -> Any:  # fmt: skip
        reason = self.engine.plans.never or reason
        if reason or not _dense(source) or not _dense(target) or source.dtype != target.dtype:
            return self._fall(op, reason or "sparse or unlike tensors", builtin)
        flat = target.detach().reshape(-1)
        after = None if target.is_contiguous() else _copier([target], flat)
        return self._go(Call(op, source.detach().reshape(-1), flat, root), operator, builtin, [target], after)

    def _listed(
        self, op: str, source: torch.Tensor | Tensors | None, target: torch.Tensor | Tensors | None, operator: Any, root: int,
        builtin: Callable[[], Any], outputs: Any,
    ) -> Any:  # fmt: skip
        """Lists are joined to one tensor before, and taken apart after."""
        if self.engine.plans.never:
            return self._fall(op, self.engine.plans.never, builtin)
        after = None
        if isinstance(source, list):
            source = torch.cat([t.detach().reshape(-1) for t in source])
        into: torch.Tensor | None
        if isinstance(target, list):
            into = target[0].new_empty(sum(t.numel() for t in target))
            after = _copier(target, into)
        else:
            into = target.detach().reshape(-1) if target is not None else None
            if target is not None and into is not None and not target.is_contiguous():
                after = _copier([target], into)
        flat = source.detach().reshape(-1) if isinstance(source, torch.Tensor) else None
        return self._go(Call(op, flat, into, root), operator, builtin, outputs, after)

    def _go(self, call: Call, operator: Any, builtin: Callable[[], Any], outputs: Any, after: Callable[[], None] | None) -> Any:
        self.engine.raise_if_failed()
        given = call.given
        found: Reduction | None = None
        if operator is not None:
            found = reduction(operator, given.dtype)
            if found is None:
                return self._fall(call.op, "operator and type", builtin)
        elements = call.elements(self.size())
        key = call.op, call.root, elements, given.dtype
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._route(call, elements, given)
        if isinstance(route, _Trial):
            work = self._try(route, call, found, builtin, outputs, after)
            if route.over:
                self._routes[key] = self._settle(route, call)
            return work
        return self._run(route, call, found, builtin, outputs, after)

    def _run(
        self, route: _Route | str, call: Call, found: Reduction | None, builtin: Callable[[], Any], outputs: Any, after: Callable[[], None] | None
    ) -> Any:  # fmt: skip
        if isinstance(route, str):
            return self._fall(call.op, route, builtin)
        self.tally.planned[call.op, route.chosen.strategy] += 1
        work = PlannedWork(outputs, call.op)
        self.engine.submit(Task(call, route.session, found, route.name, work, after))
        return work

    # ---- trials ------------------------------------------------------------------------------------------------
    def _try(
        self, trial: _Trial, call: Call, found: Reduction | None, builtin: Callable[[], Any], outputs: Any, after: Callable[[], None] | None
    ) -> Any:  # fmt: skip
        """One call by the option whose turn it is. Calls under trial are waited for here, so that all ranks issue everything in one order."""
        number = trial.calls % len(trial.options)
        warm = trial.calls >= len(trial.options)
        trial.calls += 1
        self.barrier().wait()
        start = perf_counter()
        work = self._run(trial.options[number] or "on trial", call, found, builtin, outputs, after)
        work.wait()
        lasted = perf_counter() - start
        trial.least_s = trial.least_s or [float("inf")] * len(trial.options)
        if warm:
            trial.least_s[number] = min(trial.least_s[number], lasted)
        return work

    def _settle(self, trial: _Trial, call: Call) -> _Route | str:
        """The option that is fastest at its slowest rank: the same answer everywhere."""
        times = torch.tensor(trial.least_s, dtype=torch.float64)
        most = dist.AllreduceOptions()
        most.reduceOp = dist.ReduceOp.MAX
        self.engine.builtin("all-reduce", lambda: self.builtin.allreduce([times], most)).wait()
        winner = trial.options[int(times.argmin())]
        self.engine.plans.settle(call.op, call.root, trial.size_bytes, winner.chosen if winner is not None else MEASURED)
        return winner or MEASURED

    def _route(self, call: Call, elements: int, given: torch.Tensor) -> _Route | _Trial | str:
        if self.size() < 2:
            return "one rank"
        if not elements:
            return "no elements"
        if given.device.type != "cpu":
            return f"tensors on {given.device.type}"
        blocks = self.size() if call.op in ("all-gather", "reduce-scatter", "all-to-all", "scatter", "gather") else 1
        size_bytes = elements * blocks * given.element_size()
        found = self.engine.candidates(call.op, call.root, size_bytes)
        if isinstance(found, str):
            return found
        settled = self.engine.plans.settled.get(self.engine.plans.key(call.op, call.root, size_bytes))
        if settled is not None:
            found = [settled] if not isinstance(settled, str) else []
        made = [self._compiled(chosen, call, elements, given) for chosen in found]
        routes = [route for route in made if isinstance(route, _Route)]
        if not routes:
            return next((route for route in made if isinstance(route, str)), MEASURED)
        if self.engine.settings.tune and settled is None:
            return _Trial([*routes, None], size_bytes)
        return routes[0]

    def _compiled(self, chosen: Chosen, call: Call, elements: int, given: torch.Tensor) -> _Route | str:
        try:
            code = compile_rank(chosen.form, self.rank(), elements)
        except MeshwrightError as error:
            return str(error)
        session = Session(code, call.op, call.root, elements, given.dtype, given.device)
        return _Route(session, chosen, int(chosen.name[:15], 16))


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(_dense(t) and t.numel() == first.numel() and t.dtype == first.dtype and t.device == first.device for t in tensors)


def _copier(targets: Sequence[torch.Tensor], flat: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        first = 0
        for target in targets:
            target.detach().copy_(flat[first : first + target.numel()].view(target.shape))
            first += target.numel()

    return copy
