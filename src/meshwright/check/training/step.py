"""Values of a training step: every micro-batch's gradient once per parameter, every partial sum complete before it is used.

By induction over one topological order of the inlined program. A compute step is correct if everything it reads is what its name says:
  F(segment, micro-batch m)  reads act:v:m for every value v the segment reads: v of this replica, all its parts summed; old weights; inputs;
  B(segment, m)              reads saved:segment:m of its own F and part, act:v:m for what its recomputed calls read across the border, and
                             grad:v:m with the contribution of every segment that reads v, once each, all parts summed;
  R(segment, m)              of segments that run forward again (`forward_again`): as F, but reads remade:v:m of values that its group makes a
                             second time, which must be what they were the first; saved:segment:m is then of R, and no F writes it;
  optimizer                  reads every gradient buffer of its rank, each cell holding B(segment, m) of every micro-batch of every data
                             replica once, for every segment (of any stage that holds a shared parameter) that contributes to it, and
                             of every rank of the group where the layout says that a gradient is a partial sum over one.
Where data replicas divide training state (`data_groups`), weights are quantities cell by cell: F and B read whole groups of old ones, gathered or
held; each rank's optimizer needs complete gradients of its own cells and updates these; at the end of the step every copy of a weight that lives
on is updated.
Where backward is split, I(segment, m) does what B does but for gradients of parameters; W(segment, m) adds these, and reads saved:segment:m,
left:segment:m of its own I, and act:v:m for every value v the segment reads that is read at all.
Where the layout asks for the norm of gradients (`norm`), norm steps read what the optimizer does, complete, and the optimizer reads every rank's sum.
Then what it writes is, by definition, the value named. A split segment's F writes one part of each of its `sum_writes`, its B one part of each of its
`sum_grads`; values that the layout calls split are each part's own; others are computed alike by all parts. Each rank runs each F and B (or I
and W) of the stages that it holds once for every micro-batch of its copy of them, and one optimizer: copies of a stage end with equal gradients.

Values named in `batch_sums` are sums over the data replicas: one quantity for all of them, of which each makes a part (and of its gradient).

What ranks that divide positions exchange is, on the rank that gets it, the quantity that the layout says another rank of its group has made
(`home`); its gradient sums what all that read it on any of them hand back.

Of a value that is split along the sequence, buffers of all parts have a slot per tensor index; the cells of slot t are those of part t. A segment
that `gathers` it reads all parts (`actall:`, and in backward `actagain:`) and writes the gradients of all of them (`gradpart:`); one that sums
it writes all parts (`actsum:`) and reads the gradients of all of them (`gradall:`). The gradients of a `sequence` segment's parameters are
partial sums over the tensor-parallel ranks, and the layout must say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from msgspec import UNSET

from ...plan.plan import Segment, TrainingLayout
from ...program.program import Kind, Program
from ..program.order import Order
from ..program.wellformed import witness
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .cells import ADDING, EXPERTS, FIRST, KEPT, compute_steps, too_small
from .compressed import STEPS, codec_steps, coded, held_alike
from .norm import norm_steps, require_norm, squared
from .rows import check_rows
from .state import GIVEN, StepState

__all__ = ["TrainingStep", "check_training", "too_small"]

def check_training(p: Program, layout: TrainingLayout, order: Order | None = None) -> list[Finding]:
    """`p` is a call-free (inlined) training program without repeated lanes whose buffers carry the names of docs/formats.md."""
    if not p.buffers.name or (len(p.lanes) and int(p.lanes.repeat.max()) > 1):
        why = "its buffers have no names" if not p.buffers.name else "it has repeated lanes"
        return [Finding(check="values", message=f"gradients cannot be followed: {why}", status="unknown")]
    if layout.ranks != p.ranks:
        return [Finding(check="values", message=f"the layout has {layout.ranks} ranks, the program {p.ranks}", witness={"ranks": p.ranks})]
    if small := too_small(p, layout):
        return small
    step = TrainingStep(p, order or Order(p), layout)
    step.found += [*held_alike(layout), *step.given_apart(), *step.work(), *check_rows(p, layout, step.order)]
    if not step.found:
        step.run()
        step.weights_at_the_end()
        step.kept_at_the_end()
    return step.found[:MAX_FINDINGS_OF_A_KIND]


def _unlike(first: int, have: list[int], want: list[int]) -> Iterator[tuple[int, int, int]]:
    """Where two rows of cells differ."""
    if have != want:
        yield from ((first + k, a, b) for k, (a, b) in enumerate(zip(have, want, strict=True)) if a != b)


class TrainingStep(StepState):
    """The induction on one program; `run` executes it, `found` says what is wrong. `besides`: names of ops that are no work of the layout's."""

    besides: frozenset[str] = frozenset()

    # ---- what must be there ------------------------------------------------------------------------------------
    def given_apart(self) -> list[Finding]:
        """What is there when the step begins has bytes of its own: views of a group's state aside, no two names share any."""
        p, found = self.p, list[Finding]()
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for b in range(len(p.buffers)):
            if self.role[b] in GIVEN:
                root, lo, hi = self.locate(b, 0, int(p.buffers.chunks[b]), 0)
                rows.setdefault(root, []).append((lo, hi, b))
        for row in rows.values():
            for (_, end, one), (start, _, two) in pairwise(sorted(row)):
                if start < end and (self.data.parts[one] is None or self.data.parts[two] is None):
                    text = f"{p.buffer_name(one)} and {p.buffer_name(two)} share bytes, and both hold something when the step begins"
                    found.append(Finding(check="values", message=text, witness={"rank": int(p.buffers.actor[one]), "buffer": one}))
        return found

    def work(self) -> list[Finding]:
        """Each rank runs F and B of its stage's segments once per micro-batch, and one optimizer if it has gradients."""
        p, lay, o = self.p, self.layout, self.p.ops
        found: list[Finding] = []
        has: list[Counter[tuple[str, str, int]]] = [Counter() for _ in range(p.ranks)]
        at: dict[tuple[int, str, str, int], int] = {}
        microbatch = o.microbatch.tolist()
        computing = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
        for step, op in zip(computing.tolist(), p.steps.op[computing].tolist(), strict=True):
            if o.name[op] not in self.besides:
                key = (o.name[op], o.graph[op] if o.name[op] != "optimizer" else "", microbatch[op] if o.name[op] != "optimizer" else 0)
                has[self.actor[step]][key] += 1
                at[(self.actor[step], *key)] = step
        gradients = {int(p.buffers.actor[b]) for b, role in enumerate(self.role) if role == "gradient"}
        for rank in self.ranks():
            # The work that the layout says, as a multiset: nothing may lack, come twice or be foreign.
            want = Counter(compute_steps(lay, *lay.coordinates(rank)[:2]))
            if rank in gradients:
                want["optimizer", "", 0] = 1
            want |= codec_steps(lay, p, rank)
            want |= Counter(norm_steps(lay, rank))
            for key in sorted({*want, *has[rank]}):
                if want[key] != has[rank][key]:
                    step = at.get((rank, *key), -1)
                    text = f"rank {rank} runs {' '.join(map(str, key))} {has[rank][key]} times instead of {want[key]}"
                    facts = witness(p, step) if step >= 0 else {"rank": rank, "lane": -1, "step": -1, "iteration": 0, "chunk": -1}
                    found.append(Finding(check="values", message=text, witness=facts | {"work": list(key)}))
        return found

    def foreign(self, kind: str, value: str, s: Segment) -> bool:
        """A segment has no business writing such a buffer: partial sums of what it does not sum, parts of what it has whole, others' values."""
        if kind in ("act", "actsum"):
            return value not in s.writes or (kind == "actsum") != (value in self.along and value in s.sum_writes)
        if kind in ("grad", "gradpart"):
            return (kind == "grad") and value in s.gathers
        return kind not in KEPT

    # ---- one compute step --------------------------------------------------------------------------------------
    def compute(self, step: int, turn: int) -> None:
        o, op = self.p.ops, int(self.p.steps.op[step])
        if len(self.found) >= MAX_FINDINGS_OF_A_KIND:
            return
        rank = self.actor[step]
        if self.p.ops.name[op] == "optimizer":
            self.optimizer(step, rank, op)
            return
        if o.name[op] == "norm":
            if squared(self, step, rank, op):
                self.gradients(step, rank, op)
            return
        if o.name[op] in STEPS:
            coded(self, step, rank, op)
            return
        s, mb = self.segment[o.graph[op]], int(o.microbatch[op])
        part = int(o.part[op])
        expected_part = self.coordinates[rank][2] if s.split else 0
        if part != expected_part or int(o.parts[op]) != (self.layout.tensor if s.split else 1):
            self.wrong(step, f"is part {part} of {int(o.parts[op])}, rank {rank} must compute part {expected_part}")
        reads, writes = o.reads[op].reshape(-1, 3).tolist(), o.writes[op].reshape(-1, 3).tolist()
        names = {self.p.buffers.name[b] for b, _, _ in reads}
        made = {self.p.buffers.name[b] for b, _, _ in writes}
        twice = self.twice.get(s.key, set())
        kind = dict.fromkeys(twice, "remade")  # of the buffers that the second pass and backward read, where it is not `act`
        one, partial = ("remade", "remadesum") if o.name[op] == "R" else ("act", "actsum")
        for v in s.writes if o.name[op] == "F" else twice & {*s.writes} if o.name[op] == "R" else ():
            if not made & {f"{one}:{v}:{mb}", f"{partial}:{v}:{mb}"}:
                self.wrong(step, f"does not write {v}")
        foreign_kinds = ("remade", "remadesum") if o.name[op] != "R" else ("act", "actsum")
        unsaved = f"saved:{s.key}:{mb}" if o.name[op] == "F" and s.key in self.twice else ""
        for name in sorted(n for n in made if n.partition(":")[0] in foreign_kinds or n == unsaved):
            self.wrong(step, f"writes {name}, which is of the other forward pass")
        if o.name[op] == "F":
            needed = {f"actall:{v}:{s.key}:{mb}" if v in s.gathers else f"act:{v}:{mb}" for v in s.reads}
        elif o.name[op] == "R":
            needed = {f"remadeall:{v}:{s.key}:{mb}" if v in s.gathers else f"{kind.get(v, 'act')}:{v}:{mb}" for v in s.reads}
        elif o.name[op] == "W":
            needed = {f"saved:{s.key}:{mb}", f"left:{s.key}:{mb}"}
        else:
            summed = self.along & set(s.sum_writes)
            # Backward needs what forward saved, and the gradient of each value that anybody reads.
            needed = {f"saved:{s.key}:{mb}"} | {f"{'gradall' if v in summed else 'grad'}:{v}:{mb}" for v in s.writes if v in self.readers}
            again = {v for x in s.recompute for v in x.reads} | {*(s.step.kept if s.step is not None else ())}  # what calls read that run again
            again |= self.again & set(s.reads)  # nothing of it is kept
            needed |= {f"actagain:{v}:{s.key}:{mb}" if v in s.gathers or v in self.again else f"{kind.get(v, 'act')}:{v}:{mb}" for v in again}
        for name in sorted(needed - names):
            self.wrong(step, f"does not read {name}")
        foreign = {n for n in names - needed if FIRST.get(k := n.partition(":")[0], k) in ("act", "actall")} if o.name[op] in "FR" else set()
        if o.name[op] not in "FR":  # backward follows from what the second pass, where there is one, has read and made
            foreign = {n for n in names - needed if n.startswith("act:") and n.split(":")[1] in twice}
        for name in sorted(foreign):
            self.wrong(step, f"reads {name}, which the layout's segment {s.key} does not")
        self.uses_groups(step, rank, s, o.name[op], {b for b, _, _ in reads}, {b for b, _, _ in writes})
        # Induction: if all operands hold what they must, the operator writes what it must; values of tensors are not looked at.
        for b, first, count in reads:
            self.read(step, rank, b, first, count, s, mb, part)
        for b, first, count in writes:
            if (self.role[b] == "gradient") != (o.name[op] == "W") and o.name[op] in ("I", "W"):
                self.wrong(step, f"writes {self.p.buffers.name[b]}, which the other part of a split backward makes")
                return
            self.write(step, rank, b, first, count, s, mb, part, accumulate=bool(o.accumulate[op]))

    def uses_groups(self, step: int, rank: int, s: Segment, phase: str, reads: set[int], writes: set[int]) -> None:
        """Weights and gradients of every group that holds some of the segment's parameters are among what it reads and writes."""
        if not self.layout.buckets:
            return
        weights = ("weights", "gathered") if self.layout.zero_level else ()
        for group in self.data.used(rank, s.params):
            for kinds, among, verb in ((weights, reads, "read"), (("gradients", "gradfull") if phase in ADDING else (), writes, "write")):
                held = [b for b in among if (x := self.data.parts[b]) is not None and x.kind in kinds and x.group == group]
                whole = all(self.covers(step, b, verb) for b in held)
                if kinds and (not held or not whole):
                    self.wrong(step, f"does not {verb} the whole of {kinds[0]}{group}, which holds parameters of segment {s.key}")

    def read(self, step: int, rank: int, b: int, first: int, count: int, s: Segment, mb: int, part: int) -> None:
        replica = self.coordinates[rank][1]
        kind, value, number = self.named(b)
        root, lo, hi = self.locate(b, first, count, 0)
        base = self.locate(b, 0, 1, 0)[1]
        if self.in_cells(b):
            for spoilt in _unlike(lo, self.memory[root][lo:hi], self.weights(rank, b, lo, hi)):
                self.mismatch(step, b, *spoilt)
                break
            return
        for cell in range(lo, hi):
            have = self.memory[root][cell]
            if self.role[b] in GIVEN and (kind != "inputs" or number == str(mb)):
                want = self.old
            elif number != str(mb) or kind not in ("act", "actall", "actagain", "grad", "gradall", *KEPT):
                self.wrong(step, f"reads {self.p.buffers.name[b]}, which is not of micro-batch {mb}")
                return
            elif kind in ("act", "actall", "actagain"):
                n = self.parts(self.maker[value], value, gradient=False) if value in self.maker else 0
                # Complete when all n partial sums are in.
                want = ((1 << n) - 1) << 32 | self.of_value("act", value, mb, rank, b, cell - base)
            elif kind in ("grad", "gradall"):
                # A value's gradient sums what all its readers hand back, each with bits of its own.
                bits = sum(self.gradient_bits(value, r, 0)[1] for r in self.readers.get(self.sent(value), []))
                want = bits << 32 | self.of_value("grad", value, mb, rank, b, cell - base)
            else:
                want = 1 << (32 + part) | self.quantity(kind, value, mb, replica, cell - lo, -1)
            if have != want:
                self.mismatch(step, b, cell, have, want)
                return

    def write(self, step: int, rank: int, b: int, first: int, count: int, s: Segment, mb: int, part: int, *, accumulate: bool) -> None:
        replica = self.coordinates[rank][1]
        kind, value, number = self.named(b)
        root, lo, hi = self.locate(b, first, count, 0)
        base = self.locate(b, 0, 1, 0)[1]
        fresh = []
        part_here = self.data.parts[b]
        if part_here is not None and part_here.kind == "gradfull" and part_here.number != mb:
            self.wrong(step, f"writes {self.p.buffers.name[b]}, which is not of micro-batch {mb}")
            return
        if self.role[b] == "gradient":
            fresh = self.gradients_of(s.key, mb, rank, b, lo, hi)
        for cell in range(lo, hi) if self.role[b] != "gradient" else ():
            if kind in ("act", "actsum"):
                bit = 1 << (self.part_of(value, rank, part) if self.parts(s, value, gradient=False) > 1 else 0)
            elif kind in ("grad", "gradpart"):
                bit = self.gradient_bits(value, s, self.part_of(value, rank, part))[0]
            else:
                bit = 1 << part
            if number != str(mb) or not bit or self.foreign(kind, value, s):
                self.wrong(step, f"writes {self.p.buffers.name[b]}, which is not its to write")
                return
            what = {"gradpart": "grad", "actsum": "act"}.get(kind, kind)
            found = self.quantity(what, value, mb, replica, cell - lo, -1) if what in KEPT else self.of_value(what, value, mb, rank, b, cell - base)
            fresh.append(bit << 32 | found)
        if accumulate and kind != "left":
            # Accumulating one contribution twice makes poison, which whoever reads it reports.
            fresh = [self.add(a, x, step) for a, x in zip(self.memory[root][lo:hi], fresh, strict=True)]
        self.store(root, lo, hi, fresh, step)

    def gradients(self, step: int, rank: int, op: int) -> None:
        """Every gradient buffer of the rank is read, and each cell is complete."""
        lay, p = self.layout, self.p
        stage, _, tensor = lay.coordinates(rank)
        self.partial_gradients(step, rank, stage, tensor)
        read = {(b, c) for b, first, count in p.ops.reads[op].reshape(-1, 3).tolist() for c in range(first, first + count)}
        covered: set[str] = set()
        for b in range(len(p.buffers)):
            part = self.data.parts[b]
            if self.role[b] != "gradient" or int(p.buffers.actor[b]) != rank or (part is not None and part.kind == "gradfull"):
                continue
            if lay.zero_level == 1 and part is not None and part.kind == "gradshard":
                continue  # a view of this rank's part of a buffer that is looked at
            root, lo, hi = self.locate(b, 0, int(p.buffers.chunks[b]), 0)
            # With sharded optimizers a rank answers for its part of the bucket only.
            own = self.data.own(rank, hi - lo, part.group) if part is not None and part.kind == "gradients" else (0, hi - lo)
            for chunk in range(int(p.buffers.chunks[b])):
                if (b, chunk) not in read:
                    self.wrong(step, f"does not read chunk {chunk} of {p.buffer_name(b)}", chunk=chunk, buffer=b)
                    return
            for cell in range(lo + own[0], lo + own[1]):
                covered |= self.users.get(self.place(rank, b, cell), set())
                want = self.whole_gradient(rank, b, cell)
                if self.memory[root][cell] != want:
                    self.mismatch(step, b, cell, self.memory[root][cell], want)
                    return
        stages, mine = {k for k, _ in lay.hosted(stage)}, set(lay.held(stage).params) - set(lay.frozen)
        for s in lay.segments:
            # No gradient of it was looked at: nothing is proved about it, so the answer is `unknown`.
            if s.stage in stages and mine & set(s.params) and s.key not in covered and self.users:
                text = f"{p.describe(step)} reads no gradient of segment {s.key}; are all its parameters frozen?"
                self.found.append(Finding(check="values", message=text, witness=witness(p, step), status="unknown"))

    def partial_gradients(self, step: int, rank: int, stage: int, tensor: int) -> None:
        """Every group whose partial gradients must be added has its buffer on this rank, and so have experts that others have not."""
        experts = set() if self.layout.expert_shards is UNSET else {s.param for s in self.layout.expert_shards} - set(self.layout.frozen)
        mine = [b for b in range(len(self.p.buffers)) if self.role[b] == "gradient" and int(self.p.buffers.actor[b]) == rank]
        held = self.layout.held(stage)
        if experts & set(held.params) and not any(self.p.buffers.name[b].partition(":")[0].endswith(EXPERTS) for b in mine):
            self.wrong(step, f"belongs to a rank that divides experts with others, and has no gradients{EXPERTS}")
        whole = {p for s in self.layout.segments if s.sequence and s.key in held.segments for p in s.params} - {
            x.param for x in self.layout.partial_gradients if len(x.group_of(tensor)) == self.layout.tensor
        }
        whole -= set(self.layout.frozen)
        for param in sorted(whole) if mine else ():
            self.wrong(step, f"reads the gradient of {param}, which each rank has for its part of the sequence: nothing adds them up")
        groups = {self.group(self.p.buffers.name[b], tensor) for b in mine}
        for x in self.layout.partial_gradients:
            if x.param in held.params and mine and x.group_of(tensor) not in groups:
                self.wrong(step, f"reads the gradient of {x.param}, which is a partial sum that nothing completes over {list(x.group_of(tensor))}")

    def kept(self, step: int, rank: int, b: int, first: int, count: int, written: set[tuple[int, int]]) -> None:
        """What the optimizer keeps from step to step is as the last step left it, and is brought up to date."""
        if self.role[b] not in ("state", "weight"):
            return
        root, lo, hi = self.locate(b, first, count, 0)
        for cell in range(lo, hi) if not self.in_cells(b) else ():
            if self.memory[root][cell] != self.old:
                self.mismatch(step, b, cell, self.memory[root][cell], self.old)
                return
        if self.role[b] == "state" and not written >= {(b, c) for c in range(first, first + count)}:
            self.wrong(step, f"does not write the whole of {self.p.buffer_name(b)}, which it reads", buffer=b)

    def kept_at_the_end(self) -> None:
        """Nothing overwrites what optimizers have brought up to date."""
        new = 1 << 32 | self.quantity("updated")
        p = self.p
        for step in np.flatnonzero(p.steps.kind == Kind.COMPUTE).tolist():
            op = int(p.steps.op[step])
            if p.ops.name[op] != "optimizer":
                continue
            for b, first, count in p.ops.writes[op].reshape(-1, 3).tolist():
                root, lo, hi = self.locate(b, first, count, 0)
                looked_at = not self.in_cells(b) and len(self.found) < MAX_FINDINGS_OF_A_KIND
                spoilt = [c for c in range(lo, hi) if self.memory[root][c] != new] if looked_at else []
                if spoilt:
                    writer = self.writer[root][spoilt[0]]
                    self.wrong(writer if writer >= 0 else step, f"leaves {p.buffer_name(b)} other than {p.describe(step)} wrote it", buffer=b)

    def optimizer(self, step: int, rank: int, op: int) -> None:
        p = self.p
        self.gradients(step, rank, op)
        if self.layout.step_end.norm:
            require_norm(self, step, rank)
        writes = {p.buffers.name[b] for b, _, _ in p.ops.writes[op].reshape(-1, 3).tolist()}
        if "weights" not in writes and not self.layout.zero_level:
            self.wrong(step, "does not write the weights")
        for name in self.data.missing(rank):
            self.wrong(step, f"belongs to a rank without {name}")
        written = {(b, c) for b, first, count in p.ops.writes[op].reshape(-1, 3).tolist() for c in range(first, first + count)}
        for b, first, count in p.ops.reads[op].reshape(-1, 3).tolist():
            self.kept(step, rank, b, first, count, written)
        new = 1 << 32 | self.quantity("updated")
        for b, first, count in p.ops.writes[op].reshape(-1, 3).tolist():
            root, lo, hi = self.locate(b, first, count, 0)
            fresh = [new] * (hi - lo)
            if self.in_cells(b):
                part = self.data.parts[b]
                whole = part is not None and part.kind == "shard"
                group = part.group if part is not None else ""
                low, high = (0, len(self.memory[root])) if whole else self.data.own(rank, len(self.memory[root]), group)
                # Beyond its own part the optimizer leaves weights that a gather must replace before anyone may read them.
                fresh = [self.weight("updated", rank, b, i) if low <= i < high else self.garbage for i in range(lo, hi)]
            self.store(root, lo, hi, fresh, step)
