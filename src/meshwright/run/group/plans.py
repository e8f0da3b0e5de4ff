"""Which program a process group runs for an operation and a size.

Plan files come first. Otherwise, with a fabric, the group's first rank plans when a size class is first met, and hands the program to the others
through the store, so that planners with a time limit need not agree. The others wait for it beyond their deadline while it plans (`beats`). Sizes
within a factor of two share a program: chunks follow the tensor's length (`chunks`). A program is taken only where the simulator says that it beats
what the built-in backend does, a ring; otherwise the built-in backend is the answer. All ranks compare what they were told when the group is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...errors import FormatError, MeshwrightError, PlanMismatch, Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...plan.plan import Plan
from ...program.hash import program_hash
from ...program.program import REPRODUCIBLE_SUMS, Program
from .beats import beating
from .merged_rates import merge_near_rates
from .plan_cache import PlanCache, cache_folder
from .plan_match import require_fitting
from .predict import WALKS, executor_transport, walked
from .rank_code import Form, form_of
from .settings import Settings

__all__ = ["Chosen", "GroupPlans", "size_class"]

MAX_EFFORT_CANDIDATES = 15  # the whole choice may use as much effort as so many candidates at their own limit (`Settings.plan_s`)
MAX_LAST_READ_S = 5.0  # that a rank waits for the others to have read why the group ends, before its store goes with it
MAX_SHARE_OF_BUILTIN_TIME = 0.98  # predicted time of a plan over the built-in backend's, up to which it is used: a smaller gain is within the error
# What may be fastest where only the number of messages counts.
FEW_ROUNDS = ("recursive-doubling", "halving-doubling", "direct", "bruck", "rooted-tree")
FOLDING = ("fold-tree", "halving-doubling", "recursive-doubling")  # what may keep `tree`; the first always does
SMALL_CLASS_BYTES = 1 << 10  # for which all small collectives of an operation are planned: the rounds count, not the bytes
MAX_TRIED_RANKS = 64  # of a group whose small collectives get plans: those that all send to all have n² messages
ROOTED = ("broadcast", "reduce", "scatter", "gather")


@dataclass(frozen=True)
class Chosen:
    """`builtin_s`: the prediction for the built-in backend, None where it was not asked."""

    form: Form
    name: str  # content hash
    strategy: str
    origin: str  # plan file or fabric
    size_bytes: int  # that it was planned for
    predicted_s: float | None
    builtin_s: float | None = None


def size_class(size_bytes: int) -> int:
    """The power of two next to a size."""
    below = 1 << max(size_bytes, 1).bit_length() - 1
    return below if size_bytes * size_bytes <= 2 * below * below else 2 * below


class GroupPlans:
    """`devices`: of the group's ranks, by name; () while nobody said. `store`: the group's own part of the rendezvous store. `world`: ranks of
    the job, where the group is a part of it."""

    def __init__(
        self, settings: Settings, store: Any, rank: int, ranks: int, *, devices: Sequence[str], fabric: Fabric | None, timeout_s: float,
        world: int = 0,
    ) -> None:  # fmt: skip
        self.settings, self.store, self.rank, self.ranks, self.world = settings, store, rank, ranks, world or ranks
        self.devices, self.fabric, self.timeout_s = tuple(devices), fabric, timeout_s
        self.cache = PlanCache(cache_folder(settings.cache))
        self.files = [_from_file(path, settings.reproducible) for path in settings.plans]
        self.known: dict[tuple[str, int, int], list[Chosen] | str] = {}
        self.settled: dict[tuple[str, int, int], Chosen | str] = {}  # by measurement
        self.ranks_per_core = 1.0
        self.find_fabric: Callable[[], None] | None = None  # gives one through `use`, where it can
        self.wait_for: Callable[[str], None] | None = None  # waits for a key and raises what has ended the group meanwhile

    # ---- agreement ---------------------------------------------------------------------------------------------
    def fingerprint(self) -> str:
        """Of everything that decides which program runs."""
        settings = self.settings
        told = [sorted(f.name for f in self.files), settings.strategies, settings.min_bytes, settings.small, settings.builtin, self.devices]
        told += [settings.tune, settings.tune_s, settings.reproducible]
        if self.fabric is not None:
            from ...io.fabric.document import fabric_document

            told.append(fabric_document(self.fabric))
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def agree(self) -> None:
        """All ranks must have been told the same; where each knows only its own device (MESHWRIGHT_DEVICE, as the lab sets it), they tell each other.

        Raises: PlanMismatch, naming the rank that differs from rank 0.
        """
        mine = self.fingerprint()
        self.store.set(f"told/{self.rank}", f"{mine} {_machine()} {self.settings.device}")
        told = [self._get(f"told/{r}").decode().split(" ", 3) for r in range(self.ranks)]
        rows = [row[0] for row in told]
        shared = Counter(machine for _, machine, _, _ in told)
        self.ranks_per_core = max(shared[machine] / int(cores) for _, machine, cores, _ in told)
        own = tuple(device for _, _, _, device in told)
        if all(own) and not self.settings.devices:
            self.devices = own
        for rank, other in enumerate(rows):
            if other != rows[0]:
                self._all_have_read()
                raise PlanMismatch(
                    f"rank {rank} has other plans, devices or another fabric than rank 0", where=f"rank {rank}",
                    hint="give all ranks the same MESHWRIGHT_PLAN, MESHWRIGHT_FABRIC and MESHWRIGHT_DEVICES (and the same version of their files)",
                    data={"rank": rank, "group_rank": rank, "fingerprints": rows},
                )  # fmt: skip

    def _all_have_read(self) -> None:
        """The store lives in one of the ranks' processes, which ends after this: the others must have read what they were told."""
        self.store.set(f"read/{self.rank}", b"1")
        with contextlib.suppress(RuntimeError):  # a rank that never comes has been waited for long enough
            self.store.wait([f"read/{r}" for r in range(self.ranks)], timedelta(seconds=min(self.timeout_s, MAX_LAST_READ_S)))

    def require_fitting(self) -> None:
        """Every plan file must be for this job: its devices, and the fabric that it was told. Raises: PlanMismatch, equally at all ranks."""
        devices = self.devices if self.ranks == self.world else ()
        anywhere = self.settings.devices or devices or (tuple(d.name for d in self.fabric.devices) if self.fabric is not None else ())
        for file in self.files:
            require_fitting(file.path, file.devices, file.fabric, world=self.world, devices=devices, known=anywhere, fabric=self.fabric)

    def _get(self, key: str) -> bytes:
        assert self.wait_for is not None, "only groups of several ranks wait for each other, and their engine says how"
        self.wait_for(key)
        return bytes(self.store.get(key))

    def use(self, fabric: Fabric, devices: Sequence[str]) -> None:
        """Plan for this fabric from now on; what was chosen before is forgotten."""
        self.fabric, self.devices, self.find_fabric = fabric, tuple(devices), None
        self.known.clear()
        self.settled.clear()

    @property
    def never(self) -> str:
        """Why there can be no plan for anything, in words; empty if there can be."""
        if self.settings.reproducible in ("tree", "exact") or self.settings.record_bits:  # sums do not go to the built-in backend as they are
            return ""
        return "no plans and no fabric" if not self.files and self.fabric is None and self.find_fabric is None else ""

    # ---- the choice --------------------------------------------------------------------------------------------
    def choose(self, op: str, root: int, size_bytes: int) -> Chosen | str:
        """The program predicted or measured to be fastest, or in words why there is none. Equal at all ranks of the group."""
        found = self.settled.get(self.key(op, root, size_bytes)) or self.candidates(op, root, size_bytes)
        return found[0] if isinstance(found, list) else found

    def candidates(self, op: str, root: int, size_bytes: int) -> list[Chosen] | str:
        """With MESHWRIGHT_TUNE the programs that deserve a trial, best predicted first; without, one."""
        key = self.key(op, root, size_bytes)
        if key not in self.known:
            try:
                self.known[key] = self._choose(*key, size_bytes)
            except Unsupported as error:
                self.known[key] = str(error)
        return self.known[key]

    def settle(self, op: str, root: int, size_bytes: int, winner: Chosen | str) -> None:
        self.settled[self.key(op, root, size_bytes)] = winner

    def key(self, op: str, root: int, size_bytes: int) -> tuple[str, int, int]:
        return op, root if op in ROOTED else 0, size_class(size_bytes)

    def _choose(self, op: str, root: int, class_bytes: int, size_bytes: int) -> list[Chosen] | str:
        fitting = [f for f in self.files if self._serves(f, op, root)]
        if fitting:
            best = min(fitting, key=lambda f: (abs(_log2(f.size_bytes) - _log2(size_bytes)), f.name))
            return [Chosen(form_of(best.program), best.name, best.strategy, best.path, best.size_bytes, best.predicted_s)]
        if self.folds(op):
            return self._planned(op, root, class_bytes)
        if self.fabric is None and self.find_fabric is not None and size_bytes >= self.settings.min_bytes:
            self.find_fabric()
            if self.fabric is None:
                return "the fabric is not probed yet"
        if self.fabric is None:
            return self.never or "no plan for it"
        if self.tries(op, root, size_bytes):
            small = SMALL_CLASS_BYTES  # one plan for all
            return self._planned(op, root, small) if class_bytes == small else self.candidates(op, root, small)
        if size_bytes < self.settings.min_bytes:
            return f"below {self.settings.min_bytes} bytes"
        return self._planned(op, root, class_bytes)

    def tries(self, op: str, root: int, size_bytes: int) -> bool:
        """Is a call of this size so small that its plan, for the fabric, and the built-in backend are both measured?"""
        small = self.settings.tries(size_bytes) and self.fabric is not None and self.ranks <= MAX_TRIED_RANKS
        return small and not any(self._serves(f, op, root) for f in self.files)

    def folds(self, op: str) -> bool:
        """Must sums of the operation be those of the tree?"""
        return self.settings.reproducible == "tree" and op in REPRODUCIBLE_SUMS

    def _site(self, op: str) -> tuple[Fabric, tuple[str, ...]]:
        """What is planned for. The bits of a fold are the same everywhere, so any fabric will do where none is known."""
        if self.fabric is None and self.folds(op):
            from ...drive.plans import read_fabric

            found = read_fabric(f"laptop:{self.ranks}")
            return found, tuple(d.name for d in found.devices)
        assert self.fabric is not None
        return self.fabric, self.devices

    def _serves(self, file: _File, op: str, root: int) -> bool:
        if self.folds(op) and file.program.contracts[0].reproducible != "tree":
            return False
        if file.op != op or len(file.devices) != self.ranks or (op in ROOTED and file.root != root):
            return False
        return not self.devices or file.devices == self.devices

    def _planned(self, op: str, root: int, class_bytes: int) -> list[Chosen] | str:
        key = f"plan/{op}/{root}/{class_bytes}"
        if self.rank != 0:
            return self._decode(self._get(key), class_bytes)
        try:
            with beating(self.store, key, self.timeout_s):
                answer = self._kept_or_planned(op, root, class_bytes)
        except MeshwrightError as error:
            answer = json.dumps({"none": str(error)}).encode()
        except Exception as error:  # the others wait: they must hear of it
            self.store.set(key, json.dumps({"none": f"planning failed: {type(error).__name__}"}))
            raise
        self.store.set(key, answer)
        return self._decode(answer, class_bytes)

    def _kept_or_planned(self, op: str, root: int, class_bytes: int) -> bytes:
        question = self._question(op, root, class_bytes)
        kept = self.cache.get(question)
        if kept is not None and _holds(kept):
            return kept
        answer = self._plan(op, root, class_bytes)
        self.cache.put(question, answer)
        return answer

    def is_kept(self, op: str, root: int, size_bytes: int) -> bool:
        """Whether the answer for a size lies in the cache."""
        kept = self.cache.get(self._question(*self.key(op, root, size_bytes)))
        return kept is not None and _holds(kept)

    def _question(self, op: str, root: int, class_bytes: int) -> dict[str, Any]:
        """All that an answer depends on, but for the planners themselves."""
        from ...io.fabric.document import fabric_document

        told, (fabric, devices) = self.settings, self._site(op)
        return {
            "fabric": fabric_document(fabric), "devices": devices, "op": op, "root": root, "class_bytes": class_bytes, "ranks": self.ranks,
            "ranks_per_core": max(1.0, self.ranks_per_core), "strategies": told.strategies, "tune": told.tune, "builtin": told.builtin,
            "plan_s": told.plan_s, **({"reproducible": told.reproducible} if self.folds(op) else {}),
        }  # fmt: skip

    def _plan(self, op: str, root: int, class_bytes: int) -> bytes:
        from ...decide.collective import CollectiveProblem, strategy
        from ...drive.collective.job import plan_collective
        from ...io.plan.plan import plan_bytes
        from .choose import builtin, executed

        fabric, devices = self._site(op)
        transport = executor_transport(fabric, self.ranks_per_core)
        n, folds = self.ranks, self.folds(op)
        size = -(-class_bytes // (8 * n)) * 8 * n  # whole blocks of the widest element
        problem = CollectiveProblem(
            fabric=merge_near_rates(fabric), op=op, size_bytes=size, ranks=devices, root=root, element_bytes=1, transport=transport,
            reproducible="tree" if folds else "run", effort_s=MAX_EFFORT_CANDIDATES * self.settings.plan_s,
        )  # fmt: skip
        small = self.settings.tries(class_bytes)
        names = self.settings.strategies or (FOLDING if folds else FEW_ROUNDS if small else ())
        candidates = [strategy(name)() for name in names] or None
        shared = self.ranks_per_core > 1
        best = executed(problem, candidates, each_s=self.settings.plan_s, fabric=fabric, shared=shared)[: max(1, self.settings.tune)]
        gloo = builtin(replace(problem, reproducible="run"), fabric, shared=shared)
        predicted = self.settings.builtin and not small and not folds and not self.settings.tune
        if predicted and gloo is not None and best[0].judged_s > MAX_SHARE_OF_BUILTIN_TIME * gloo.judged_s:
            text = f"the built-in backend is predicted to be as fast ({gloo.judged_s:.3g} s against {best[0].judged_s:.3g} s)"
            return json.dumps({"none": text}).encode()
        heads, plans = [], []
        for one in best:
            plans.append(plan_bytes(plan_collective(problem, candidates=[one.candidate])[0]))
            head = {"strategy": one.strategy, "walk": one.walk, "predicted_s": one.time_s, "builtin_s": gloo.time_s if gloo else None}
            heads.append({**head, "bytes": len(plans[-1])})
        return json.dumps({"plans": heads}).encode() + b"\n" + b"".join(plans)

    def _decode(self, answer: bytes, class_bytes: int) -> list[Chosen] | str:
        from ...drive.plans import fabric_of

        plans = _plans_in(answer)
        if isinstance(plans, str):
            return plans
        out = []
        for row, plan in plans:
            fabric = self.fabric or fabric_of(plan)
            form, name = walked(plan.main, fabric, plan.placement, row["walk"]), program_hash(plan.main)
            out.append(Chosen(form, name, row["strategy"], fabric.name, class_bytes, row["predicted_s"], row["builtin_s"]))
        return out


def _plans_in(answer: bytes) -> list[tuple[dict[str, Any], Plan]] | str:
    """What `_plan` answered, or why there is no plan. Raises: FormatError, and what JSON raises for what is none."""
    from ...io.plan.plan import plan_from_bytes

    head, _, rest = answer.partition(b"\n")
    found = json.loads(head)
    if "none" in found:
        return str(found["none"])
    out, first = [], 0
    for row in found["plans"]:
        out.append((row, plan_from_bytes(rest[first : first + row["bytes"]], where="the plan from rank 0")))
        first += row["bytes"]
    return out


def _holds(kept: bytes) -> bool:
    """Is an answer of an earlier run whole, and are its plans right?"""
    from ...drive import plans as drive

    try:
        plans = _plans_in(kept)
        for row, plan in plans if isinstance(plans, list) else ():
            drive.check_plan(plan)
            form_of(plan.main)
            if row["walk"] not in WALKS or not isinstance(row["strategy"], str) or "predicted_s" not in row or "builtin_s" not in row:
                return False
    except (MeshwrightError, LookupError, TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class _File:
    path: str
    program: Program
    name: str
    op: str
    root: int
    devices: tuple[str, ...]
    size_bytes: int
    strategy: str
    predicted_s: float | None
    fabric: Fabric  # that it was planned for


def _from_file(path: str, level: str = "") -> _File:
    """Read and check a plan. Raises: FormatError, CheckFailed, UsageError (not the plan of a collective), Unsupported (none that ranks carry out)."""
    from ...drive import plans as drive

    plan = drive.read_plan(path)
    job: Any = plan.job.get("collective")
    if plan.kind != "collective" or not isinstance(job, dict):
        hint = "`meshwright collective plan OP --fabric F --size S -o plan.json` makes one"
        raise UsageError("is not the plan of one collective", where=path, hint=hint)
    drive.check_plan(plan)
    decision = plan.decisions.get(f"collective:{job['op']}", {})
    predicted = plan.prediction.time_s if plan.prediction is not None else None
    if plan.main.switches:
        hint = "plan without --in-network; sums by a switch in software: `meshwright collective aggregator` and docs/aggregation.md"
        raise Unsupported(f"strategy {decision.get('strategy', '?')} computes in switches, which ranks alone cannot carry out", where=path, hint=hint)
    if plan.main.contracts[0].reproducible == "exact" and level != "exact":
        raise Unsupported("this plan adds the integers of exact sums", where=path, hint="set MESHWRIGHT_REPRODUCIBLE=exact")
    if not isinstance(job.get("size_bytes"), int):
        raise FormatError("the job has no size", where=path)
    return _File(
        path, plan.main, program_hash(plan.main), job["op"], int(job.get("root", 0)), tuple(plan.placement[: plan.main.ranks]), job["size_bytes"],
        str(decision.get("strategy", "?")), predicted, drive.fabric_of(plan),
    )  # fmt: skip


def _machine() -> str:
    """The machine that this rank runs on and its cores: ranks in namespaces of one machine share them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot} {len(os.sched_getaffinity(0))}"


def _log2(size_bytes: int) -> float:
    from math import log2

    return log2(max(size_bytes, 1))
