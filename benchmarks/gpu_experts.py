"""The part of `gpu.py` on expert layers: encode and decode beside a copy, block-sparse products beside `torch.nn.functional.grouped_mm`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.kernels.experts import dispatch
from meshwright.kernels.experts.block_sparse import BlockMatrix, dds, dsd, expert_topology, sdd, topology_of
from meshwright.kernels.experts.dropless import first_rows, multiply, sparse_mlp

LAYERS = {  # hidden, inner, experts, rows: Mixtral's and OLMoE's layers, and one that fits a rehearsal
    "mixtral": (4096, 14336, 8, 32768), "olmoe": (2048, 1024, 64, 65536), "quick": (64, 128, 4, 300),
}  # fmt: skip
BLOCK = 128
ROUNDS = 7
BANDS = (4, 16)  # block rows that programs of one time share, beside the kernels' own
TILES = [(128, 64, 8, 4), (128, 64, 4, 4), (128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 4, 3), (128, 128, 8, 2)]
DSD_TILES = [*TILES, (256, 64, 8, 3), (64, 64, 4, 4)]


def seconds(call: Callable[[], Any], device: str, rounds: int = ROUNDS) -> float:
    """Median seconds: events on a GPU, three calls at a time; the clock elsewhere."""
    call()
    found = []
    for _ in range(rounds):
        if device == "cpu":
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
            continue
        begins, ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begins.record()
        for _ in range(3):
            call()
        ends.record()
        torch.cuda.synchronize()
        found.append(begins.elapsed_time(ends) / 3e3)
    return statistics.median(found)


def zipf_counts(experts: int, rows: int, exponent: float = 1.0) -> torch.Tensor:
    """Rows per expert, the first one most; no multiple of a block."""
    weight = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    counts = (weight / weight.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def equal(device: str) -> dict[str, float]:
    """Largest relative distance of each kernel from float64 on the processor, for float32 and bfloat16, in blocks of 16 to 128."""
    found: dict[str, float] = {}
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for block in (16, 32, 64, 128):
            torch.manual_seed(block)
            t = topology_of(torch.rand(5, 6) < 0.6, block)
            a, b, right, left = (torch.randn(*s).to(dtype) for s in ((5 * block, 200), (200, 6 * block), (6 * block, 272), (5 * block, 272)))
            there = type(t)(t.block, t.shape, t.rows.to(device), t.columns.to(device), t.offsets.to(device))
            values = sdd(a.double(), b.double(), t).values.to(dtype)
            exact, ours = BlockMatrix(values.double(), t), BlockMatrix(values.to(device), there)
            a_, b_, right_, left_ = (x.to(device) for x in (a, b, right, left))
            pairs = {
                "sdd": (sdd(a_, b_, there).values, sdd(a.double(), b.double(), t).values),
                "sdd of transposes": (sdd(a_.t().contiguous().t(), b_.t().contiguous().t(), there).values, sdd(a.double(), b.double(), t).values),
                "dsd": (dsd(ours, right_), dsd(exact, right.double())),
                "dsd transposed": (dsd(ours, left_, transposed=True), dsd(exact, left.double(), transposed=True)),
                "dds": (dds(left_.t(), ours), dds(left.double().t(), exact)),
                "dds transposed": (dds(right_.t(), ours, transposed=True), dds(right.double().t(), exact, transposed=True)),
            }  # fmt: skip
            for what, (x, y) in pairs.items():
                key = f"{what}, {name}"
                found[key] = max(found.get(key, 0.0), apart(x, y))
        x, gates = torch.randn(1000, 520).to(dtype), torch.rand(1000, 3).to(dtype)
        slots = torch.randperm(4000)[:3000].reshape(1000, 3)
        slots[::7, 1] = -1
        for what, given in (("", None), (" with gates", gates)):
            given_ = None if given is None else given.to(device)
            put = dispatch.encode(x.to(device), slots.to(device), 4000, given_)
            plain = dispatch.encode(x.double(), slots, 4000, None if given is None else given.double())
            found[f"encode{what}, {name}"] = apart(put, plain)
            took = dispatch.decode(put, slots.to(device), given_)
            found[f"decode{what}, {name}"] = apart(took, dispatch.decode(put.double().cpu(), slots, None if given is None else given.double()))
    for what, value in found.items():
        print(f"{what}: {value:.1e}", flush=True)
    return found


def rows_moved(device: str, quick: bool, copy_Bps: float) -> list[dict[str, Any]]:
    """Encode and decode of bf16 tokens, two choices each, capacity 1.25: bytes that must move (tokens once, buffers once) per second of a copy."""
    found = []
    for tokens, width in ((300, 64),) if quick else ((32768, 4096), (65536, 2048), (65536, 7168)):
        k, rows = 2, int(tokens * 2 * 1.25)
        x = torch.randn(tokens, width, device=device).to(torch.bfloat16)
        slots = torch.randperm(rows, device=device)[: tokens * k].reshape(tokens, k)
        gates = torch.rand(tokens, k, device=device)
        buffer = dispatch.encode(x, slots, rows)
        must = x.itemsize * width * (tokens + rows), x.itemsize * width * (tokens + tokens * k)
        for what, size, call in (
            ("encode", must[0], lambda x=x, s=slots, r=rows: dispatch.encode(x, s, r)),
            ("decode", must[1], lambda b=buffer, s=slots, g=gates: dispatch.decode(b, s, g)),
        ):
            time_s = seconds(call, device)
            row = {"what": what, "tokens": tokens, "width": width, "time_s": time_s, "Bps": size / time_s, "share_of_copy": size / time_s / copy_Bps}
            found.append(row)
            print(row, flush=True)
    return found


def products(device: str, quick: bool) -> list[dict[str, Any]]:
    """One layer's products, forward and of both gradients, each beside grouped_mm on the same rows; then the whole layer both ways."""
    found = []
    for name in ("quick",) if quick else ("mixtral", "olmoe"):
        hidden, inner, experts, rows = LAYERS[name]
        torch.manual_seed(0)
        for exponent in (0.0, 1.0):
            counts = zipf_counts(experts, rows, exponent)
            x = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
            w1, w2 = (torch.randn(experts, inner, hidden, device=device).div_(hidden**0.5).to(torch.bfloat16) for _ in range(2))
            row: dict[str, Any] = {"layer": name, "zipf": exponent, "hidden": hidden, "inner": inner, "experts": experts, "rows": rows}
            row |= one_by_one(device, x, w1, w2, counts, sweep=exponent == 1.0 and not quick)
            row |= whole_layer(device, x, w1, w2, counts)
            found.append(row)
            print({k: v for k, v in row.items() if k != "tiles"}, flush=True)
            for tile in row.get("tiles", []):
                print(tile, flush=True)
    return found


