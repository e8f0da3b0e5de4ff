"""The process group: every operation of torch.distributed, run by our programs where there is one, by the built-in backend otherwise.

torch 2.13: a creator may return a `ProcessGroup` subclass; the built-in group is registered for the device inside it, because FSDP2 and DTensor
ask for a backend by device. Every operation is overridden, so nothing falls through uncounted. FSDP2 and the functional collectives call
`all_gather_single`, `reduce_scatter_single` and `all_to_all_single`; older names are kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # torch 2.13 leaves it out of `dist`

from ...errors import MeshwrightError
from .arguments import Arguments
from .builtin_calls import Hand, Tally, builtin_call
from .call import Call, Code, Session
from .chunks import BLOCKED
from .engine import Engine
from .plans import Chosen
from .quick_calls import QuickCalls
from .rank_code import compile_rank
from .reductions import Reduction, reduction
from .routes import Builtin, Route, Routes, Trial, alike, copier, dense, in_a_row, packed, side_by_side, unpack
from .signatures import REDUCING, Signature, signature_of, signing
from .streams import DeviceRunner
from .trials import Trials
from .waves import Waves, compile_waves, waves_of
from .work import JoinedWork, PlannedWork
from .worker import Task

__all__ = ["MeshwrightGroup"]

UNLIKE = "tensors of unlike lengths, types or devices, or sparse ones,"

Tensors = list[torch.Tensor]
MEASURED, SPARSE = "measured: the built-in backend is faster", "sparse"


class MeshwrightGroup(dist.ProcessGroup):  # type: ignore[misc]
    """One process group. Collectives of one group run one after the other, those of different groups side by side."""

    def __init__(self, engine: Engine, builtin: Any) -> None:
        super().__init__(engine.rank, engine.size)
        self.engine, self.builtin, self.tally = engine, builtin, Tally()
        engine.attend(builtin)
        self._quick = QuickCalls(engine, builtin)
        self._routes = Routes(engine.forget, self._quick.forget)
        self._name, self._ranks = "", engine.size
        self._arguments = Arguments(engine, builtin)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, builtin)
        self.by_device: dict[str, Any] = {"cpu": builtin}
        self.runners: dict[str, DeviceRunner] = {}
        self._waves: dict[str, Waves] = {}  # by program
        self._hands: dict[Any, Hand] = {}
        self._barrier = builtin_call(engine, "barrier", builtin.barrier, [0])
        self._quick.install(self)

    def add_builtin(self, device: str, kind: Any, builtin: Any) -> None:
        """What runs tensors on another kind of device where no program does: NCCL on GPUs."""
        self._quick.uninstall(self)
        self.by_device[device] = builtin
        self._register_backend(torch.device(device), kind, builtin)

    def add_runner(self, device: str, runner: DeviceRunner) -> None:
        """What runs programs on tensors of this kind of device, in place of the group's thread."""
        self.forget_routes()
        self.runners[device] = runner

    def _for(self, tensors: Any) -> Any:
        """The built-in group for (lists of) tensors."""
        if len(self.by_device) == 1:
            return self.builtin
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

    def forget_routes(self) -> None:  # the plans are others
        self._quick.forget()
        self._routes.clear()

    def shutdown(self) -> None:
        self.engine.close()

    def abort(self) -> None:
        self.engine.abort()

    # ---- collectives in place ----------------------------------------------------------------------------------
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._in_place("all-reduce", tensors, -1, Builtin(self._for(tensors).allreduce, (tensors, opts)))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()
        one = dist.AllreduceOptions()  # asynchronous
        one.reduceOp = opts.reduceOp
        return JoinedWork(tensors, [self.allreduce([t], one) for t in tensors])

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        return self._in_place("broadcast", tensors, opts.rootRank, Builtin(self._for(tensors).broadcast, (tensors, opts)))

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        return self._in_place("reduce", tensors, opts.rootRank, Builtin(self._for(tensors).reduce, (tensors, opts)))

    # ---- collectives between two tensors -----------------------------------------------------------------------
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or AllgatherOptions()
        fits = output.numel() == self._ranks * input.numel()
        return self._between("all-gather", input, output, Builtin(self._for(output)._allgather_base, (output, input, opts)), fits)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        fits = input.numel() == self._ranks * output.numel()
        return self._between("reduce-scatter", input, output, Builtin(self._for(output)._reduce_scatter_base, (output, input, opts)), fits)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:  # fmt: skip
        opts = opts or dist.AllToAllOptions()
        builtin = Builtin(self._for(output).alltoall_base, (output, input, output_splits, input_splits, opts))
        self._arguments.require_splits((input, input_splits), (output, output_splits))
        signed = signing("all-to-all", self._ranks)(builtin.args)
        even = self._arguments.all_exchange(self._arguments.counts(input, input_splits), self._arguments.counts(output, output_splits), signed)
        if not even or not alike([output, input]):
            return self._fall("all-to-all", "unequal splits", builtin, signed)
        return self._between("all-to-all", input, output, builtin)

    alltoall_base = all_to_all_single

    # ---- collectives on lists of tensors -----------------------------------------------------------------------
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or AllgatherOptions()
        builtin = Builtin(self._for(inputs).allgather, (outputs, inputs, opts))
        self._arguments.require_lists("all-gather", inputs, outputs, "outputs")
        if not alike([*outputs[0], inputs[0]]):
            return self._fall("all-gather", "unlike tensors", builtin)
        return self._listed("all-gather", inputs[0], outputs[0], -1, builtin, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        builtin = Builtin(self._for(outputs).reduce_scatter, (outputs, inputs, opts))
        self._arguments.require_lists("reduce-scatter", outputs, inputs, "inputs")
        if not alike([*inputs[0], outputs[0]]):
            return self._fall("reduce-scatter", "unlike tensors", builtin)
        return self._listed("reduce-scatter", inputs[0], outputs[0], -1, builtin, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        builtin = Builtin(self._for(inputs).alltoall, (outputs, inputs, opts))
        self._arguments.require_rows(inputs, outputs)
        signed = signing("all-to-all", self._ranks)(builtin.args)
        even = self._arguments.all_exchange([t.numel() for t in inputs], [t.numel() for t in outputs], signed)
        if even and alike([*outputs, *inputs]):
            return self._listed("all-to-all", inputs, outputs, -1, builtin, outputs)
        if inputs[0].device.type != "cpu":
            return self._fall("all-to-all", "unequal splits", builtin, signed)
        # gloo's own call takes lists of one size only; one tensor in unequal parts it does take
        into = outputs[0].new_empty(sum(t.numel() for t in outputs))
        rows, splits = [in_a_row(t) for t in inputs], [[t.numel() for t in row] for row in (outputs, inputs)]
        work = self._fall("all-to-all", "unequal splits", Builtin(self.builtin.alltoall_base, (into, torch.cat(rows), *splits, opts)), signed)
        return JoinedWork(outputs, [work], copier(outputs, into))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        builtin = Builtin(self._for(inputs).gather, (outputs, inputs, opts))
        here = outputs[0] if opts.rootRank == self.rank() and outputs else None
        self._arguments.require_lists("gather", inputs, outputs, "outputs", opts.rootRank)
        self._arguments.require("gather", alike([*(here or []), inputs[0]]), UNLIKE)
        return self._listed("gather", inputs[0], here, opts.rootRank, builtin, outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        builtin = Builtin(self._for(outputs).scatter, (outputs, inputs, opts))
        here = inputs[0] if opts.rootRank == self.rank() and inputs else None
        self._arguments.require_lists("scatter", outputs, inputs, "inputs", opts.rootRank)
        self._arguments.require("scatter", alike([*(here or []), outputs[0]]), UNLIKE)
        return self._listed("scatter", here, outputs[0], opts.rootRank, builtin, outputs)

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
        return self._barrier(opts or dist.BarrierOptions())

    def send(self, tensors: Tensors, peer: int, tag: int) -> Any:
        return self.engine.message(self._for(tensors).send, tensors, peer, tag, sends=True)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Any:
        return self.engine.message(self._for(tensors).recv, tensors, peer, tag, sends=False)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        return self.engine.message(self._for(tensors).recv_anysource, tensors, None, tag, sends=False)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Those that do not come are named at all others, and the group is over. Raises: RunTimeout; what ended the group."""
        self.engine.monitored_barrier(timeout.total_seconds() if timeout is not None else None)

    def _start_coalescing(self, _: torch.device) -> None:
        """Operations inside `_coalescing_manager` are asked for one by one; each is a work of its own."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return JoinedWork([], [])

    # ---- routing (`lasting`: equal calls fall for as long as routes are kept) ------------------------------------
    def _fall(self, op: str, reason: str, builtin: Builtin, signed: Signature | None = None, *, lasting: bool = False) -> Any:
        key, count = (op, reason, builtin.run), self.tally.count(op, reason)
        hand = self._hands.get(key)
        if hand is None:
            hand = self._hands[key] = builtin_call(self.engine, op, builtin.run, count, signing(op, self._ranks))
        if side_by_side(builtin.args):
            work = hand(*builtin.args, signed=signed)
            self._quick.learn(op, builtin.args, signed if lasting else None, count)
            return work
        # gloo reads on from the first element, through the gaps of a view, and says nothing (2.13): it gets copies
        targets, *others = builtin.args[:-1]
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        work = hand(packed(targets, back), *(packed(x) for x in others), builtin.args[-1], signed=signed)
        return JoinedWork(targets, [work], lambda: unpack(back))

    def _routed(
        self, op: str, root: int, elements: int, given: torch.Tensor, builtin: Builtin, signed: Signature
    ) -> tuple[Route | Trial | str, Reduction | None]:
        """What runs an operation, or why the built-in backend does; nothing is copied or flattened to find out."""
        engine = self.engine
        if engine.plans.never:
            return engine.plans.never, None
        key = op, root, elements, given.dtype, given.device.type
        route = self._routes.get(key)
        if isinstance(route, str):
            return route, None
        engine.raise_if_failed()
        if not dense(given):
            return SPARSE, None
        found: Reduction | None = None
        if op in REDUCING:
            found = reduction(builtin.args[-1].reduceOp, given.dtype)
            if found is None:
                return "operator and type", None
        if route is None:
            route = self._routes[key] = self._route(op, root, elements, given, signed[0])
        return route, found

    def _in_place(self, op: str, tensors: Tensors, root: int, builtin: Builtin) -> Any:
        self._arguments.require_one(op, tensors, root)
        tensor = tensors[0]
        signed = signature_of(op, root, tensor.numel(), tensor, builtin.args[-1], self._ranks)
        route, found = self._routed(op, root, tensor.numel(), tensor, builtin, signed)
        if isinstance(route, str):
            return self._fall(op, route, builtin, signed, lasting=route != SPARSE)
        flat = in_a_row(tensor)
        after = None if tensor.is_contiguous() else copier([tensor], flat)
        return self._go(route, Call(op, flat, flat, root), found, builtin, tensors, after)

    def _between(self, op: str, source: torch.Tensor, target: torch.Tensor, builtin: Builtin, fits: bool = True) -> Any:
        self._arguments.require_pair(op, source, target, fits)
        elements = (target if op == "reduce-scatter" else source).numel() // (self._ranks if op == "all-to-all" else 1)
        signed = signature_of(op, -1, elements, source, builtin.args[-1], self._ranks)
        route, found = self._routed(op, -1, elements, source, builtin, signed)
        if isinstance(route, str) or not dense(target):
            return self._fall(op, route if isinstance(route, str) else SPARSE, builtin, signed, lasting=dense(target) and route != SPARSE)
        flat = in_a_row(target)
        after = None if target.is_contiguous() else copier([target], flat)
        return self._go(route, Call(op, in_a_row(source), flat), found, builtin, [target], after)

    def _listed(
        self, op: str, source: torch.Tensor | Tensors | None, target: torch.Tensor | Tensors | None, root: int, builtin: Builtin, outputs: Any
    ) -> Any:  # fmt: skip
        """Lists are joined to one tensor before, and taken apart after. Every tensor in them is one block."""
        block = next(x[0] if isinstance(x, list) else x for x in (source, target) if x is not None)
        signed = signature_of(op, root, block.numel(), block, builtin.args[-1], self._ranks)
        route, found = self._routed(op, root, block.numel(), block, builtin, signed)
        if isinstance(route, str):
            return self._fall(op, route, builtin, signed, lasting=route != SPARSE)
        if isinstance(source, list):
            source = torch.cat([in_a_row(t) for t in source])
        into = after = None
        if isinstance(target, list):
            into = target[0].new_empty(sum(t.numel() for t in target))
            after = copier(target, into)
        elif target is not None:
            into = in_a_row(target)
            after = None if target.is_contiguous() else copier([target], into)
        flat = in_a_row(source) if source is not None else None
        return self._go(route, Call(op, flat, into, root), found, builtin, outputs, after)

    def _go(
        self, route: Route | Trial, call: Call, found: Reduction | None, builtin: Builtin, outputs: Any, after: Callable[[], None] | None
    ) -> Any:  # fmt: skip
        if isinstance(route, Trial):
            return self._try(route, call, found, builtin, outputs, after)
        self.tally.planned[call.op, route.chosen.strategy] += 1
        runner = self.runners.get(call.given.device.type)
        if runner is not None:
            return self.engine.run_on(runner, call, route.session, found, route.name, outputs, after)
        work = PlannedWork(outputs, call.op)
        self.engine.submit(Task(call, route.session, found, route.name, work, after), waits=not builtin.args[-1].asyncOp)
        return work

    def _try(
        self, trial: Trial, call: Call, found: Reduction | None, builtin: Builtin, outputs: Any, after: Callable[[], None] | None
    ) -> Any:  # fmt: skip
        """One call by the option whose turn it is. Calls under trial are waited for here, so that all ranks issue everything in one order.
        Each lasts as long as at its slowest rank: all hear that before the next."""
        option = trial.options[trial.trials.turn]
        self.barrier().wait()
        start = perf_counter()
        work = self._fall(call.op, "on trial", builtin) if option is None else self._go(option, call, found, builtin, outputs, after)
        work.wait()
        if (runner := self.runners.get(call.given.device.type)) is not None:
            runner.synchronize()
        lasted = torch.tensor([perf_counter() - start], dtype=torch.float64)
        most = dist.AllreduceOptions()
        most.reduceOp = dist.ReduceOp.MAX
        builtin_call(self.engine, "all-reduce", self.builtin.allreduce, [0])([lasted], most).wait()
        trial.trials.took(float(lasted))
        if trial.trials.over:
            winner = trial.options[trial.trials.winner]
            self.engine.plans.settle(call.op, call.root, trial.size_bytes, winner.chosen if winner is not None else MEASURED)
            self._routes[trial.key] = winner or MEASURED
        return work

    def _route(self, op: str, root: int, elements: int, given: torch.Tensor, call: int) -> Route | Trial | str:
        if self._ranks < 2:
            return "one rank"
        if not elements:
            return "no elements"
        if given.device.type != "cpu" and given.device.type not in self.runners:
            return f"tensors on {given.device.type}"
        size_bytes = elements * (self._ranks if op in BLOCKED else 1) * given.element_size()
        found = self.engine.candidates(op, root, size_bytes, call)
        if isinstance(found, str):
            return found
        settled = self.engine.plans.settled.get(self.engine.plans.key(op, root, size_bytes))
        if settled is not None:
            found = [settled] if not isinstance(settled, str) else []
        made = [self._compiled(chosen, op, root, elements, given) for chosen in found]
        routes = [route for route in made if isinstance(route, Route)]
        if not routes:
            return next((route for route in made if isinstance(route, str)), MEASURED)
        tune, tune_s = self.engine.settings.tune, self.engine.settings.tune_s
        options: list[Route | None] = [*routes, None] if tune else [None, routes[0]]  # the first stays unless beaten
        if settled is None and (tune or self.engine.plans.tries(op, root, size_bytes)):
            trials = Trials(len(options), tune_s, small=not tune)
            return Trial(options, size_bytes, trials, (op, root, elements, given.dtype, given.device.type))
        return routes[0]

    def _compiled(self, chosen: Chosen, op: str, root: int, elements: int, given: torch.Tensor) -> Route | str:
        runner = self.runners.get(given.device.type)
        code: Code
        try:
            if runner is None:
                code = compile_rank(chosen.form, self.rank(), elements)
            else:
                if chosen.name not in self._waves:
                    self._waves[chosen.name] = waves_of(chosen.form.unrolled)
                code = compile_waves(chosen.form, self._waves[chosen.name], self.rank(), elements)
        except MeshwrightError as error:
            return str(error)
        with runner.on_stream(given.device) if runner is not None else nullcontext():
            session = Session(code, op, root, elements, given.dtype, given.device)
        return Route(session, chosen, int(chosen.name[:15], 16))
