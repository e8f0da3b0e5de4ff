"""Walks a rank's columns of an inlined program with real tensors and messages.

Everything that does not change between steps is worked out once: `Executor` compiles the schedule into a list of functions. A
training step is then one pass over that list. The recorder is always on: start and end of every program step, in preallocated
arrays. `progress` (shared memory) tells the launcher where every rank is, also when it can no longer say so itself.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ...errors import Unsupported
from ...program.program import Kind, Part, Program
from ...program.tables import I32
from .device_time import DeviceTime, device_time
from .memory import RankMemory
from .rounds import RankRounds, Round, compile_rounds, require_ends
from .schedule import Receive, Schedule, compile_schedule
from .transport import Broken, Transport

__all__ = ["ComputeWork", "Executor", "StepFailed"]

Action = Callable[[], None]


class ComputeWork(Protocol):
    """What compute steps do; `compile` is called once per compute step of the rank."""

    def compile(self, op: int, memory: RankMemory) -> Action: ...


class StepFailed(Exception):
    """Something raised inside a program step (or while waiting for messages around it); the cause is `__cause__`."""

    def __init__(self, step: int, waiting_for: int) -> None:
        super().__init__(f"step {step}")
        self.step, self.waiting_for = step, waiting_for


class Executor:
    """`run()` executes the program once. `starts` and `ends` then hold `perf_counter` seconds by position in `order`; on an accelerator they are
    moments of its stream, and `run` ends when the device is done.

    `sends_ahead`, `sends_first`: see `compile_schedule`. `times`: of the memory's device unless given. Where the transport is grouped, all messages
    go in `rounds`, and compute steps that exchange messages of their own are told by `together`.
    Raises: Deadlock where grouped messages would wait for each other by NCCL's rules (`rounds.require_ends`).
    Raises (from `run`): StepFailed, whose cause is what the model, the optimizer or the transport raised.
    """

    def __init__(
        self, program: Program, orders: Sequence[I32], rank: int, *, memory: RankMemory, transport: Transport, work: ComputeWork | None = None,
        clock: Callable[[], AbstractContextManager[None]] | None = None, progress: Any = None, sends_ahead: int = 0,
        sends_first: bool = False, times: DeviceTime | None = None, together: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        self.program, self.rank, self.memory, self.transport, self.work, self.clock = program, rank, memory, transport, work, clock
        self.times = times or device_time(memory.device)
        self.rounds: RankRounds | None = None
        if transport.grouped:
            of_ranks = compile_rounds(program, orders, sends_ahead=sends_ahead, together=together)
            require_ends(program, of_ranks, together)  # every rank judges for itself, so that none begins what the others refuse
            self.rounds = of_ranks[rank]
        self.schedule: Schedule = (
            self.rounds.schedule if self.rounds is not None
            else compile_schedule(program, orders, rank, sends_ahead=sends_ahead, sends_first=sends_first)
        )  # fmt: skip
        self.order = self.schedule.order.tolist()
        self.progress = progress if progress is not None else array("q", [0, 0, 0])
        self.starts, self.ends = array("d", bytes(8 * len(self.order))), array("d", bytes(8 * len(self.order)))
        self._received: dict[int, tuple[Any, torch.Tensor]] = {}  # step -> (work, where the message lands)
        self._sent: dict[int, tuple[Any, torch.Tensor, bool]] = {}  # step -> (work, source, source is staging)
        self._plan = [self._compile(step) for step in self.order]
        self._before = [self._edge_actions(position) for position in range(len(self.order) + 1)]
        self._after = [self._free(self.schedule.frees.get(position, [])) for position in range(len(self.order))]

    def run(self) -> None:
        starts, ends, progress, times = self.starts, self.ends, self.progress, self.times
        now = time.perf_counter if times is None else times.now
        position = 0
        try:
            if times is not None:
                times.begin()
            for position, (before, action, after) in enumerate(zip(self._before, self._plan, self._after, strict=False)):
                progress[1] = position
                for prepare in before:
                    prepare()
                starts[position] = now()
                if action is not None:
                    action()
                ends[position] = now()
                if after is not None:
                    after()
            position = len(self.order)
            progress[1] = position
            for prepare in self._before[position]:
                prepare()
            if times is not None:
                times.settle(starts, ends)
        except Exception as error:
            step = self.order[min(position, len(self.order) - 1)] if self.order else -1
            # A connection may be closed before this rank waits for anything on it.
            raise StepFailed(step, error.peer + 1 if isinstance(error, Broken) else int(progress[2])) from error
        self.memory.drop_values()

    # ---- compilation -------------------------------------------------------------------------------------------
    def _free(self, buffers: Sequence[int]) -> Action | None:
        mine = [b for b in buffers if (info := self.memory.infos[b]) is not None and info.kind]
        if not mine:
            return None
        drop = self.memory.drop

        def free() -> None:
            for buffer in mine:
                drop(buffer)

        return free

    def _edge_actions(self, position: int) -> list[Action]:
        if self.rounds is not None:
            edge = self.rounds.before.get(position, [])
            return [self._exchange(one) if isinstance(one, Round) else self._wait_send(one) for one in edge]
        waits = [self._wait_send(step) for step in self.schedule.waits.get(position, [])]
        return waits + [self._post(receive) for receive in self.schedule.posts.get(position, [])]

    def _place(self, receive: Receive) -> Callable[[], torch.Tensor]:
        """Gives the tensor that a message is received into."""
        buffer, first, end = receive.source
        if receive.direct:
            return self.memory.view(buffer, first, end - first)
        info, take = self.memory.info(buffer), self.memory.staging.take
        numel, dtype = (end - first) * info.per_chunk, info.dtype
        return lambda: take(numel, dtype)

    def _post(self, receive: Receive) -> Action:
        transport, received, place = self.transport, self._received, self._place(receive)
        step, peer, tag = receive.step, receive.peer, receive.tag

        def post() -> None:
            tensor = place()
            received[step] = (transport.receive(tensor, peer, tag), tensor)

        return post

    def _exchange(self, one: Round) -> Action:
        transport, received, sent = self.transport, self._received, self._sent
        sends = [(send.step, send.peer, send.tag) for send in one.sends]
        places = [(receive.step, self._place(receive), receive.peer, receive.tag) for receive in one.receives]

        def exchange() -> None:
            taken = [(place(), peer, tag) for _, place, peer, tag in places]
            (work,) = transport.exchange([(sent[step][1], peer, tag) for step, peer, tag in sends], taken)
            for step, _, _ in sends:
                sent[step] = (work, *sent[step][1:])
            for (step, *_), (tensor, *_) in zip(places, taken, strict=True):
                received[step] = (work, tensor)

        return exchange

    def _wait_send(self, step: int) -> Action:
        sent, transport, give, progress = self._sent, self.transport, self.memory.staging.give, self.progress
        peer = self.schedule.sends[step].peer

        def wait() -> None:
            work, tensor, staged = sent.pop(step)
            progress[2] = peer + 1
            transport.wait(work)
            progress[2] = 0
            if staged:
                give(tensor)

        return wait

    def _compile(self, step: int) -> Action | None:
        kind = int(self.program.steps.kind[step])
        if kind == Kind.TRANSFER:
            return self._transfer(step)
        if kind == Kind.COMPUTE:
            if self.work is None:
                raise Unsupported("the program computes, and there is no work to run", where=self.program.describe(step))
            return self._paced(self.work.compile(int(self.program.steps.op[step]), self.memory))
        return None

    def _paced(self, action: Action) -> Action:
        clock = self.clock
        if clock is None:
            return action

        def paced() -> None:
            with clock():
                action()

        return paced

    def _transfer(self, step: int) -> Action:
        """Receive, read, add, store, send: whichever the step has, in that order."""
        s, memory = self.program.steps, self.memory
        parts = Part(int(s.parts[step]))
        src, dst, count = (int(s.src_buffer[step]), int(s.src_chunk[step])), (int(s.dst_buffer[step]), int(s.dst_chunk[step])), int(s.count[step])
        if s.size[step] >= 0 and self.rounds is None:
            return self._filled(step, src, dst, adds=Part.ADD in parts)
        stores, adds = Part.STORE in parts, Part.ADD in parts
        target = memory.view(*dst, count, zero=True) if stores else None
        source = memory.view(*src, count, zero=True) if Part.READ in parts else None
        in_place = stores and src == dst
        maximum = memory.takes_maximum(src[0]) or memory.takes_maximum(dst[0])
        if Part.RECV in parts:
            local = self._on_receipt(step, source if adds else None, target, in_place, maximum)
        else:
            local = self._local(src, dst, source, target, adds, stores, maximum)
        if Part.SEND not in parts:

            def finish() -> None:
                tensor, staged = local()
                if staged:
                    memory.staging.give(tensor)

            return finish
        sent, transport, send = self._sent, self.transport, self.schedule.sends[step]
        peer, tag = send.peer, send.tag
        if self.rounds is not None:  # the message goes with its round

            def hand_over() -> None:
                sent[step] = (None, *local())

            return hand_over

        def pass_on() -> None:
            tensor, staged = local()
            sent[step] = (transport.send(tensor, peer, tag), tensor, staged)

        return pass_on

    def _filled(self, step: int, src: tuple[int, int], dst: tuple[int, int], *, adds: bool) -> Action:
        """A message of the filled rows of a block, received or sent. gloo takes one shorter than the room for it; groups carry whole blocks."""
        memory, transport, received, sent, progress = self.memory, self.transport, self._received, self._sent, self.progress
        if step in self.schedule.receives:
            peer = self.schedule.receives[step].peer + 1

            def arrive() -> None:
                work, tensor = received.pop(step)
                progress[2] = peer
                transport.wait(work)
                progress[2] = 0
                memory.unpack(*dst, tensor, add=adds)
                memory.staging.give(tensor)

            return arrive
        send = self.schedule.sends[step]

        def pass_on() -> None:
            packed = memory.pack(*src)
            sent[step] = (transport.send(packed, send.peer, send.tag), packed, True)

        return pass_on

    def _on_receipt(
        self, step: int, source: Callable[[], torch.Tensor] | None, target: Callable[[], torch.Tensor] | None, in_place: bool,
        maximum: bool,
    ) -> Callable[[], tuple[torch.Tensor, bool]]:
        """Wait for the message and put it where it belongs; gives what a send part would pass on, and whether that is staging."""
        received, transport, progress, give = self._received, self.transport, self.progress, self.memory.staging.give
        receive = self.schedule.receives[step]
        peer, direct = receive.peer + 1, receive.direct
        combine = torch.maximum if maximum else torch.add

        def arrive() -> tuple[torch.Tensor, bool]:
            work, tensor = received.pop(step)
            progress[2] = peer
            transport.wait(work)
            progress[2] = 0
            if direct:
                return tensor, False
            if target is None:
                if source is not None:
                    combine(tensor, source(), out=tensor)
                return tensor, True
            place = target()
            if source is None:
                place.copy_(tensor)
            elif in_place:
                combine(place, tensor, out=place)
            else:
                combine(source(), tensor, out=place)
            give(tensor)
            return place, False

        return arrive

    def _local(
        self, src: tuple[int, int], dst: tuple[int, int], source: Callable[[], torch.Tensor] | None, target: Callable[[], torch.Tensor] | None,
        adds: bool, stores: bool, maximum: bool,
    ) -> Callable[[], tuple[torch.Tensor, bool]]:  # fmt: skip
        assert source is not None
        read = source
        if not stores or target is None:
            return lambda: (read(), False)
        write, memory = target, self.memory
        combine = torch.maximum if maximum else torch.add

        def copy() -> tuple[torch.Tensor, bool]:
            existed = memory.flats[dst[0]] is not None
            place = write()
            if adds and existed:
                combine(place, read(), out=place)
            else:
                place.copy_(read())
            return place, False

        return copy
