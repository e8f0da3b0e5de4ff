"""Training steps in the lab: planned gradient compression beside none, torch's hooks, default buckets and layer by layer.

Run as root: `python benchmarks/traffic_steps.py` (7 pieces of 2 to 4 minutes), or piece by piece: `--rate 50 --paced 0 --pieces FILE`, the
last of which records the whole; `--quick`: 50 Mbit/s unless `--rate` says otherwise, few rounds, nothing recorded. Eight gloo ranks on two cores,
one shaped link each; 1.06 million parameters in 88 tensors. The backward is paced (real operators, then a sleep per layer) not at all, and so that it
is as long as the exchange of all gradients by TopK 1 %. Everything of one rate and pace is measured by the same processes: the cost model, fitted to
steps of this model (`probe/traffic_steps.py`), then all rivals in turn, several rounds of five steps of which the first two are not counted (they
find the caches full of the others' models); a step lasts as long as at its slowest rank. Torch's
PowerSGD compresses from its third step on, in one bucket: it waits for collectives in callbacks of gloo's two threads, so two buckets at once block
each other for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine

RANKS, LAYERS, WIDTH = 8, 44, 155
TOPK, LOW1, LOW4 = "topk", "powersgd:rank=1", "powersgd"
CODECS = ("fp16", TOPK, LOW1, LOW4)
RATES = (50, 100, 200, 0)  # Mbit/s; 0 = a rate that this machine does not reach
FAST_MBIT = 10_000
WARM, ROUNDS, LEAD, STEPS = 2, 4, 2, 3
ALLOWED = 1.15
BEGAN = time.monotonic()


def star(rate_Mbit: int) -> Any:
    from meshwright.fabric import Device, Fabric, Link, Switch

    rate_Bps = (rate_Mbit or FAST_MBIT) * 125_000
    devices = tuple(Device(name=f"n{i}", kind="cpu") for i in range(RANKS))
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
    rank, paced, rounds = dist.get_rank(), bool(int(os.environ["PACED"])), int(os.environ["ROUNDS"])
    pace_s = 0.0
    if paced:
        say("how long the exchange of all gradients by TopK takes")
        bare = measured(0.0, [TOPK], few=(1,), repeats=1).profile
        exchange_ns = bare.codecs[bare.position(TOPK)].exchange.times_ns[-1]
        pace_s = max(0, exchange_ns - backward_ns(bare)) / 1e9 / LAYERS
    say(f"profile, {pace_s * 1e3:.2f} ms per layer")
    found = rivals(measured(pace_s, CODECS), pace_s, rounds=rounds)
    if rank == 0:
        print(json.dumps({"measured": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(pace_s: float, codecs: Sequence[str], **how: Any) -> Any:
    """Costs fitted to steps of this model, the same on all ranks."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from meshwright.probe.traffic_steps import measure_traffic

    ddp = DistributedDataParallel(make_model(pace_s))
    x, y = batch()
    found = measure_traffic(ddp, lambda: torch.nn.functional.cross_entropy(ddp(x), y).backward(), codecs, **how)
    found.state.close()
    return found


def backward_ns(profile: Any) -> int:
    """From the first gradient to the end of backward: what can overlap with messages."""
    return int(profile.compute_ns - profile.tensors[0].ready_ns)


def batch(step: int = 0) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    x = torch.randn(4, WIDTH, generator=generator)
    return x, x[:, :10].argmax(dim=1)


