"""What a run would need, without running: ranks, ports, memory, time."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from ...drive.plans import cost_of, works_of
from ...io.quantity import show_size, show_time
from ...plan.plan import Plan
from ...program.calls import inline
from ...simulate import simulate_program
from ..calibrate.transport import laptop_shape
from ..executor.rounds import compile_rounds, require_ends
from ..machine.pacing import choose_pacing, machine_facts
from .outcome import walk_orders
from .request import RunRequest, check_request, under_torchrun

__all__ = ["dry_run"]

START_S = 15.0  # processes, imports, tracing, calibration: order of magnitude on a laptop
FLOPS_PER_CORE = 20_000_000_000  # per core and second, assumed


def dry_run(plan: Plan, request: RunRequest) -> tuple[dict[str, Any], str]:
    """(document, text). Times are rough: assumed CPU speed, simulated on this machine's shape under the pacing that the run would have."""
    layout = check_request(plan, request)
    pacing = choose_pacing(layout.ranks, mode=request.pacing)  # type: ignore[arg-type]
    facts = machine_facts()
    fabric = laptop_shape(max(2, layout.ranks))
    cost = msgspec.structs.replace(cost_of(plan), default_flops=FLOPS_PER_CORE * pacing.share, default_memory_Bps=5e9 * pacing.share, table={})
    placement = [d.name for d in fabric.devices[: layout.ranks]]
    timeline = simulate_program(plan.main, fabric, placement, cost, works=works_of(plan), programs=plan.programs, record=False)
    peaks = list(timeline.memory_peak_bytes)[: layout.ranks]
    ranks: list[dict[str, Any]] = []
    for rank in range(layout.ranks):
        pipeline, data, tensor = layout.coordinates(rank)
        device = f"cuda:{rank}" if request.device == "cuda" else f"cpu, {pacing.share:g} of a core" if pacing.mode != "none" else "cpu"
        stages = [s for s, _ in layout.hosted(pipeline)]
        ranks.append(
            {"rank": rank, "stage": pipeline, "stages": stages, "replica": data, "tensor": tensor, "device": device, "memory_bytes": peaks[rank]}
        )  # fmt: skip
    program = inline(plan.main, plan.programs).program
    judged = require_ends(program, compile_rounds(program, walk_orders(plan))).facts if layout.ranks > 1 else {}
    seconds = START_S + request.steps * timeline.makespan_s
    local = not under_torchrun()
    ports = {
        "rendezvous": (request.port or "any free port, 127.0.0.1") if local else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "messages": "free ports on loopback, chosen by the system" if local else "free ports, chosen by the system",
    }
    document = {
        "schema": "meshwright.run.dry", "version": 1, "ranks": ranks, "ports": ports, "memory_bytes": sum(peaks),
        "machine_memory_bytes": facts.memory_bytes,
        "steps": request.steps, "step_s": timeline.makespan_s, "time_s": seconds, "time_evidence": "assumed",
        "pacing": pacing.mode, "share": pacing.share, "cuda_calls": dict(judged),
        "out": str(request.out), "data": request.data,
    }  # fmt: skip
    lines = [f"{layout.ranks} ranks on {facts.cores:g} cores, pacing {pacing.mode}" + (f" ({pacing.why})" if pacing.why else "")]
    lines += [
        f"  rank {r['rank']}: stage {'+'.join(map(str, r['stages']))}, replica {r['replica']}, tensor part {r['tensor']}, {r['device']}, "
        f"{show_size(r['memory_bytes'])} of tensors"
        for r in ranks
    ]
    lines.append(f"ports: rendezvous {ports['rendezvous']}; messages: {ports['messages']}")
    lines.append(f"memory: {show_size(sum(peaks))} of tensors in all, and about 300 MB per process; the machine has {show_size(facts.memory_bytes)}")
    lines.append(f"time: about {show_time(seconds)} for {request.steps} steps (assumed speed of this machine; a run measures it)")
    if judged:
        lines.append(
            f"on CUDA devices: {judged['messages']} messages in {judged['groups']} groups of calls, and by NCCL's rules all of them end; "
            "runs on several GPUs were not possible where this was made"
        )
    lines.append(f"would write to {request.out}/; nothing has been started or written")
    return document, "\n".join(lines)
