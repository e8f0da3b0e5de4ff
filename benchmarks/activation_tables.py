"""The tables of Korthikanti et al. (arXiv 2205.05198) beside what `meshwright train explain` says of the same configurations.

Arithmetic only: no time is measured here. The paper's numbers are those it prints; step times are its measurements on A100s (312 TFLOP/s).
Differences that come from the paper's own rounding or simplification are named in each row.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

# name: layers, hidden, heads, pipeline, chunks, micro-batch, global batch (table 3); full and selective step times (table 5); printed MFU, HFU
CONFIGURATIONS: dict[str, tuple[str, int, int, int, int, float, float, float, float]] = {
    "22B": ("layers=48,hidden=6144,heads=64", 1, 1, 4, 4, 1.42, 1.10, 41.5, 43.7),
    "175B": ("layers=96,hidden=12288,heads=96", 8, 3, 1, 64, 18.13, 13.75, 51.4, 52.8),
    "530B": ("layers=105,hidden=20480,heads=128", 35, 3, 1, 280, 49.05, 37.83, 56.0, 57.0),
    "1T": ("layers=128,hidden=25600,heads=160", 64, 1, 1, 512, 94.42, 71.49, 56.3, 57.0),
}
FULL = {"22B": (32.3, 42.9), "175B": (39.0, 51.9), "530B": (43.2, 57.6), "1T": (42.6, 56.8)}  # formulas at the step times of full recomputation
TENSOR, SEQUENCE, VOCABULARY = 8, 2048, 51200
POINTS, BYTES = 0.2, 0.005  # limits: percentage points, relative


def explain(*words: str) -> dict[str, Any]:
    """The document of `meshwright train explain ... --json`."""
    from meshwright.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["train", "explain", *words, "--json"])
    if code:
        raise SystemExit(code)
    return json.loads(out.getvalue())  # type: ignore[no-any-return]


def words_of(name: str, *more: str) -> list[str]:
    shape, p, chunks, micro, batch, *_ = CONFIGURATIONS[name]
    spec = f"{shape},sequence={SEQUENCE},vocabulary={VOCABULARY}"
    split = ["--tp", TENSOR, "--pp", p, "--interleave", chunks, "--microbatch", micro, "--global-batch", batch, "--peak-flops", 312e12]
    return ["--transformer", spec, *map(str, split), *more]


def utilisation() -> list[dict[str, Any]]:
    rows = []
    for name, (*_, full_s, selective_s, mfu, hfu) in CONFIGURATIONS.items():
        ours = explain(*words_of(name, "--sequence-parallel", "--recompute", "selective", "--step-time", str(selective_s)))
        rows.append(points(f"{name} MFU, selective and sequence-parallel, {selective_s} s", 100 * ours["mfu"], mfu, "T is printed to 0.01 s"))
        why = f"the paper's equation counts attention three times again; executed once more it is {100 * ours['hfu']:.1f}"
        rows.append(points(f"{name} HFU, selective and sequence-parallel, {selective_s} s", 100 * ours["hfu_paper"], hfu, why))
        ours = explain(*words_of(name, "--recompute", "full", "--step-time", str(full_s)))
        rows.append(points(f"{name} MFU, full recomputation, {full_s} s", 100 * ours["mfu"], FULL[name][0], "peer: the formulas, not printed"))
        rows.append(points(f"{name} HFU, full recomputation, {full_s} s", 100 * ours["hfu"], FULL[name][1], "peer: the formulas, not printed"))
    batch = CONFIGURATIONS["530B"][4]
    many = words_of("530B", "--sequence-parallel", "--recompute", "selective", "--dp", "8", "--step-time", "39.15")
    many[many.index("--global-batch") + 1] = str(8 * batch)
    ours = explain(*many)
    rows.append(points(f"530B MFU on {ours['layout']['ranks']} GPUs, 39.15 s", 100 * ours["mfu"], 54.2, ""))
    return rows


def points(what: str, value: float, paper: float, why: str) -> dict[str, Any]:
    return {
        "what": what, "value": round(value, 2), "unit": "%", "peer": paper, "ratio": round(value / paper, 4), "difference": round(value - paper, 2),
        "limit_difference": POINTS, "note": why,
    }  # fmt: skip


def activations() -> list[dict[str, Any]]:
    rows = []
    for name, (shape, _, _, micro, *_) in CONFIGURATIONS.items():
        h, a = (int(shape.split(f"{field}=")[1].split(",")[0]) for field in ("hidden", "heads"))
        sbh, scores, t = SEQUENCE * micro * h, 5 * a * SEQUENCE / h, TENSOR
        forms = {
            ("none", False): sbh * (10 + 24 / t + scores / t), ("none", True): sbh / t * (34 + scores), ("selective", False): sbh * (10 + 24 / t),
            ("selective", True): 34 * sbh / t, ("full", False): 2 * sbh, ("full", True): 2 * sbh / t,
        }  # fmt: skip
        document = explain(*words_of(name))
        for policy in document["policies"]:
            paper = forms[policy["recompute"], policy["sequence_parallel"]]
            what = f"{name} bytes of a layer, {policy['recompute']}{', sequence-parallel' if policy['sequence_parallel'] else ''}"
            why = "" if policy["recompute"] == "full" else "the paper leaves out the norms' statistics"
            rows.append(size(what, policy["layer_bytes"], paper, why))
        rows += device(name, h, a, micro)
    return rows


def device(name: str, h: int, a: int, micro: int) -> list[dict[str, Any]]:
    """Equations 5 and 6 with the interleaving factor, and the ends: the paper's whole first stage."""
    shape, p, chunks, *_ = CONFIGURATIONS[name]
    layers = int(shape.split("layers=")[1].split(",")[0])
    sbh, scores, t = SEQUENCE * micro * h, 5 * a * SEQUENCE / h, TENSOR
    factor = 1 + (p - 1) / (p * chunks) if chunks > 1 else 1
    ends = sbh * p / t + (4 * sbh / t * (1 + VOCABULARY / h) if p == 1 else 0)
    rows = []
    for recompute, each in (("none", 34 + scores), ("selective", 34)):
        document = explain(*words_of(name, "--sequence-parallel", "--recompute", recompute))
        first = document["stages"][0]
        paper = sbh * layers / t * each * factor + ends
        what = f"{name} activations of the first stage, {recompute}, sequence-parallel"
        why = "the paper leaves out norm statistics, token numbers, and interleaving at the embedding"
        rows.append(size(what, first["activations_bytes"], paper, why))
    return rows


