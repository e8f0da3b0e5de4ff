"""Pipeline schedules on real processes, beside PyTorch's own classes, serial bounds and plain data parallelism.

Run: `python benchmarks/pipeline_runs.py` (about six minutes; four gloo processes, so keep the machine quiet); with names of cases for some of them,
e.g. `zbv chimera unpaced`. Paced: stages sleep through forward, input gradient and weight gradient, 20 ms each per device and micro-batch, in
autograd nodes of their own, for PyTorch and for us alike; the first stage computes no input gradient. Steps of the two alternate
in the same processes and start together; figures are medians. Raw: benchmarks/results/pipeline_runs.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

STEPS = int(os.environ.get("STEPS", "9"))  # measured, after one warm-up
UNIT_S = 0.02
WIDTH = 1024
# ours, options, PyTorch's class, stages per device, how much faster ours should be
CASES: dict[str, tuple[str, dict[str, Any], str, int, float]] = {
    "gpipe": ("gpipe", {}, "ScheduleGPipe", 1, -0.01),
    "1f1b": ("1f1b", {}, "Schedule1F1B", 1, -0.01),
    "interleaved": ("interleaved", {"chunks": 2}, "ScheduleInterleaved1F1B", 2, 0.02),
    "breadth-first": ("breadth-first", {"chunks": 2, "reverse": True}, "ScheduleLoopedBFS", 2, 0.10),
    "interleaved-zb": ("torch", {}, "ScheduleInterleavedZeroBubble", 2, 0.07),
    "interleaved-zb, our order": ("interleaved-zb", {}, "ScheduleInterleavedZeroBubble", 2, 0.07),
    "zbv": ("zbv", {}, "ScheduleZBVZeroBubble", 2, 0.03),
    "dualpipe-v": ("dualpipe-v", {}, "ScheduleDualPipeV", 2, 0.0),
}


# ---- one rank ----------------------------------------------------------------------------------------------------------
def ranked(seat: Any) -> list[dict[str, Any]]:
    """A rank's runs, as `meshwright.run.ranks.worker` calls it."""
    from meshwright.run.pipeline.stages import precise_sleep

    case = seat.options
    precise_sleep()
    seat.join("cpu", 60.0).go()
    body = {"paced": paced, "chimera": chimera, "unpaced": unpaced}[case["kind"]]
    return [body({**case, **one}, seat.rank) for one in case["runs"]]


def timed(bodies: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Seconds from the common start to the last end over ranks, of each body in turn, `steps` times after one warm-up."""
    import torch
    import torch.distributed as dist

    found: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(steps + 1):
        for name, (prepare, body) in bodies.items():
            prepare()
            begin = torch.tensor(time.perf_counter() + 0.01, dtype=torch.float64)
            dist.broadcast(begin, 0)
            while (left := float(begin) - time.perf_counter()) > 0:
                time.sleep(left)
            body()
            end = torch.tensor(time.perf_counter(), dtype=torch.float64)
            dist.all_reduce(end, dist.ReduceOp.MAX)
            if turn:
                found[name].append(float(end - begin))
    return found


def our_walk(plan: Any, rank: int, given: Any = None) -> Any:
    import torch
    import torch.distributed as dist

    from meshwright.drive.pipeline.pipelines import problem_of_plan, schedule_of_plan
    from meshwright.run.executor.transport import TaggedTransport
    from meshwright.run.launch.pipeline_rank import make_walk
    from meshwright.run.launch.rehearse import pipeline_orders

    orders, _ = pipeline_orders(plan, problem_of_plan(plan), schedule_of_plan(plan))
    return make_walk(plan, orders, rank, given, TaggedTransport(dist.group.WORLD), torch.device("cpu"))


def simulated(plan: Any, walk: Any, message_s: float) -> float:
    """Seconds with what actions and messages cost in these processes."""
    from dataclasses import replace

    import torch.distributed as dist

    from meshwright.drive.pipeline.pipelines import problem_of_plan, schedule_of_plan
    from meshwright.run.launch.pipeline_rank import RankResult
    from meshwright.run.launch.rehearse import measured_cost, pipeline_orders

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, walk.stages.measured())
    walk.clear()
    problem, schedule = problem_of_plan(plan), schedule_of_plan(plan)
    cost = measured_cost(problem, schedule, [RankResult(rank=r, action_s=x) for r, x in enumerate(everyone)])
    connected = replace(problem, p2p_latency_s=(message_s,) * problem.devices)
    return pipeline_orders(plan, connected, schedule, cost)[1].makespan_s


def problem_of(microbatches: int, **more: Any) -> Any:
    from meshwright.decide.pipeline import PipelineProblem

    times = {"forward_s": UNIT_S, "input_grad_s": UNIT_S, "weight_grad_s": UNIT_S} | more
    return PipelineProblem.of(4, microbatches, message_bytes=4 * WIDTH, first_input_grad=False, **times)


def torch_order_plan(schedule: Any, problem: Any) -> Any:
    """PyTorch's own order of actions as a plan of ours: what differs is only how it is walked."""
    from meshwright.decide.pipeline import Action, Schedule
    from meshwright.decide.pipeline.orders import looped
    from meshwright.drive.pipeline.pipelines import plan_schedule

    def action(text: str) -> Action:
        at = next(i for i, c in enumerate(text) if c in "FIW")
        return Action(text[at], int(text[:at]), int(text[at + 1 :]))  # type: ignore[arg-type]

    orders = tuple(tuple(action(str(a)) for a in schedule.pipeline_order[r] if a is not None) for r in range(4))
    made = Schedule(
        name="interleaved zero-bubble", devices=4, stages=8, placement=(looped(4, 2),), copy_of=(0,) * problem.microbatches, orders=orders, split=True
    )
    return plan_schedule(problem, made, "zb1p")


def torch_schedule(name: str, v: int, microbatches: int, rank: int, times: tuple[float, float, float]) -> tuple[Any, list[int]]:
    import torch
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    from meshwright.run.pipeline.stages import PacedStage

    vee = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [rank] if v == 1 else [rank, 7 - rank] if vee else [rank, rank + 4]
    stages = [
        PipelineStage(PacedStage(WIDTH, *(t / v for t in times)), k, 4 * v, torch.device("cpu")) for k in mine
    ]
    kind = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)

    def loss(y: Any, target: Any) -> Any:
        return (y.mean() - target.mean()) ** 2

    return kind(stages[0] if v == 1 else stages, microbatches, loss_fn=loss), mine


