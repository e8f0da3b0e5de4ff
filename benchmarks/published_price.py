"""The price of a published run: its model captured with few blocks and repeated, its layout as it was, no search.

A model of equal blocks needs no capture of all of them: four are captured at full width, the rows of the layer table that belong to the second
stand for all that are missing. Rows of one block are joined, so that recomputing a block keeps one input, as the frameworks do.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from published_rows import read_rows

EXAMPLES = Path(__file__).parent.parent / "examples"
BLOCKS = 4  # that are captured: the second and the third must be alike, the first and the last have neighbours of their own
BOX = 8  # devices of a server


@cache
def read_published() -> dict[str, Any]:
    return read_rows(Path(__file__).parent / "published.toml")


def shape(model: dict[str, Any], sequence: int) -> Any:
    """What `capture` is given: a function that builds BLOCKS blocks of the model."""
    sys.path.insert(0, str(EXAMPLES))
    import gpt
    import llama
    from torch import nn

    if model["kind"] == "gpt":
        sizes = {k: model[k] for k in ("width", "heads", "vocabulary", "tied")}
        return lambda: gpt.build(layers=BLOCKS, sequence=sequence, batch=1, **sizes)
    sizes = {k: model[k] for k in ("width", "heads", "kv_heads", "hidden", "vocabulary")}
    if model["kind"] == "llama":
        return lambda: llama.build(layers=BLOCKS, sequence=sequence, batch=1, **sizes)

    class SquaredRelu(nn.Module):
        def __init__(self, width: int, hidden: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down(nn.functional.relu(self.up(x)).square())

    def squared() -> Any:
        module, batch = llama.build(layers=BLOCKS, sequence=sequence, batch=1, **sizes)
        for block in module.blocks:
            block.mlp = SquaredRelu(model["width"], model["hidden"])
        return module, batch

    return squared


def joined(rows: Sequence[Any]) -> Any:
    """Layers of one block as one layer."""
    plain = ("forward_s", "backward_s", "update_s", "parameters", "weights_s")
    sums = {name: sum(getattr(r, name) for r in rows) for name in plain}
    kept = [sum(r.kept_bytes[k] for r in rows) for k in range(2)]
    again = [sum(r.again_s[k] for r in rows) for k in range(3)]
    pairs = {name: tuple(map(sum, zip(*(getattr(r, name) for r in rows), strict=True))) for name in ("tensor_s", "flops")}
    return replace(
        rows[0], **sums, **pairs, kept_bytes=(*kept, rows[0].kept_bytes[2]), again_s=tuple(again), output_bytes=rows[-1].output_bytes,
        left_bytes=sum(r.left_bytes for r in rows),
    )  # fmt: skip


def repeated(table: Any, blocks: int) -> Any:
    """The table of BLOCKS blocks as that of `blocks`: one layer a block, then the head and the loss as they were cut."""
    starts = [next(i for i, head in enumerate(table.names) if f"blocks.{b}" in head.split(" to ")[-1]) for b in range(BLOCKS)]
    starts.append(next(i for i, name in enumerate(table.names) if name.split(" to ")[-1] in ("head", "loss", "norm")))
    spans = [range(a, z) for a, z in pairwise(starts)]
    tail = range(starts[-1], len(table.names))
    rows = {}
    for entry, row in table.rows.items():
        each = [joined([row[i] for i in span]) for span in spans]
        rows[entry] = (each[0], *(each[1],) * (blocks - 2), each[-1], *(row[i] for i in tail))
    names = (*(f"block {i}" for i in range(blocks)), *(table.names[i] for i in tail))
    return replace(table, rows=rows, names=names, heads=())


def __getattr__(name: str) -> Any:
    """`blocks_of_<number of the model>_<sequence>`: what `meshwright.capture` loads from this file."""
    kind, _, rest = name.partition("blocks_of_")
    if kind or not rest:
        raise AttributeError(name)
    number, _, sequence = rest.partition("_")
    return shape(read_published()["model"][int(number)], int(sequence))


@cache
def graph_of(number: int, sequence: int) -> Any:
    """The operator graph of four blocks at one sample."""
    from meshwright.capture.graph import capture

    return capture(f"{Path(__file__)}:blocks_of_{number}_{sequence}")


def held_out(name: str) -> bool:
    """Half of all rows, by their names alone."""
    return bool(hashlib.sha256(name.encode()).digest()[0] & 1)


def step_s(run: dict[str, Any], model_flops: float) -> float:
    """Measured seconds of a step. `model_flops`: of a step by the source's own formula, where it gives a rate of operations."""
    if "step_s" in run:
        return float(run["step_s"])
    if "tokens_per_s_gpu" in run:
        return float(run["global_batch"] * run["sequence"] / run["tokens_per_s_gpu"] / run["devices"])
    return float(model_flops / (run["tflops_gpu"] * 1e12 * run["devices"]))


