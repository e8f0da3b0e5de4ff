"""What runs behind a process group: its plans, its thread, its messages, its recorder, and what happens when something fails."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import GroupFailed, MeshwrightError, RunError
from ...fabric.fabric import Fabric
from ..executor.tags import ReservedTag
from .audit import Audit
from .beats import beats_of
from .call import Call, Session
from .chunks import BLOCKED
from .consent import Consent
from .health import GroupHealth, claim_of, refuse
from .messages import GlooMessages, all_connect, end_waits, mask_of
from .pairs import Pairs, PairWork, mixed
from .plans import Chosen, GroupPlans
from .rank_code import RankCode
from .record_file import pack_call
from .recorder import Recorder, flight_file
from .reductions import Reduction
from .settings import Settings
from .signatures import Signature
from .streams import DeviceRunner
from .verdict import NO_PROGRAM, View
from .views import view_of
from .work import loss_of
from .worker import Lost, Task, Worker

__all__ = ["Engine"]

MAX_CALLERS_BYTES = 1 << 16  # of a collective that runs in its caller's thread: gloo does not end the wait for a half of a longer message


class Engine:
    """Made with the group; thread and message connections only when the first planned collective comes, control connections at once."""

    def __init__(
        self, settings: Settings, store: Any, rank: int, size: int, timeout_s: float, *, global_ranks: Sequence[int], devices: Sequence[str],
        fabric: Fabric | None, world: int = 0,
    ) -> None:  # fmt: skip
        self.settings, self.store, self.rank, self.size = settings, store, rank, size
        self.global_ranks = tuple(global_ranks)
        self.timeout_s = settings.timeout_s or timeout_s
        self.meeting_s = max(self.timeout_s, timeout_s)  # processes may start long after one another
        self._worker: Worker | None = None
        self._messages: Any = None
        self._builtin: Any = None
        self._device_transports: list[Any] = []
        self._closed: MeshwrightError | None = None
        self._planning = False
        self._agreements = 0  # of all ranks on what they call
        self._asking: tuple[int, int, int, int] | None = None  # (number, call, bytes, agreements) of the call that is being planned or agreed on
        self.over: list[MeshwrightError] = []  # what ended the group, once something has
        self.inside = [0]  # number of the built-in collective that is waited for
        self.consent = Consent(self)
        self._signatures: dict[tuple[Session, str], tuple[int, int]] = {}
        own = dist.PrefixStore("meshwright", store)
        try:
            self.plans = GroupPlans(settings, own, rank, size, devices=devices, fabric=fabric, timeout_s=self.timeout_s, world=world)
        except MeshwrightError as error:
            # The others are at `meet`, or will be: without this they would wait there until their deadline.
            refuse(own, rank, size, error)
            raise
        self.health: GroupHealth | None = None
        self.pairs: Pairs | None = None
        self.recorder = Recorder(None, self.global_ranks, rank)
        if size > 1:
            audit = Audit(self._last, self._digest, self._call_at, lambda: self._asking, lambda: self._agreements)
            health = GroupHealth(own, rank, size, self.global_ranks, self.timeout_s, self._look, self._failed, self._busy, audit)
            health.meet(self.meeting_s)
            self.health, self.pairs = health, health.pairs()
            self.plans.wait_for = self._wait_for
        try:
            self.recorder = self._recorder(self.health.run if self.health is not None else secrets.token_hex(8))
            if size > 1:
                self.plans.agree()
            self.plans.require_fitting()
        except Exception as error:
            told = error
            if self.health is not None and self.health.error is None:  # all ranks must hear the same, whoever found it first
                told = self.health.fail(claim_of(error, rank, self.global_ranks, "joining the group"))
            self.close()
            raise told from (None if told is error else error)
        if self.health is not None:
            from .exit_notices import watch

            watch(self.health, self)

    def _recorder(self, run: str) -> Recorder:
        folder = self.settings.record_dir
        try:
            file = flight_file(folder, run, self.global_ranks[self.rank], max(self.global_ranks) + 1)
        except (OSError, RunError):
            if folder:  # asked for, so its absence is an error
                raise
            file = None
        return Recorder(file, self.global_ranks, self.rank)

    def attend(self, builtin: Any) -> None:
        """The built-in group beside this engine: its waits end too when the group fails."""
        self._builtin = builtin

    def attend_device(self, transport: Any) -> None:
        """What carries messages between accelerators: aborted when the group fails, or what is enqueued on it would stand still."""
        self._device_transports.append(transport)

    # ---- collectives (those of the built-in backend: see `builtin_calls`) ----------------------------------------------
    def candidates(self, op: str, root: int, size_bytes: int, call: int) -> list[Chosen] | str:
        """Programs for a call (packed), the best predicted first, or why there is none; see `GroupPlans`."""
        # Trials and a probe call collectives of their own before this one, so then it is not the next.
        others = bool(self.settings.tune) or self.plans.find_fabric is not None
        if not others and self.size > 1 and self.plans.tries(op, root, size_bytes):
            # Nobody would hear from a plan that another call is made, so all agree on it. That counts as a call of its own: a number that was told as
            # this call's, and then is that of a trial's barrier, is a divergence to a rank that hears of the first late.
            self.agree(self.recorder.asked(call, size_bytes, 0), (call, size_bytes))
            others = True
        self._planning = True
        self._asking = None if others else (self.recorder.number + 1, call, size_bytes, self._agreements)
        try:
            return self.plans.candidates(op, root, size_bytes)
        finally:
            self._planning, self._asking = False, None

    def _last(self) -> int:
        return self.recorder.number

    def _digest(self, number: int) -> int | None:
        return self.recorder.digest(number)

    def _call_at(self, number: int) -> tuple[int, int] | None:
        found = self.recorder.calls.get(number)
        return found[:2] if found is not None else None

    def submit(self, task: Task, *, waits: bool = False) -> None:
        """`waits`: the caller will wait at once, so a small collective runs in its thread where nothing is before it."""
        call, size_bytes = self._signature(task.session, task.reduction)
        task.number = self.recorder.asked(call, size_bytes, task.name)
        worker = self._worker or self._start()
        task.mask = mask_of(task.number, call, size_bytes, task.name)
        if waits and size_bytes <= MAX_CALLERS_BYTES and worker.run_here(task):
            return
        worker.submit(task)
        # `give_up` may have emptied the queue just before this task came into it; done again, it ends the task too.
        if worker.failed is not None:  # the group failed meanwhile, and the worker may be blocked
            worker.give_up(worker.failed)

    def run_on(
        self, runner: DeviceRunner, call: Call, session: Session, reduction: Reduction | None, name: int, outputs: Any,
        after: Callable[[], None] | None,
    ) -> Any:  # fmt: skip
        """A collective on an accelerator: enqueued now, in this thread. Raises: what the ranks make of a failure."""
        what, size_bytes = self._signature(session, reduction)
        number = self.recorder.asked(what, size_bytes, name)
        try:
            return runner.run(call, session, reduction, outputs, after)
        except Exception as error:
            self.raise_if_failed()
            found = self._verdict(error, number, call.op)
            self.over.append(found)
            raise found from (None if found is error else error)

    def _start(self) -> Worker:
        store = dist.PrefixStore("meshwright/messages", self.store)
        try:
            if not all_connect(self.plans.store, self.rank, self.size, self._wait_for, self.raise_if_failed):
                raise self.lost_builtin("closed")  # another rank has been told of the end
            self._messages = GlooMessages(store, self.rank, self.size, self.meeting_s)
        except RuntimeError as error:
            raise self.lost_builtin("closed") from error
        if self.settings.debug:
            from .checksums import CheckedMessages

            self._messages = CheckedMessages(self._messages, self.global_ranks)
        worker = self._worker = Worker(self._messages, self.recorder, self.timeout_s, self._diagnose)
        if self.over:  # told while it connected: whoever was told found nothing yet whose waits it could end
            self._messages.abort()
            worker.give_up(self.over[0])
            raise self.over[0]
        return worker

    def _signature(self, session: Session, reduction: Reduction | None) -> tuple[int, int]:
        key = session, reduction.name if reduction is not None else ""
        found = self._signatures.get(key)
        if found is None:
            blocks = self.size if session.op in BLOCKED else 1
            call = pack_call(session.op, session.root, key[1], str(session.dtype).removeprefix("torch."))
            found = self._signatures[key] = call, session.elements * blocks * session.dtype.itemsize
        return found

    def forget(self, session: Session) -> None:
        """No call will come through this session again."""
        for key in [key for key in self._signatures if key[0] is session]:
            del self._signatures[key]

    def wait_inside(self, work: Any, number: int, timeout: timedelta | None) -> bool:
        """Wait for a collective of the built-in backend. Raises: what the ranks make of it if it is lost."""
        self.inside[0] = number
        try:
            return bool(work.wait(timeout) if timeout else work.wait())
        except RuntimeError as error:
            self.explain(error)
            raise  # what was asked for is not possible: every rank hears the same, and the group goes on
        finally:
            self.inside[0] = 0

    def agree(self, number: int, signature: Signature, timeout_s: float | None = None) -> None:
        """Wait until all ranks are about to make this call. Raises: what ended the group, RankDiverged where a rank makes another call."""
        assert self.health is not None
        what = number, *signature
        if number > self.recorder.number:
            self._asking = *what, self._agreements
        self.inside[0] = number
        try:
            self.health.agree(what, timeout_s or self.timeout_s)
            self._agreements += 1
        except MeshwrightError as error:
            self.over.append(error)
            raise self.over[0] from None
        finally:
            self.inside[0] = 0
            if number > self.recorder.number:
                self._asking = None

    def message(self, run: Callable[..., Any], tensors: list[Any], peer: int | None, tag: int, *, sends: bool) -> Any:
        """A message of the user's own to or from a rank (None: from any). Raises: what ended the group."""
        self.raise_if_failed()
        if self.pairs is None or len(tensors) != 1 or tensors[0].device.type != "cpu":
            return run(tensors, tag) if peer is None else run(tensors, peer, tag)
        if peer is None:
            self.pairs.uncounted.add(tag)
            return PairWork(run(tensors, mixed(tag, tensors[0])), self, 0)
        self.pairs.posts(tensors[0], peer, tag, sends=sends)
        return PairWork(run(tensors, peer, mixed(tag, tensors[0])), self, 0)

    def monitored_barrier(self, timeout_s: float | None) -> None:
        self.raise_if_failed()
        call = pack_call("monitored-barrier", -1, "", "")
        number = self.recorder.asked(call, 0, 0)
        if self.health is not None:
            self.agree(number, (call, 0), timeout_s)

    def explain(self, error: RuntimeError) -> None:
        """Raises: what the ranks make of an error of the built-in backend, if it tells of a lost connection."""
        why = loss_of(error)
        if why:
            raise self.lost_builtin(why) from error

    def set_timeout(self, timeout_s: float) -> None:
        if self.settings.timeout_s is None:
            self.timeout_s = timeout_s
            if self._worker is not None:
                self._worker.timeout_s = timeout_s

    # ---- failures ----------------------------------------------------------------------------------------------
    def raise_if_failed(self) -> None:
        if self.over:
            raise self.over[0]

    def _busy(self) -> bool:
        worker = self._worker
        return worker is not None and worker.task is not None

    def _look(self) -> View:
        """This rank's own view, for the control thread."""
        worker = self._worker
        task = worker.task if worker is not None else None
        code = task.session.code if task is not None else None
        assert code is None or isinstance(code, RankCode), "the thread walks no waves"
        view = view_of(self.recorder, self.rank, code, worker.under if worker is not None else None, self._planning)
        if view.state == "idle" and self.inside[0]:
            view.state, view.number = "builtin", self.inside[0]
        # Also while a call that nobody waits for is walked: what differs may be the call that is asked about, not the one under way.
        if self._asking is not None and self._asking[0] > view.asked and view.state != "planning":
            view.asked = self._asking[0]
            view.history.append((*self._asking[:3], 0))
        if view.state == "planning":
            view.number = self.recorder.number + 1
            if self._asking is not None:
                view.history.append((*self._asking[:3], NO_PROGRAM))
            view.waiting, view.peer, view.receives = self.rank != 0, 0 if self.rank else -1, True
            view.text = f"rank {self.global_ranks[self.rank]} waits for the plan from rank {self.global_ranks[0]}" if self.rank else ""
        return view

    def _diagnose(self, error: Exception, task: Task) -> MeshwrightError:
        found = self._cause(error, task)
        self.over.append(found)
        return found

    def _cause(self, error: Exception, task: Task) -> MeshwrightError:
        if self._closed is not None:
            return self._closed
        if self.health is not None and isinstance(error, Lost):
            return self.health.lost(error.why)
        found = self._verdict(error, task.number, task.call.op)
        if found is not error and found.__cause__ is None:
            found.__cause__ = error
        return found

    def diverged(self, error: MeshwrightError, op: str) -> MeshwrightError:
        """All ranks have found this in what they told each other before a call. The group is over; gives what every rank raises."""
        found = self._verdict(error, self.recorder.number, op)
        self.over.append(found)
        return self.over[0]

    def _verdict(self, error: Exception, number: int, op: str) -> MeshwrightError:
        """What all ranks make of an error of this one in its collective `number`."""
        if self.health is not None:
            return self.health.fail(claim_of(error, self.rank, self.global_ranks, f"collective {number} ({op})"))
        return error if isinstance(error, MeshwrightError) else GroupFailed(f"{type(error).__name__}: {error}", where=op)

    def lost_builtin(self, why: str) -> MeshwrightError:
        """The built-in backend lost a collective, or could not be made: what the ranks make of it."""
        if self._closed is not None:
            return self._closed
        found = self.health.lost(why) if self.health is not None else GroupFailed(f"the built-in backend failed ({why})")
        self.over.append(found)
        return found

    def _failed(self, error: MeshwrightError) -> None:
        """The group's verdict, in the control thread: end every wait."""
        self.over.append(error)
        self.recorder.verdict(str(error))
        worker, messages = self._worker, self._messages
        if worker is not None:
            # First of all: a task that comes now must find it, whatever ends the waits below.
            worker.failed = worker.failed or error
        if messages is not None:
            messages.abort()
        if worker is not None:
            worker.give_up(error)
        if self._builtin is not None and self.size > 1:
            # No wait of gloo can be interrupted, but one that times out closes all connections of its group.
            end_waits(self._builtin, self.rank, self.size, ReservedTag.BUILTIN_ABORT)
        for transport in self._device_transports:
            with contextlib.suppress(RuntimeError):  # aborted already, by its own watchdog
                transport.abort()

    def _wait_for(self, key: str) -> None:
        """A key of the store, from another rank of this group. While that rank works on it (`beating`), the deadline does not pass."""
        assert self.health is not None
        deadline, pause, beats = time.monotonic() + self.timeout_s, 0.0005, 0
        try:
            while not self.plans.store.check([key]):
                self.raise_if_failed()
                if time.monotonic() > deadline:
                    before, beats = beats, beats_of(self.plans.store, key)
                    if beats == before:
                        raise self.health.lost("deadline")
                    deadline = time.monotonic() + self.timeout_s
                time.sleep(pause)
                pause = min(0.02, 1.5 * pause)
        except RuntimeError as error:
            raise self.health.lost("closed") from error

    # ---- the end -----------------------------------------------------------------------------------------------
    def abort(self) -> None:
        if self.health is not None and self.health.error is None:
            name = self.global_ranks[self.rank]
            self.health.fail(claim_of(GroupFailed(f"rank {name} aborted the group"), self.rank, self.global_ranks, ""))
        elif self._messages is not None:
            self._messages.abort()

    def close(self) -> None:
        """Ends the thread and all connections. A collective still under way is given up."""
        if self._closed is not None:
            return
        self._closed = GroupFailed("the process group was destroyed", hint="make a new one with init_process_group or new_group")
        # In front of a failure: who calls a closed group hears that it is closed.
        self.over.insert(0, self._closed)
        worker, self._worker = self._worker, None
        if worker is not None:
            # Without an abort first: what the thread has nearly done should be done, as peers wait for it.
            worker.close(0.2)
            if worker.alive and self._messages is not None:
                self._messages.abort()
                worker.close(1.0)  # one that is blocked in the transport ends with its wait
        self.consent.close()
        self._messages = self._builtin = None
        self._device_transports.clear()
        if self.health is not None:
            self.health.close()
        self.recorder.close()

    def let_go(self) -> None:
        """The process ends without having destroyed the group. Threads and connections are ended here, while there is an interpreter."""
        self.close()
