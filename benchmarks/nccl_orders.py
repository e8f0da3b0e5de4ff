"""Recorded plans by NCCL's rules: does the order in which the executor issues messages on CUDA devices end, and what does it cost?

Every recorded plan (`tools/recorded_plans`) that holds a program the executor can walk is judged twice: in rounds, as it would run, if devices run
all that they are given in the order of issue; and with receives posted ahead as on gloo, by torch's rule that a communicator is made at first use.
`over_tags`: length of a step in rounds over the length where every pair and direction has a stream of its own, both replayed with the plan's own
times of work, and messages that take a given share of the mean time of a compute step; of plans that compute. No GPU takes part.

Run: `python benchmarks/nccl_orders.py` (about ten minutes on one core), writes benchmarks/results/nccl_orders.json. In parts: `--only collective
--part FILE` and so on, then `--join FILE...`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "recorded_plans"))
sys.path.insert(0, str(Path(__file__).parent))
import machine

ROOT = Path(__file__).resolve().parents[1]
VERBS = {
    ("collective", "plan"), ("collective", "groups"), ("pipeline", "plan"), ("pipeline", "fill"), ("train", "plan"), ("train", "replan"),
}  # fmt: skip
MESSAGE_SHARES = (0.02, 0.1, 0.3)  # of the mean time of a compute step
MAX_STEPS = 300_000  # of a written-out program; larger ones take minutes in Python


def walked(plan: Any) -> tuple[Any, Any, int, Any]:
    """(program, walks, sends ahead, seconds by step) of a plan. Raises: Unsupported and others where the executor cannot walk it."""
    import numpy as np

    from meshwright.drive.pipeline.pipelines import problem_of_plan, schedule_of_plan
    from meshwright.errors import Unsupported
    from meshwright.program.calls import inline
    from meshwright.run.executor.collective import callable_form
    from meshwright.run.executor.lanes import fuse_lanes, require_executable
    from meshwright.run.launch.outcome import walk_orders
    from meshwright.run.pipeline.orders import pipeline_orders

    if plan.kind == "collective":
        require = callable_form(plan.main)
        if len(require.steps) > MAX_STEPS:
            raise Unsupported(f"{len(require.steps)} steps")
        return require, fuse_lanes(require), 0, None
    program = inline(plan.main, plan.programs).program
    require_executable(program)
    if len(program.steps) > MAX_STEPS:
        raise Unsupported(f"{len(program.steps)} steps")
    if plan.kind == "pipeline":
        orders, timeline = pipeline_orders(plan, problem_of_plan(plan), schedule_of_plan(plan))
        ahead = len(program.steps)
    else:
        from meshwright.drive.plans import cost_of, works_of
        from meshwright.run.calibrate.transport import laptop_shape
        from meshwright.simulate import simulate_program

        orders, ahead = walk_orders(plan), 0
        fabric = laptop_shape(max(2, program.ranks))
        timeline = simulate_program(program, fabric, [d.name for d in fabric.devices[: program.ranks]], cost_of(plan), works=works_of(plan))
    seconds = np.zeros(len(program.steps))
    seconds[timeline.spans.step] = timeline.spans.end_s - timeline.spans.start_s
    return program, orders, ahead, seconds


def length(orders: Any, work_s: dict[int, float], message_s: float) -> float:
    """When everything has ended: the longest way through begins and ends of all entries, on independent streams."""
    begin: dict[tuple[int, int], int] = {}
    for rank, entries in enumerate(orders.ranks):
        for number in range(len(entries)):
            begin[rank, number] = 2 * len(begin)
    follow: list[list[tuple[int, float]]] = [[] for _ in range(2 * len(begin))]
    left = [0] * (2 * len(begin))

    def edge(first: int, then: int, seconds: float) -> None:
        follow[first].append((then, seconds))
        left[then] += 1

    ends: dict[tuple[int, int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    units: dict[tuple[int, int], int] = {}
    for rank, entries in enumerate(orders.ranks):
        last: dict[int, int] = {}
        for number, entry in enumerate(entries):
            at = begin[rank, number]
            if entry.stream in last:
                edge(last[entry.stream] + 1, at, 0.0)
            last[entry.stream] = at
            for other in entry.after:
                edge(begin[rank, other] + 1, at, 0.0)
            # Messages of one pair and direction follow each other, also within a group.
            ways = Counter((m.peer, m.sends) for m in entry.messages)
            units[rank, number] = max(ways.values(), default=0)
            edge(at, at + 1, message_s * units[rank, number] if ways else work_s.get(entry.step, 0.0))
            for m in entry.messages:
                ends[entry.comm, *((rank, m.peer) if m.sends else (m.peer, rank)), m.sends].append((rank, number))
    for (comm, src, dst, sends), mine in ends.items():
        for one, other in zip(mine, ends[comm, src, dst, not sends], strict=True):
            edge(begin[other], begin[one] + 1, message_s * max(units[one], units[other]))
    at_s = [0.0] * len(left)
    todo = [node for node, count in enumerate(left) if not count]
    while todo:
        node = todo.pop()
        for then, seconds in follow[node]:
            at_s[then] = max(at_s[then], at_s[node] + seconds)
            left[then] -= 1
            if not left[then]:
                todo.append(then)
    assert not any(left)
    return max(at_s, default=0.0)


def judged(plan: Any) -> dict[str, Any]:
    from meshwright.check.issued import check_issued
    from meshwright.program.program import Kind
    from meshwright.run.executor.rounds import compile_rounds, issued_orders
    from meshwright.run.pipeline.orders import meetings
    from meshwright.testing.posted_ahead import posted_ahead

    program, orders, sends_ahead, seconds = walked(plan)
    start = time.process_time()
    together = meetings(program)
    issued = issued_orders(program, compile_rounds(program, orders, sends_ahead=sends_ahead, together=together), together)
    made = time.process_time()
    verdict = check_issued(issued, in_issue_order=True)
    took = time.process_time()
    ahead = {ready: posted_ahead(program, orders, sends_ahead, ready=ready) for ready in (False, True)}
    old = check_issued(ahead[False])
    row = {
        "kind": plan.kind, "ranks": program.ranks, "steps": len(program.steps), "messages": verdict.facts["messages"],
        "groups": verdict.facts["groups"], "largest_group": verdict.facts["largest_group"],
        "rounds": verdict.status, "posted_ahead": "deadlock" if not old.ok else "ok",
        "posted_ahead_ready": "ok" if check_issued(ahead[True]).ok else "deadlock",
        "posted_ahead_as_issued": "ok" if check_issued(ahead[True], in_issue_order=True).ok else "deadlock",
        "making_cpu_s": round(made - start, 3), "judging_cpu_s": round(took - made, 3),
    }  # fmt: skip
    compute = (program.steps.kind == Kind.COMPUTE).nonzero()[0].tolist()
    work = {step: float(seconds[step]) for step in compute} if seconds is not None else {}
    mean = sum(work.values()) / len(work) if work else 0.0
    if verdict.facts["messages"] and mean:
        lengths = [(x, length(issued, work, x * mean), length(ahead[True], work, x * mean)) for x in MESSAGE_SHARES]
        row["over_tags"] = {str(x): round(rounds / tags, 4) for x, rounds, tags in lengths}
    return row


def main() -> None:
    from plan_set import plan_set
    from trees import RunError, Tree

    from meshwright.errors import MeshwrightError
    from meshwright.io.plan.plan import read_plan

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[], help="of the kinds and commands, those that hold all of these words")
    parser.add_argument("--part", help="write a part of the result here")
    parser.add_argument("--join", nargs="*", help="write the result of these parts")
    args = parser.parse_args()
    if args.join:
        write(machine.join_parts(args.join)[0], "python benchmarks/nccl_orders.py --only WORDS --part FILE, and --join: not all plans of the set")
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(ROOT, Path(folder))
        for case in plan_set():
            if case.chain[-1].verb not in VERBS or not all(w in f"{case.kind} {case}" for w in args.only):
                continue
            row: dict[str, Any] = {"command": str(case.chain[-1])}
            try:
                made = tree.make(case)
                row |= judged(read_plan(made.path)) if made.path.name != "error.txt" else {"not_walked": "nothing fits"}
            except (MeshwrightError, RunError, ValueError) as error:
                row["not_walked"] = str(error).splitlines()[0][:120]
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.part:  # after each, so that what is there stays
                machine.keep_part(args.part, rows)
        tree.close()
    if not args.part and not args.only:
        write(rows, "python benchmarks/nccl_orders.py")


def write(rows: list[dict[str, Any]], command: str) -> None:
    rows = list({r["command"] + r.get("not_walked", ""): r for r in rows}.values())
    done = [r for r in rows if r.get("messages")]
    over = [ratio for r in done for ratio in r.get("over_tags", {}).values()]
    counted = [
        ("plans", len(rows)), ("with messages, walked", len(done)), ("deadlock in rounds, as issued", sum(r["rounds"] != "ok" for r in done)),
        ("deadlock with receives posted ahead", sum(r["posted_ahead"] != "ok" for r in done)),
        ("the same, communicators made before", sum(r["posted_ahead_ready"] != "ok" for r in done)),
        ("the same, as issued", sum(r["posted_ahead_as_issued"] != "ok" for r in done)),
    ]
    found: list[dict[str, Any]] = [{"what": what, "value": value, "unit": "plans"} for what, value in counted]
    for what, value in (("median", statistics.median(over)), ("largest", max(over)), ("least", min(over))):
        found.append({"what": f"step in rounds over step with tags, {what}", "value": value, "unit": "ratio"})
    print(json.dumps(machine.record("nccl_orders", found, command=command, plans=rows)["rows"], indent=1))


if __name__ == "__main__":
    main()
