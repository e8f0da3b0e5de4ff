"""Plans of graph training: does every message of every exchange go once, with the bytes that its rows' widths give, and is used where it arrives;
and is the bound one of these rows?

Shares nothing with the planner but the types of job and fabric: bytes and variance are counted here again. That weights are those of a graph, and
that a plan is of the graph it runs on, is for the run, which has the graph (`digest`).
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..fabric.fabric import Fabric
from ..plan.halo import HaloJob, HaloMessage, HaloStep, widths_of_text
from ..plan.plan import Plan
from ..program.program import Kind, Program
from .program.order import Order, messages
from .program.wellformed import witness
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["check_halo", "check_halo_bound", "halo_job"]

TOLERANCE = 1e-9  # of sums of floats, relative
ROW_BYTES = 4  # two bfloat16 beside the packed numbers of a row; none beside float32
PARTS = ("pack", "central", "marginal")


def halo_job(plan: Plan) -> HaloJob:
    """Raises: KeyError or ValidationError (a ValueError) for a plan that does not say what is sent."""
    return msgspec.convert(plan.job["halo"], HaloJob)


def check_halo(p: Program, job: HaloJob, order: Order) -> list[Finding]:
    """Findings about what is sent, and about who computes what after what; `order` of the program's one turn."""
    found = [f for s in job.steps for m in s.messages for f in _message(job, s, m)]
    noise = sum(_noise(g.bits) * g.weight for s in job.steps for m in s.messages for g in m.groups)
    if not noise <= job.variance * (1 + TOLERANCE):
        found.append(_wrong(f"its rows have variance {noise:.9g}, the plan says {job.variance:.9g}", field="variance"))
    if found:
        return found[:MAX_FINDINGS_OF_A_KIND]
    found, step_of = _ops(p, job)
    if not found:
        found = _sent(p, job, step_of) or _sequence(p, job, step_of, order)
    return found[:MAX_FINDINGS_OF_A_KIND]


def _noise(bits: int) -> float:
    return 0.0 if bits == 32 else 1 / (2**bits - 1) ** 2


def _wrong(text: str, **facts: Any) -> Finding:
    return Finding(check="values", message=text, witness=facts)