def torch_body(schedule: Any, mine: list[int], stages: int, microbatches: int) -> Any:
    import torch

    x, target = torch.ones(microbatches, WIDTH), torch.zeros(microbatches, 1)

    def body() -> None:
        kwargs = {"target": target} if stages - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **kwargs)

    return body


def paced(case: dict[str, Any], rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from meshwright.drive.pipeline.pipelines import plan_pipeline
    from meshwright.run.executor.transport import TaggedTransport
    from meshwright.run.launch.pipeline_rank import message_time

    ours, options, theirs, v, _ = CASES[case["case"]]
    n = case["microbatches"]
    schedule, mine = torch_schedule(theirs, v, n, rank, (UNIT_S,) * 3)
    shared = torch.tensor(message_time(TaggedTransport(dist.group.WORLD), rank, 1, torch.empty(1, WIDTH)), dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    problem = problem_of(n, p2p_latency_s=float(shared))
    plan = torch_order_plan(schedule, problem) if ours == "torch" else plan_pipeline(problem, ours, options)
    walk = our_walk(plan, rank)
    expected = simulated(plan, walk, float(shared))
    bodies = {"ours": (walk.clear, walk.step), "torch": (lambda: None, torch_body(schedule, mine, 4 * v, n))}
    times = timed(bodies, case["steps"])
    return {"message_s": float(shared), "planned_s": plan.prediction.time_s, "simulated_s": expected, **times}


def chimera(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Chimera and 1F1B of ours and PyTorch's 1F1B, forward 20 ms, backward 40 ms, as many micro-batches as devices."""
    import torch
    import torch.distributed as dist

    from meshwright.drive.pipeline.pipelines import plan_pipeline
    from meshwright.run.executor.transport import TaggedTransport
    from meshwright.run.launch.pipeline_rank import message_time

    shared = torch.tensor(message_time(TaggedTransport(dist.group.WORLD), rank, 1, torch.empty(1, WIDTH)), dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    plans = {name: plan_pipeline(problem_of(4, gradient_bytes=64), name, {}) for name in ("chimera", "1f1b")}
    walks = {name: our_walk(plan, rank) for name, plan in plans.items()}
    schedule, mine = torch_schedule("Schedule1F1B", 1, 4, rank, (UNIT_S,) * 3)
    bodies = {name: (w.clear, w.step) for name, w in walks.items()}
    bodies["torch 1f1b"] = (lambda: None, torch_body(schedule, mine, 4, 4))
    expected = {f"simulated {name}": simulated(plans[name], w, float(shared)) for name, w in walks.items()}
    return {**expected, **timed(bodies, case["steps"])}


def unpaced(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Two processes, two micro-batches, transformer stages at full speed: Chimera, 1F1B, and each process a whole model (data parallel)."""
    import torch

    from meshwright.decide.pipeline import PipelineProblem
    from meshwright.drive.pipeline.pipelines import plan_pipeline
    from meshwright.run.launch.rehearse import with_real_sizes
    from meshwright.run.pipeline.stages import Given

    torch.manual_seed(1)

    def stage() -> Any:
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    stages, rows = [stage(), stage()], [torch.randn(8, 128, 512) for _ in range(4)]
    forward = []
    for _ in range(3):
        start = time.perf_counter()
        stages[0](rows[0])
        forward.append(time.perf_counter() - start)

    def given(modules: list[Any]) -> Given:
        return Given(modules=tuple(modules), inputs=tuple(rows[:2]), targets=tuple(rows[2:]), loss=torch.nn.functional.mse_loss)

    bodies = {}
    for name, schedule, modules, shape in (
        ("chimera", "chimera", stages, (2, 2, 1)), ("1f1b", "1f1b", stages, (2, 2, 1)),
        ("data parallel", "1f1b", [torch.nn.Sequential(*stages)], (1, 1, 2)),
    ):  # fmt: skip
        devices, n, data = shape
        plan = plan_pipeline(PipelineProblem.of(devices, n, forward_s=0.15, backward_s=0.3, data=data), schedule)
        found = given(modules)
        walk = our_walk(with_real_sizes(plan, found), rank, found)
        bodies[name] = (walk.clear, walk.step)
    return {"forward_s": statistics.median(forward), **timed(bodies, case["steps"])}


# ---- the whole run -----------------------------------------------------------------------------------------------------
def launch(ranks: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    import pipeline_runs  # ranks import the module by this name

    from meshwright.run.ranks.launcher import LocalRanks, scratch_folder

    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with scratch_folder("pipeline-runs") as folder:
        started = LocalRanks(ranks, folder, pipeline_runs.ranked, case, limit_s=600, environment={"PYTHONPATH": path})
        started.run()
        found: list[dict[str, Any]] = started.results(list[dict[str, Any]])[0]
        return found


def compared(name: str, microbatches: int, raw: dict[str, Any]) -> list[dict[str, Any]]:
    asked = CASES[name][4]
    ours, theirs = statistics.median(raw["ours"]), statistics.median(raw["torch"])
    gain, off = 1 - ours / theirs, ours / raw["simulated_s"] - 1
    print(
        f"{name:15} M={microbatches:2}  ours {1e3 * ours:6.0f} ms  torch {1e3 * theirs:6.0f} ms  {100 * gain:5.1f} % faster (asked {100 * asked:.0f})"
        f"  simulated {1e3 * raw['simulated_s']:6.0f} ms ({100 * off:+.1f} %)  one message {1e6 * raw['message_s']:.0f} us"
    )
    label = f"{name}, {microbatches} micro-batches, four gloo processes"
    return [
        {"what": f"{label}: torch's time over ours", "value": round(theirs / ours, 4), "unit": "x", "limit": round(1 / (1 - asked), 4),
         "ratio": round(theirs / ours * (1 - asked), 4), "higher_is_better": True, "raw": raw},
        {"what": f"{label}: measured over simulated", "value": round(1 + off, 4), "unit": "x", "limit": 1.05, "ratio": round((1 + off) / 1.05, 4)},
    ]  # fmt: skip


def bidirectional() -> list[dict[str, Any]]:
    (raw,) = launch(4, {"kind": "chimera", "steps": STEPS, "runs": [{}]})
    t = {k: statistics.median(v) if isinstance(v, list) else v for k, v in raw.items()}
    print("  ".join(f"{k} {1e3 * v:.0f} ms" for k, v in t.items()))
    return [
        {"what": "Chimera, D=4, N=4, F=20 ms, B=40 ms", "value": round(t["chimera"], 4), "unit": "s", "limit": 0.352,
         "ratio": round(t["chimera"] / 0.352, 4), "raw": raw},
        {"what": "Chimera: measured over simulated", "value": round(t["chimera"] / t["simulated chimera"], 4), "unit": "x", "limit": 1.05,
         "ratio": round(t["chimera"] / t["simulated chimera"] / 1.05, 4)},
    ]  # fmt: skip


def full_speed() -> list[dict[str, Any]]:
    (raw,) = launch(2, {"kind": "unpaced", "steps": STEPS, "runs": [{}]})
    ratio = statistics.median(a / b for a, b in zip(raw["1f1b"], raw["chimera"], strict=True))
    parallel = statistics.median(a / b for a, b in zip(raw["data parallel"], raw["chimera"], strict=True))
    print(f"unpaced: forward {1e3 * raw['forward_s']:.0f} ms, 1F1B over Chimera {ratio:.2f}, data parallel over Chimera {parallel:.2f}")
    return [
        {"what": "unpaced, two processes, N=2: 1F1B's time over Chimera's, synchronisation included, median of pairs", "value": round(ratio, 4),
         "unit": "x", "limit": 1.25, "ratio": round(ratio / 1.25, 4), "higher_is_better": True, "raw": raw},
        {"what": "unpaced, two processes: plain data parallelism's time over Chimera's", "value": round(parallel, 4), "unit": "x"},
    ]  # fmt: skip


def main() -> int:
    wanted = sys.argv[1:] or [*CASES, "chimera", "unpaced"]
    rows = []
    pairs = [(name, n) for name in wanted if name in CASES for n in (8, 16)]
    if pairs:
        found = launch(4, {"kind": "paced", "steps": STEPS, "runs": [{"case": name, "microbatches": n} for name, n in pairs]})
        for (name, n), raw in zip(pairs, found, strict=True):
            rows += compared(name, n, raw)
    for name in wanted:
        if name not in CASES:
            rows += {"chimera": bidirectional, "unpaced": full_speed}[name]()
    machine.record("pipeline_runs" if len(sys.argv) == 1 else "pipeline_runs-part", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