def formula_flops(model: dict[str, Any], run: dict[str, Any]) -> float:
    """Operations of a step as the source counts them. `megatron-2021`: with the recomputed pass (arXiv:2104.04473, equation 3); `model`: 6 per
    parameter of products and token, and attention's scores in full."""
    s, n, d, v = run["sequence"], model["layers"], model["width"], model["vocabulary"]
    if run.get("flops") == "megatron-2021":
        return float(96 * run["global_batch"] * s * n * d * d * (1 + s / (6 * d) + v / (16 * n * d)))
    kv, hidden = model.get("kv_heads", model["heads"]), model.get("hidden", 4 * d)
    weights = 2 * d * d + 2 * d * d * kv // model["heads"] + (3 if model["kind"] == "llama" else 2) * d * hidden
    return float(3 * run["global_batch"] * s * (2 * n * weights + 4 * n * s * d + 2 * d * v))



# ---- the layout as it was ----------------------------------------------------------------------------------------------
def choices_of(run: dict[str, Any], layers: int) -> tuple[Any, ...]:
    """Of every layer. Recomputing every other product of a block is priced as every other block: as much is done again."""
    from meshwright.profile.layer_table import LayerChoice

    mixed = {"selective-op": ("full", "selective"), "every-other": ("full", "none")}
    each = mixed.get(run.get("recompute", "none"), (run.get("recompute", "none"),) * 2)
    blocks = [LayerChoice(each[i % 2], run.get("sharding", 0)) for i in range(layers)]
    return (*blocks[:-2], *(LayerChoice("none", run.get("sharding", 0)),) * 2)


def layout_of(run: dict[str, Any], table: Any, schedules: Any) -> Any:
    """Stages of equal blocks where they divide, with the embedding on the first and head and loss on the last; else balanced."""
    from meshwright.decide.layout.mixed.split import split_layers
    from meshwright.profile.network import ProfiledLayout, ProfiledSchedule, ProfiledStage, Replica

    data, tensor, stages, v = (run.get(k, 1) for k in ("data", "tensor", "pipeline", "interleave"))
    count = run["global_batch"] // data // run["microbatch"]
    replica = Replica(device=next(iter(table.devices)), tensor=tensor)
    blocks, extra = table.layers - 2, 2
    entry = next(iter(table.rows))
    times = np.array([r.forward_s + r.backward_s for r in table.rows[entry]])

    def cut(pieces: int) -> tuple[int, ...]:
        if blocks % pieces:
            return split_layers([times] * pieces)
        each = blocks // pieces
        return (*(each,) * (pieces - 1), each + extra)

    layers, schedule = cut(stages), None
    if v > 1:
        variants = [x for x in schedules.variants(stages, count, table.layers) if x.label.startswith("interleaved")]
        made = max((x for x in variants if len(x.stage_of) <= stages * v), key=lambda x: len(x.stage_of))
        pieces = cut(len(made.stage_of))
        layers = tuple(int(n) for n in np.bincount(made.stage_of, pieces, stages))
        schedule = ProfiledSchedule(name=made.label, layers=pieces, stage_of=made.stage_of)
    made_stages = tuple(ProfiledStage(layers=n, replicas=(replica,) * data) for n in layers)
    return ProfiledLayout(stages=made_stages, microbatch=run["microbatch"], microbatches=(count,) * data, name=run["name"], schedule=schedule)
