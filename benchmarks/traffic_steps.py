"""Training steps in the lab: planned gradient compression beside none, torch's hooks, default buckets and layer by layer.

Run as root: `python benchmarks/traffic_steps.py --pieces FILE` measures what FILE lacks; `--parts 1` stops after one part of at most 3 minutes, so
that each can run on a quiet machine; the last one records the whole. `--rate 50 --paced 0 --width 155`: only these. `--quick`: one setting, few
rounds, nothing recorded.

Eight gloo ranks on two cores, one shaped link each; 88 tensors of 1.06 million parameters in all, in some settings of 2.1 or 4.2 million, where fixed
costs of messages weigh less. The backward is paced (real operators, then a sleep per
layer) not at all, and so that it is as long as the exchange of all gradients by TopK 1 %. Of every rate and pace there are two parts. The first fits
the cost model to steps of this model (`probe/traffic/steps.py`), plans, runs every plan, and fits again with its steps; both predictions are kept.
The second has all rivals in turn, in the same processes, several rounds of five steps of which the first two are not counted (they find the caches
full of the others' models); a step lasts as long as at its slowest rank. Torch's PowerSGD compresses from its third step on, in one bucket: it waits
for collectives in callbacks of gloo's two threads, so two buckets at once block each other for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import machine

RANKS, LAYERS = 8, 44
WIDTH = int(os.environ.get("WIDTH", "155"))  # of the layers, set for the ranks
TOPK, LOW1, LOW4 = "topk", "powersgd:rank=1", "powersgd"
CODECS = ("fp16", TOPK, LOW1, LOW4)
RATES = (50, 100, 200, 0)  # Mbit/s; 0 = a rate that this machine does not reach
FAST_MBIT = 10_000
Setting = tuple[int, bool, int]  # Mbit/s, paced, width
SETTINGS: tuple[Setting, ...] = (
    *((rate, paced, 155) for rate in RATES for paced in (False, True) if rate or not paced), (50, True, 220), (100, True, 220), (100, True, 310),
)  # fmt: skip
WARM, ROUNDS, LEAD, STEPS = 2, 4, 2, 3
ALLOWED = 1.15
BEGAN = time.monotonic()


def star(rate_Mbit: int, ranks: int = RANKS) -> Any:
    from meshwright.fabric.fabric import Device, Fabric, Link, Switch

    rate_Bps = (rate_Mbit or FAST_MBIT) * 125_000
    devices = tuple(Device(name=f"n{i}", kind="cpu") for i in range(ranks))
    links = tuple(Link(src=a, dst=b, rate_Bps=rate_Bps) for d in devices for a, b in ((d.name, "sw"), ("sw", d.name)))
    return Fabric(name=f"star-{rate_Mbit or 'fast'}", devices=devices, switches=(Switch(name="sw"),), links=links)


def make_model(pace_s: float) -> Any:
    """44 layers whose backward sleeps `pace_s` each."""
    import torch
    from torch import nn

    class Paced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if pace_s:
                time.sleep(pace_s)
            return gradient

    class Block(nn.Module):
        def __init__(self, out: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, out)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.linear(Paced.apply(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH if i < LAYERS - 1 else 10) for i in range(LAYERS)))


def say(text: str) -> None:
    """How far it is, from rank 0."""
    if os.environ["RANK"] == "0":
        print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def rank_main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    given = json.loads(Path(os.environ["GIVEN"]).read_text()) if os.environ["GIVEN"] else None
    found = fitted(bool(int(os.environ["PACED"]))) if given is None else rivals(given, rounds=int(os.environ["ROUNDS"]))
    if dist.get_rank() == 0:
        Path(os.environ["FOUND"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def fitted(paced: bool) -> dict[str, Any]:
    """The profile and the plans of all of ours, each run and fitted again with its steps; what was predicted before and after."""
    import msgspec

    from meshwright.decide.traffic import TrafficProblem, timeline
    from meshwright.drive.traffic import plan_traffic
    from meshwright.probe.traffic.settled_plan import settled_plan
    from meshwright.probe.traffic.steps import measure_traffic

    pace_s = 0.0
    if paced:
        say("how long the exchange of all gradients by TopK takes")
        pace_s = pace()
    say(f"profile, {pace_s * 1e3:.2f} ms per layer")
    found = measure_traffic(*step_of(pace_s), CODECS)
    for p in found.probes:
        say(f"{p.codec} in {p.groups} groups: {p.measured_ns / 1e6:.1f} ms, fitted {p.predicted_ns / 1e6:.1f}")
    first, probed = found.profile, len(found.probes)
    say(f"plans; interference {first.interference_permille / 10} %")
    found, chosen = settled_plan(found)
    say("plans of one codec")
    plans = {"planned": chosen}
    for codec in (TOPK, LOW1, LOW4):
        found, plans[f"{codec} cupcake"] = settled_plan(found, [codec])
    plans |= from_first(lambda: others(plans[f"{TOPK} cupcake"]))
    say("steps of the others")
    for name in ("none cupcake", f"{TOPK} ddp-buckets", f"{TOPK} layer-wise"):
        found.steps.run(plans[name].groups, 6)
    found = found.steps.fitted()
    for p in found.probes[probed:]:
        say(f"{p.codec} in {p.groups} groups: {p.measured_ns / 1e6:.1f} ms, fitted {p.predicted_ns / 1e6:.1f}")
    found.state.close()
    last = found.profile

    def step_s(profile: Any, plan: Any) -> float:
        return (profile.plain_ns if plan.leave else timeline(TrafficProblem.of(profile), plan.groups)[0] + profile.finish_ns) / 1e9

    return {
        "pace_s": pace_s, "profile": msgspec.to_builtins(last), "plans": {n: msgspec.to_builtins(p) for n, p in plans.items()},
        "predicted_before_s": {n: step_s(first, p) for n, p in plans.items()}, "predicted_s": {n: step_s(last, p) for n, p in plans.items()},
        "probes": [(p.codec, p.groups, p.measured_ns / 1e9, p.predicted_ns / 1e9) for p in found.probes],
        **from_first(lambda: {
            "bound_s": float(plan_traffic(last).bound), "uncompressed_bound_s": float(plan_traffic(last, codecs=["none"]).bound),
            "topk_bound_s": float(plan_traffic(last, codecs=[TOPK]).bound),
        }),
    }  # fmt: skip


def others(planned: Any) -> dict[str, Any]:
    """No codec, and TopK in fixed groups, by the profile of the planned TopK."""
    from meshwright.drive.traffic import plan_traffic

    profile, known = planned.profile, (planned.bound, planned.uncompressed)
    fixed = {f"{TOPK} {way}": plan_traffic(profile, strategy=way, codecs=[TOPK], bounds=known) for way in ("ddp-buckets", "layer-wise")}
    return {"none cupcake": plan_traffic(profile, codecs=["none"]), **fixed}


def from_first(make: Any) -> Any:
    """What the first rank makes, on all."""
    import torch.distributed as dist

    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def pace() -> float:
    """Seconds per layer with which the backward lasts as long as the exchange of all gradients by TopK."""
    from meshwright.decide.traffic import groups_of
    from meshwright.probe.traffic.steps import StepProbe

    probe = StepProbe(*step_of(0.0), [TOPK], repeats=1, deadline_s=300.0, nonfinite="refuse")
    probe.run(groups_of([len(probe.tensors)], TOPK), 5)
    probe.state.close()
    missing = median(s.arrived_ns[0] - s.encoded_ns[0] - (s.backward_ns - s.ready_ns[0]) for s in probe.found[0])
    return max(0.0, missing) / 1e9 / LAYERS


def step_of(pace_s: float) -> tuple[Any, Any]:
    """The model under DDP, and its step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(make_model(pace_s))
    x, y = batch()
    return ddp, lambda: torch.nn.functional.cross_entropy(ddp(x), y).backward()