def one_by_one(device: str, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor, sweep: bool) -> dict[str, Any]:
    experts, inner, hidden = w1.shape
    flops = 2 * len(x) * inner * hidden
    topology, first = expert_topology(counts.to(device), inner, BLOCK)
    owner = torch.repeat_interleave(torch.arange(experts), counts)
    at = (torch.arange(len(x)) - first_rows(counts)[owner] + first.cpu()[owner]).to(device)
    padded = x.new_zeros(topology.shape[0], hidden).index_copy(0, at, x)
    a, b = w1.reshape(-1, hidden), w2.reshape(-1, hidden)
    values = sdd(padded, a.t(), topology)
    offsets = torch.cumsum(counts, 0).int().to(device)
    h = torch.randn(len(x), inner, device=device).to(x.dtype)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "sdd": (lambda: sdd(padded, a.t(), topology), lambda: F.grouped_mm(x, w1.transpose(1, 2), offs=offsets)),
        "dsd": (lambda: dsd(values, b), lambda: F.grouped_mm(h, w2, offs=offsets)),
        "dsd transposed": (lambda: dsd(values, padded, transposed=True), lambda: F.grouped_mm(h.t(), x, offs=offsets)),
    }  # fmt: skip
    found: dict[str, Any] = {"padded_rows": topology.shape[0], "products": {}}
    for what, (ours, theirs) in calls.items():
        mine, peer = seconds(ours, device), attempt(theirs, device)
        found["products"][what] = {"ours_s": mine, "grouped_mm_s": peer, "ours_flops_per_s": flops / mine, "share": peer / mine if peer else None}
    if sweep and device != "cpu":
        found["tiles"] = tiles(device, flops, padded, a, b, values)
    return found