def size(what: str, value: int, paper: float, why: str) -> dict[str, Any]:
    return {
        "what": what, "value": value, "unit": "bytes", "peer": round(paper), "ratio": round(value / paper, 5),
        "difference": round(value / paper - 1, 5), "limit_difference": BYTES, "note": why,
    }  # fmt: skip


def operations() -> list[dict[str, Any]]:
    """Section 5: what selective recomputation saves and costs."""
    rows = []
    for name, saved, added in (("175B", 70.0, 2.7), ("530B", 65.0, 1.6)):
        kept = explain(*words_of(name, "--sequence-parallel"))
        layer = {p["recompute"]: p["layer_bytes"] for p in kept["policies"] if p["sequence_parallel"]}
        flops = explain(*words_of(name, "--sequence-parallel", "--recompute", "selective"))["flops"]
        share = 100 * (1 - layer["selective"] / layer["none"])
        what = f"{name} memory saved by selective recomputation"
        rows.append(points(what, share, saved, "the paper rounds to whole percents") | {"limit_difference": 0.5})
        extra = 100 * (flops["hardware_paper"] / flops["model"] - 1)
        rows.append(points(f"{name} operations added by it, as the paper counts", extra, added, "") | {"limit_difference": 0.1})
        executed = 100 * (flops["hardware"] / flops["model"] - 1)
        rows.append({"what": f"{name} operations added by it, as executed", "value": round(executed, 2), "unit": "%"})
    return rows


def main() -> None:
    rows = [*utilisation(), *activations(), *operations()]
    machine.record("activation_tables", rows, protocol="peer: the paper; limits: 0.2 points of MFU and HFU, 0.5 % of bytes")
    missed = 0
    for r in rows:
        if "peer" not in r:
            print(f"{r['what']:72s} {r['value']:>16,}")
            continue
        over = abs(r["difference"]) > r["limit_difference"] + 1e-9
        missed += over
        print(f"{r['what']:72s} {r['value']:>16,} paper {r['peer']:>16,} difference {r['difference']:+.4g}{'  OVER' if over else ''}  {r['note']}")
    print(f"{missed} of {sum('peer' in r for r in rows)} rows beyond their limit")


if __name__ == "__main__":
    main()