def backward_ns(profile: Any) -> int:
    """From the first gradient to the end of backward: what can overlap with messages."""
    return int(profile.compute_ns - profile.tensors[0].ready_ns)


def batch(step: int = 0) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    x = torch.randn(4, WIDTH, generator=generator)
    return x, x[:, :10].argmax(dim=1)


def rivals(given: dict[str, Any], *, rounds: int) -> dict[str, Any]:
    """Step times in seconds by rival, predictions of ours, and the last losses."""
    import msgspec
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from meshwright.traffic import TrafficPlan, TrafficProfile

    plans, pace_s = {n: msgspec.convert(p, TrafficPlan) for n, p in given["plans"].items()}, given["pace_s"]
    profile = msgspec.convert(given["profile"], TrafficProfile)

    def power(rank: int) -> Any:
        return lambda ddp: ddp.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
        )

    trained = {
        "torch ddp": Trained(pace_s, lambda ddp: None),
        "torch fp16": Trained(pace_s, lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)),
        "torch powersgd rank 1": Trained(pace_s, power(1), one_bucket=True),
        "torch powersgd rank 4": Trained(pace_s, power(4), one_bucket=True),
    } | {name: Trained(pace_s, planned(plan)) for name, plan in plans.items()}  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in trained}
    for name, one in trained.items():
        say(f"warm-up of {name}")
        for _ in range(WARM):
            one.step()
    for turn in range(rounds):
        say(f"round {turn + 1}")
        order = random.Random(turn).sample(sorted(trained), len(trained))
        for name in order:
            for _ in range(LEAD):
                trained[name].step()  # the other models' steps have used the caches since its last one
            times[name] += [trained[name].step() for _ in range(STEPS)]
    return {
        "backward_s": backward_ns(profile) / 1e9, "interference_permille": profile.interference_permille,
        "compute_s": profile.compute_ns / 1e9, "finish_s": profile.finish_ns / 1e9,
        "step_s": {n: median(t) for n, t in times.items()}, "all_s": times,
        "groups": {n: len(p.groups) for n, p in plans.items()},
        "planned_codecs": sorted({g.codec for g in plans["planned"].groups}), "loss": {n: one.loss for n, one in trained.items()},
        "topk_exchange_s": profile.codecs[profile.position(TOPK)].exchange.times_ns[-1] / 1e9,
        "timeline": {n: traced(profile, p, trained[n]) for n, p in plans.items() if not p.leave and len(p.groups) <= 16},
        "left_to_ddp": plans["planned"].leave, "plain_s": profile.plain_ns / 1e9,
    }  # fmt: skip