def rivals(found: Any, pace_s: float, *, rounds: int) -> dict[str, Any]:
    """Step times in seconds by rival, predictions of ours, and the last losses."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from meshwright.drive_traffic import plan_traffic

    profile = found.profile
    for p in found.probes:
        say(f"{p.codec} in {p.groups} groups: {p.measured_ns / 1e6:.1f} ms, fitted {p.predicted_ns / 1e6:.1f}")
    say(f"plans; interference {profile.interference_permille / 10} %")
    plans: dict[str, Any] = {}
    if dist.get_rank() == 0:
        plans = {"planned": plan_traffic(profile), **{f"{c} cupcake": plan_traffic(profile, codecs=[c]) for c in ("none", TOPK, LOW1, LOW4)}}
        known = (plans[f"{TOPK} cupcake"].bound, plans[f"{TOPK} cupcake"].uncompressed)
        plans |= {f"{TOPK} {way}": plan_traffic(profile, strategy=way, codecs=[TOPK], bounds=known) for way in ("ddp-buckets", "layer-wise")}
    box = [plans]
    dist.broadcast_object_list(box)
    plans = box[0]

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
        "backward_s": backward_ns(profile) / 1e9, "probes": [(p.codec, p.groups, p.measured_ns / 1e9, p.predicted_ns / 1e9) for p in found.probes],
         "interference_permille": profile.interference_permille,
        "compute_s": profile.compute_ns / 1e9, "finish_s": profile.finish_ns / 1e9,
        "step_s": {n: median(t) for n, t in times.items()}, "all_s": times,
        "predicted_s": {n: (profile.plain_ns if p.leave else p.step_ns) / 1e9 for n, p in plans.items()},
        "groups": {n: len(p.groups) for n, p in plans.items()},
        "planned_codecs": sorted({g.codec for g in plans["planned"].groups}), "uncompressed_bound_s": float(plans["planned"].uncompressed),
        "bound_s": float(plans["planned"].bound), "loss": {n: one.loss for n, one in trained.items()},
        "topk_exchange_s": profile.codecs[profile.position(TOPK)].exchange.times_ns[-1] / 1e9,
        "timeline": {n: traced(p, trained[n]) for n, p in plans.items() if not p.leave and len(p.groups) <= 16},
        "pace_s": pace_s, "left_to_ddp": plans["planned"].leave, "plain_s": profile.plain_ns / 1e9,
    }  # fmt: skip


def planned(plan: Any) -> Any:
    from meshwright.run.traffic import PlannedTraffic, traffic_hook

    def register(ddp: Any) -> Any:
        state = PlannedTraffic(ddp, plan)
        ddp.register_comm_hook(state, traffic_hook)
        return state

    return register


def traced(plan: Any, one: Trained) -> list[dict[str, Any]]:
    """Of every group, its times as predicted and as this rank met them in the last step, in ms."""
    from meshwright.decide.traffic import TrafficProblem, timeline

    fields = ("encode_start_ns", "encode_end_ns", "exchange_start_ns", "exchange_end_ns", "decode_end_ns")
    rows = zip(timeline(TrafficProblem.of(plan.profile), plan.groups)[1], one.state.measured, strict=True)
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
        at = f"{r['rate_Mbit'] or 'unshaped'} Mbit/s{', paced' if r['paced'] else ''}"
        t, p = r["step_s"], r["predicted_s"]
        off = {n: max(t[n] / p[n], p[n] / t[n]) for n in p}
        row(f"{at}: planned step, measured against predicted (the larger over the smaller)", off["planned"], ALLOWED)
        row(f"{at}: all of ours, measured against predicted, the worst of {len(off)}", max(off.values()), ALLOWED)
        if not r["rate_Mbit"]:
            row(f"{at}: planned over torch ddp without compression", t["planned"] / t["torch ddp"], 1.05)
            continue
        row(f"{at}: planned over none", t["planned"] / t["torch ddp"], {50: 1 / 3, 200: 1 / 1.5}.get(r["rate_Mbit"], 0.0))
        row(f"{at}: planned TopK over layer-wise TopK", t[f"{TOPK} cupcake"] / t[f"{TOPK} layer-wise"], 0.5)
        overlap = r["backward_s"] / r["topk_exchange_s"]
        limit = 1 / 1.3 if r["paced"] and 0.7 <= overlap <= 1.5 else 1.05
        what = f"planned TopK over TopK in default buckets (backward / exchange {overlap:.2f})"
        row(f"{at}: {what}", t[f"{TOPK} cupcake"] / t[f"{TOPK} ddp-buckets"], limit)
        for ours, rank in ((LOW1, 1), (LOW4, 4)):
            row(f"{at}: our PowerSGD rank {rank} over torch's hook", t[f"{ours} cupcake"] / t[f"torch powersgd rank {rank}"], 1.0)
            row(f"{at}: its loss after equal steps over the hook's", r["loss"][f"{ours} cupcake"] / r["loss"][f"torch powersgd rank {rank}"], 1.01)
        row(f"{at}: planned over torch's PowerSGD rank 1", t["planned"] / t["torch powersgd rank 1"], 1.0)
        row(f"{at}: planned over the fp16 hook", t["planned"] / t["torch fp16"])
    return rows


def piece(rate: int, paced: bool, rounds: int) -> dict[str, Any]:
    """All rivals on links of this rate, measured by the same processes."""
    from meshwright.lab import Lab

    found: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if rank == 0 and text.startswith('{"measured"'):
            found.append(json.loads(text)["measured"])
        elif "Warning" not in text:
            sys.stderr.write(text + "\n")

    with Lab.up(star(rate)) as lab:
        env = {"PACED": str(int(paced)), "ROUNDS": str(rounds), "RATE": str(rate), "OMP_NUM_THREADS": "1"}
        lab.run([sys.executable, __file__, "--rank"], env=env, timeout_s=580, sink=sink)
    return {"rate_Mbit": rate, "paced": paced, **found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing recorded; 50 Mbit/s unless told otherwise")
    parser.add_argument("--rate", type=int, choices=RATES, help="only links of this rate, in Mbit/s; 0: unshaped")
    parser.add_argument("--paced", type=int, choices=(0, 1), help="only with (1) or without (0) pacing")
    parser.add_argument("--pieces", type=Path, help="keep what was measured here, and measure only what is missing")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main()
        return 0
    rates = RATES if args.rate is None and not args.quick else (50 if args.rate is None else args.rate,)
    wanted = [(r, p) for r in rates for p in (False, True) if args.paced in (None, int(p)) and (r or not p)]
    lines = args.pieces.read_text().splitlines() if args.pieces is not None and args.pieces.exists() else []
    held = {(r["rate_Mbit"], r["paced"]): r for r in map(json.loads, lines)}
    for at in wanted:
        if at not in held:
            held[at] = piece(*at, 2 if args.quick else ROUNDS)
            if args.pieces is not None:
                with args.pieces.open("a") as file:
                    file.write(json.dumps(held[at]) + "\n")
    raw = [held[at] for at in sorted(held, key=lambda at: (at[0] or FAST_MBIT, at[1]))]
    rows = ratios(raw)
    for row in rows:
        print(f"{row['what']:<100} {row['value']:>8} {row['unit']}   limit {round(row.get('limit', float('nan')), 3)}")
    if len(raw) == 2 * len(RATES) - 1 and not args.quick:
        machine.record("traffic_steps", [*rows, *({"what": "raw", **r} for r in raw)])
    elif args.pieces is None:
        print(json.dumps(raw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