def attempt(call: Callable[[], Any], device: str) -> float | None:
    try:
        return seconds(call, device)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"grouped_mm: {str(error)[:300]}", flush=True)
        return None


def tiles(device: str, flops: int, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, values: BlockMatrix) -> list[dict[str, Any]]:
    """Rates of other tiles of the products' kernels."""
    from meshwright.kernels.gpu import experts as gpu

    t, found = values.topology, []
    for shape in DSD_TILES:
        tile = gpu.Tile(*shape)
        calls: dict[str, Callable[[], Any]] = {
            "dsd": lambda tile=tile: gpu.dsd(values.values, *t.walks[0], b, tile=tile),
            "dsd transposed": lambda tile=tile: gpu.dsd(values.values, *t.walks[1], x, transposed=True, tile=tile),
        }  # fmt: skip
        if shape in TILES:
            calls["sdd"] = lambda tile=tile: gpu.sdd(x, a.t(), t.rows, t.columns, BLOCK, t.walk, tile)
        found += [{"product": what, "tile": shape, "flops_per_s": rate(flops, call, device)} for what, call in calls.items()]
    kept = gpu.BAND
    for band in BANDS:
        gpu.BAND = band
        for what, number, other in (("dsd", 0, b), ("dsd transposed", 1, x)):
            call = lambda number=number, other=other: gpu.dsd(values.values, *t.walks[number], other, transposed=number == 1)  # noqa: E731
            found.append({"product": what, "band": band, "flops_per_s": rate(flops, call, device)})
    gpu.BAND = kept
    return found


def rate(flops: int, call: Callable[[], Any], device: str) -> float | str:
    try:
        return flops / seconds(call, device, 3)
    except Exception as error:  # a tile that does not fit the device
        return f"{type(error).__name__}: {str(error)[:120]}"


def whole_layer(device: str, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
    """Forward and backward of the dropless layer: block-sparse beside grouped products of the same rows; distance of outputs and gradients."""
    there = counts.to(device)
    given = [t.detach().requires_grad_() for t in (x, w1, w2)]

    def sparse() -> torch.Tensor:
        return sparse_mlp(given[0], there, given[1], None, given[2], F.gelu, BLOCK)

    def grouped() -> torch.Tensor:
        return multiply(F.gelu(multiply(given[0], given[1].transpose(1, 2), counts.tolist(), "grouped")), given[2], counts.tolist(), "grouped")

    results, times = [], []
    for way in (sparse, grouped):
        out = way()
        grad = torch.ones_like(out) / out.numel() ** 0.5
        results.append([out.detach(), *torch.autograd.grad(out, given, grad)])

        def step(way: Callable[[], torch.Tensor] = way, grad: torch.Tensor = grad) -> None:
            torch.autograd.grad(way(), given, grad)

        times.append(seconds(step, device, 5))
    far = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(*results, strict=True)]
    return {"layer_sparse_s": times[0], "layer_grouped_s": times[1], "layer_share": times[1] / times[0], "apart": far}


def experts(device: str, quick: bool) -> dict[str, Any]:
    n = 1 << 20 if quick else 1 << 28
    a, b = torch.empty(n, device=device), torch.ones(n, device=device)
    copy_Bps = 8 * n / seconds(lambda a=a, b=b: a.copy_(b), device)
    del a, b
    return {"copy_Bps": copy_Bps, "apart": equal(device), "rows": rows_moved(device, quick, copy_Bps), "products": products(device, quick)}