def planned(plan: Any) -> Any:
    from meshwright.run.traffic import PlannedTraffic, traffic_hook

    def register(ddp: Any) -> Any:
        state = PlannedTraffic(ddp, plan)
        ddp.register_comm_hook(state, traffic_hook)
        return state

    return register


def traced(profile: Any, plan: Any, one: Trained) -> list[dict[str, Any]]:
    """Of every group, its times as predicted and as this rank met them in the last step, in ms."""
    from meshwright.decide.traffic import TrafficProblem, timeline

    fields = ("encode_start_ns", "encode_end_ns", "exchange_start_ns", "exchange_end_ns", "decode_end_ns")
    rows = zip(timeline(TrafficProblem.of(profile), plan.groups)[1], one.state.measured, strict=True)
    return [{f.removesuffix("_ns"): [round(getattr(x, f) / 1e6, 2) for x in row] for f in fields} for row in rows]


class Trained:
    """One model under DDP with one way to exchange gradients."""

    def __init__(self, pace_s: float, register: Any, *, one_bucket: bool = False) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        first = dist._DEFAULT_FIRST_BUCKET_BYTES
        if one_bucket:
            dist._DEFAULT_FIRST_BUCKET_BYTES = 25 << 20
        self.ddp = DistributedDataParallel(make_model(pace_s))
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
        self.state = register(self.ddp)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05)
        self.steps, self.loss = 0, 0.0

    def step(self) -> float:
        """Seconds of the slowest rank from a common start to the end of backward."""
        import torch
        import torch.distributed as dist

        x, y = batch(self.steps)
        self.optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(self.ddp(x), y)
        loss.backward()
        took = torch.tensor([time.perf_counter() - start, loss.item()], dtype=torch.float64)
        self.optimizer.step()
        self.steps += 1
        mean = took.clone()
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        self.loss = float(mean[1]) / dist.get_world_size()
        return float(took[0])