def _message(job: HaloJob, step: HaloStep, m: HaloMessage) -> list[Finding]:
    """A message against its own rows."""
    name = f"{step.name}, {m.src} to {m.dst}"
    if not (0 <= m.src < job.workers and 0 <= m.dst < job.workers and m.src != m.dst):
        return [_wrong(f"{name}: there are workers 0 to {job.workers - 1}", message=name)]
    try:
        rows = Counter(widths_of_text(m.widths))
    except KeyError as error:
        return [_wrong(f"{name}: {str(error)[:16]} is no width", message=name)]
    groups: Counter[int] = Counter()
    for g in m.groups:
        groups[g.bits] += g.rows
        if g.rows < 1 or not (np.isfinite(g.weight) and g.weight >= 0):
            return [_wrong(f"{name}: a group of {g.rows} rows with weight {g.weight}", message=name)]
    if rows != groups:
        return [_wrong(f"{name}: rows by width are {dict(rows)}, those of its groups {dict(groups)}", message=name)]
    size = sum((n * step.dim * b + 7) // 8 + (0 if b == 32 else ROW_BYTES * n) for b, n in rows.items())
    if size != m.size_bytes:
        return [_wrong(f"{name}: its rows take {size} bytes, the plan says {m.size_bytes}", message=name)]
    return []


def _ops(p: Program, job: HaloJob) -> tuple[list[Finding], dict[tuple[str, int, str], int]]:
    """The step of (exchange, worker, part), and what is missing, double or on another worker."""
    wanted = {(s.name, k, part) for s in job.steps for k in range(job.workers) for part in PARTS}
    step_of: dict[tuple[str, int, str], int] = {}
    found, lane_of = list[Finding](), p.lane_of_step()
    for step in np.flatnonzero(p.steps.kind == int(Kind.COMPUTE)).tolist():
        op, lane = int(p.steps.op[step]), int(lane_of[step])
        exchange, _, rank = p.ops.graph[op].rpartition("/")
        key = exchange, int(rank) if rank.isdigit() else -1, p.ops.name[op]
        why = "the job has no such operation" if key not in wanted else ""
        why = why or ("it is done more than once" if key in step_of or int(p.lanes.repeat[lane]) != 1 else "")
        if not why and int(p.lanes.actor[lane]) != key[1]:
            why = f"worker {int(p.lanes.actor[lane])} does it"
        if why:
            found.append(Finding(check="values", message=f"{p.ops.name[op][:32]} of {p.ops.graph[op][:64]}: {why}", witness=witness(p, step)))
        step_of[key] = step
    missing = sorted(wanted - set(step_of))
    return found + [_wrong(f"nobody does {part} of {exchange} on worker {k}", exchange=exchange, rank=k) for exchange, k, part in missing], step_of


def _touched(p: Program, step: int, which: str) -> set[int]:
    return set(getattr(p.ops, which)[int(p.steps.op[step])].tolist()[::3])


def _sent(p: Program, job: HaloJob, step_of: dict[tuple[str, int, str], int]) -> list[Finding]:
    """Every message of the job once, from what its pack wrote to what its marginal reads, and no others."""
    wrote = {b: key for key, step in step_of.items() if key[2] == "pack" for b in _touched(p, step, "writes")}
    reads = {b: key for key, step in step_of.items() if key[2] == "marginal" for b in _touched(p, step, "reads")}
    due = {(s.name, m.src, m.dst): m.size_bytes for s in job.steps for m in s.messages}
    found, m = list[Finding](), messages(p)
    for send, recv in zip(m.send.tolist(), m.recv.tolist(), strict=True):
        source, target = int(p.steps.src_buffer[send]), int(p.steps.dst_buffer[recv])
        size = int(p.steps.count[send]) * int(p.buffers.chunk_bytes[source])
        a, b = wrote.get(source), reads.get(target)
        key = (a[0], a[1], b[1]) if a and b and a[0] == b[0] else None
        if key is None or key not in due:
            found.append(Finding(check="values", message=f"a message of {size} bytes is none of the job's", witness=witness(p, send)))
        elif due.pop(key) != size:
            text = f"the message of {key[0]}, {key[1]} to {key[2]}, has {size} bytes"
            found.append(Finding(check="values", message=text, witness=witness(p, send)))
    return found + [_wrong(f"nothing sends the rows of {x}, {src} to {dst}", exchange=x, src=src, dst=dst) for x, src, dst in sorted(due)]


def _sequence(p: Program, job: HaloJob, step_of: dict[tuple[str, int, str], int], order: Order) -> list[Finding]:
    """An exchange begins with what the one before it left, on every worker; and its marginal part has the central one's result."""
    pairs, said = list[tuple[int, int]](), list[str]()
    for k in range(job.workers):
        for at, s in enumerate(job.steps):
            pack, central, marginal = (step_of[s.name, k, part] for part in PARTS)
            flows = [(central, marginal, f"marginal of {s.name}")]
            if at:
                before = step_of[job.steps[at - 1].name, k, "marginal"]
                flows += [(before, pack, f"pack of {s.name}"), (before, central, f"central of {s.name}")]
            for first, second, what in flows:
                if not _touched(p, first, "writes") & _touched(p, second, "reads"):
                    return [Finding(check="values", message=f"{what} on worker {k} does not read what came before", witness=witness(p, second))]
                pairs.append((first, second))
                said.append(f"{what} on worker {k}")
    if not pairs:
        return []
    steps = np.array(pairs, np.int64)
    late = np.flatnonzero(~order.before(order.node(steps[:, 0], 0), order.node(steps[:, 1], 0)))
    return [Finding(check="values", message=f"nothing makes {said[i]} wait", witness=witness(p, int(steps[i, 1]))) for i in late.tolist()]


def check_halo_bound(bound: Bound, job: HaloJob, ranks: tuple[str, ...], fabric: Fabric) -> list[Finding]:
    """The bound's shares and price, on the plan's own groups and the fabric's links, give at least what it claims."""
    data = bound.certificate.data
    try:
        proved = _proved(job, ranks, fabric, {str(k): float(v) for k, v in data["shares"].items()}, float(data["price"]), float(data["variance"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [Finding(check="certificate", message=f"the bound on an epoch lacks or mangles {error}", witness={"kind": "halo"})]
    if bound.quantity != "epoch time" or bound.unit != "s" or bound.parts:
        return [Finding(check="certificate", message="a plan of kind halo has a bound on its epoch in seconds", witness={"unit": bound.unit})]
    if bound.exact > Fraction(max(0.0, proved)) * (1 - Fraction(TOLERANCE) / 2):
        text = f"the certificate proves {proved:.9g} s, claimed is {float(bound):.9g} s"
        return [Finding(check="certificate", message=text, witness={"value": bound.value})]
    return []


def _proved(job: HaloJob, ranks: tuple[str, ...], fabric: Fabric, shares: dict[str, float], price: float, variance: float) -> float:
    y = np.array([shares[name] for name in ranks])
    if len(shares) != len(y) or not (np.isfinite(y).all() and (y >= 0).all() and y.sum() > 0 and np.isfinite(price) and price >= 0):
        raise ValueError("shares or price")
    if not variance >= job.variance * (1 - TOLERANCE):
        raise ValueError("variance, which is below that of the plan")
    leaving = [sum(x.rate_Bps for x in fabric.links if x.src == name) for name in ranks]
    total = -price * variance
    for s in job.steps:
        for m in s.messages:
            per_byte = float(y[m.src] / y.sum()) / leaving[m.src]
            rows, weight = np.array([g.rows for g in m.groups], np.float64), np.array([g.weight for g in m.groups], np.float64)
            costs = [per_byte * rows * (s.dim * b / 8 + (0 if b == 32 else ROW_BYTES)) + price * _noise(b) * weight for b in (2, 4, 8, 32)]
            total += float(np.min(costs, 0).sum())
    return total