def ratios(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with value and limit; value / limit at most 1 is inside."""
    rows: list[dict[str, Any]] = []

    def row(what: str, value: float, limit: float = 0.0) -> None:
        rows.append({"what": what, "value": round(value, 3), "unit": "x", **({"limit": limit} if limit else {})})

    for r in raw:
        at = f"{r['rate_Mbit'] or 'unshaped'} Mbit/s" + ", paced" * r["paced"] + f", width {r['width']}" * (r["width"] != 155)
        t, p = r["step_s"], r["predicted_s"]
        off = {n: max(t[n] / p[n], p[n] / t[n]) for n in p}
        row(f"{at}: planned step, measured against predicted (the larger over the smaller)", off["planned"], ALLOWED)
        row(f"{at}: all of ours, measured against predicted, the worst of {len(off)}", max(off.values()), ALLOWED)
        before = r["predicted_before_s"]["planned"]
        row(f"{at}: planned step, measured against predicted before any plan had run", max(t["planned"] / before, before / t["planned"]))
        if not r["rate_Mbit"]:
            row(f"{at}: planned over torch ddp without compression", t["planned"] / t["torch ddp"], 1.05)
            continue
        row(f"{at}: planned over none", t["planned"] / t["torch ddp"], {50: 1 / 3, 200: 1 / 1.5}.get(r["rate_Mbit"], 0.0))
        row(f"{at}: planned TopK over layer-wise TopK", t[f"{TOPK} cupcake"] / t[f"{TOPK} layer-wise"], 0.5)
        overlap = r["backward_s"] / r["topk_exchange_s"]
        limit = 1 / 1.3 if r["paced"] and 0.7 <= overlap <= 1.5 else 1.05
        what = f"planned TopK over TopK in default buckets (backward / exchange {overlap:.2f})"
        row(f"{at}: {what}", t[f"{TOPK} cupcake"] / t[f"{TOPK} ddp-buckets"], limit)
        row(f"{at}: TopK: bound of every grouping over default buckets as predicted", r["topk_bound_s"] / p[f"{TOPK} ddp-buckets"])
        for ours, rank in ((LOW1, 1), (LOW4, 4)):
            row(f"{at}: our PowerSGD rank {rank} over torch's hook", t[f"{ours} cupcake"] / t[f"torch powersgd rank {rank}"], 1.0)
            row(f"{at}: its loss after equal steps over the hook's", r["loss"][f"{ours} cupcake"] / r["loss"][f"torch powersgd rank {rank}"], 1.01)
        row(f"{at}: planned over torch's PowerSGD rank 1", t["planned"] / t["torch powersgd rank 1"], 1.0)
        row(f"{at}: planned over the fp16 hook", t["planned"] / t["torch fp16"])
    return rows


def piece(rate: int, paced: bool, width: int, rounds: int, given: dict[str, Any] | None) -> dict[str, Any]:
    """One part on links of this rate: the fitted plans, or `given` these, all rivals."""
    from meshwright.lab import Lab

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if "Warning" not in text:
            sys.stderr.write(text + "\n")

    with tempfile.TemporaryDirectory() as folder, Lab.up(star(rate), force=not rate, verify=bool(rate)) as lab:
        plans, found = Path(folder) / "plans.json", Path(folder) / "found.json"
        plans.write_text(json.dumps(given))
        env = {"PACED": str(int(paced)), "ROUNDS": str(rounds), "WIDTH": str(width), "OMP_NUM_THREADS": "1"}
        env |= {"GIVEN": str(plans) if given else "", "FOUND": str(found)}
        lab.run([sys.executable, __file__, "--rank"], env=env, timeout_s=580, sink=sink)
        return {"rate_Mbit": rate, "paced": paced, "width": width, **json.loads(found.read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing recorded; 50 Mbit/s unless told otherwise")
    parser.add_argument("--rate", type=int, choices=RATES, help="only links of this rate, in Mbit/s; 0: unshaped")
    parser.add_argument("--paced", type=int, choices=(0, 1), help="only with (1) or without (0) pacing")
    parser.add_argument("--width", type=int, choices=sorted({width for _, _, width in SETTINGS}), help="only layers so wide")
    parser.add_argument("--pieces", type=Path, help="keep what was measured here, and measure only what is missing")
    parser.add_argument("--parts", type=int, default=1 << 30, help="stop after so many parts")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main()
        return 0
    rate = 50 if args.rate is None and args.quick else args.rate
    wanted = [(r, p, w) for r, p, w in SETTINGS if rate in (None, r) and args.paced in (None, int(p)) and args.width in (None, w)]
    lines = args.pieces.read_text().splitlines() if args.pieces is not None and args.pieces.exists() else []
    held: dict[Setting, list[dict[str, Any]]] = {at: [] for at in wanted}
    for found in map(json.loads, lines):
        held.setdefault((found["rate_Mbit"], found["paced"], found["width"]), []).append(found)
    missing = [at for at in wanted for _ in range(2 - len(held[at]))]
    for at in missing[: args.parts]:
        held[at].append(piece(*at, 2 if args.quick else ROUNDS, held[at][0] if held[at] else None))
        if args.pieces is not None:
            with args.pieces.open("a") as file:
                file.write(json.dumps(held[at][-1]) + "\n")
    whole = sorted((at for at, parts in held.items() if len(parts) == 2), key=lambda at: (at[2], at[0] or FAST_MBIT, at[1]))
    raw = [{k: v for part in held[at] for k, v in part.items() if k not in ("plans", "profile")} for at in whole]
    rows = ratios(raw)
    for row in rows:
        print(f"{row['what']:<100} {row['value']:>8} {row['unit']}   limit {round(row.get('limit', float('nan')), 3)}")
    if len(raw) == len(SETTINGS) and not args.quick:
        machine.record("traffic_steps", [*rows, *({"what": "raw", **r} for r in raw)])
    elif args.pieces is None:
        print(json.dumps(raw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
