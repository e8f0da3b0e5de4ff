"""The ledger of a described transformer in words and as the document that `--json` prints."""

from __future__ import annotations

from typing import Any

import msgspec

from ..explain.numbers import bytes_text, seconds_text
from ..ledger.advice import changes, tightest
from ..ledger.flops import Causal, step_flops, utilisation
from ..ledger.layer import embedding_ledger, head_ledger, layer_ledger
from ..ledger.stage import kept_per_layer, stage_memory
from ..ledger.transformer import SplitLayout, Transformer
from .columns import columns

__all__ = ["ledger_document", "ledger_text"]

POLICIES = (("none", False), ("none", True), ("selective", False), ("selective", True), ("full", False), ("full", True))
NOT_COUNTED = "allocator fragmentation, contexts and libraries of the device, temporaries of single operators, communication buffers"


def ledger_document(
    model: Transformer, layout: SplitLayout, *, peak_flops: float = 0.0, memory_bytes: int = 0, step_time_s: float = 0.0, causal: Causal = "full"
) -> dict[str, Any]:
    """`peak_flops` and `memory_bytes` of one device, 0 if not known; utilisation needs a peak and a step time."""
    stages, flops = stage_memory(model, layout), step_flops(model, layout, causal=causal)
    unit = model.sequence * layout.microbatch_size * model.hidden
    document: dict[str, Any] = {
        "schema": "meshwright.train.ledger",
        "version": 1,
        "transformer": msgspec.to_builtins(model),
        "layout": msgspec.to_builtins(layout) | {"ranks": layout.ranks, "global_batch": layout.global_batch},
        "layer": [msgspec.to_builtins(k) | {"sbh": k.size_bytes / unit, "kept": _kept(layout, k)} for k in layer_ledger(model, layout)],
        "first": [msgspec.to_builtins(k) for k in embedding_ledger(model, layout)],
        "last": [msgspec.to_builtins(k) for k in head_ledger(model, layout)],
        "layer_bytes": kept_per_layer(model, layout)[0],
        "stages": [
            msgspec.to_builtins(s)
            | {"activations_bytes": s.activations_bytes, "state_bytes": s.state_bytes, "total_bytes": s.total_bytes}
            for s in stages
        ],
        "memory_bytes": tightest(stages).total_bytes,
        "flops": msgspec.to_builtins(flops),
        "policies": _policies(model, layout),
        "changes": [msgspec.to_builtins(c) for c in changes(model, layout)],
        "not_counted": NOT_COUNTED,
    }
    if memory_bytes:
        document["limit_bytes"] = memory_bytes
    if peak_flops and step_time_s:
        used = utilisation(flops, step_time_s=step_time_s, devices=layout.ranks, peak_flops=peak_flops)
        document["step_time_s"], document["peak_flops"] = step_time_s, peak_flops
        document |= msgspec.to_builtins(used)
    return document


def _kept(layout: SplitLayout, kept: Any) -> bool:
    if layout.recompute == "selective":
        return not kept.core
    return layout.recompute not in ("full", "uniform") or (kept.operator, kept.what) == ("norm1", "input")


def _policies(model: Transformer, layout: SplitLayout) -> list[dict[str, Any]]:
    """The paper's comparison: bytes of a layer under every policy, against keeping everything without sequence parallelism."""
    plain = msgspec.structs.replace(layout, recompute="none", sequence_parallel=False, every=1)
    base, model_flops = kept_per_layer(model, plain)[0], step_flops(model, plain).model
    found = []
    for recompute, sequence in POLICIES:
        if sequence and layout.tensor == 1:
            continue
        changed = msgspec.structs.replace(layout, recompute=recompute, sequence_parallel=sequence, every=1)
        size = kept_per_layer(model, changed)[0]
        found.append({
            "recompute": recompute, "sequence_parallel": sequence, "layer_bytes": size, "share": size / base,
            "hardware_over_model": step_flops(model, changed).hardware / model_flops,
            "memory_bytes": tightest(stage_memory(model, changed)).total_bytes,
        })  # fmt: skip
    return found


def ledger_text(document: dict[str, Any]) -> str:
    """Sections: what it is, one layer by operator, stages, policies, operations and utilisation."""
    model, layout = document["transformer"], document["layout"]
    shape = f"{model['layers']} layers, hidden {model['hidden']}, {model['heads']} heads, "
    shape += f"sequence {model['sequence']}, vocabulary {model['vocabulary']}"
    said = f"data {layout['data']} x tensor {layout['tensor']} x pipeline {layout['pipeline']} = {layout['ranks']} devices"
    said += ", sequence-parallel" if layout["sequence_parallel"] else ""
    batch = f"{layout['global_batch']} = {layout['data']} x {layout['microbatches']} micro-batches of {layout['microbatch_size']}"
    recompute = layout["recompute"] + (f" (every {layout['every']})" if layout["recompute"] in ("uniform", "block") else "")
    lines = [
        f"transformer  {shape}",
        f"kernels      {model['attention']} attention, {model['activation']}, {model['norm']}, dropout {'on' if model['dropout'] else 'off'}, "
        f"{model['element_bytes']}-byte activations, {model['mask_bytes']}-byte masks",
        f"layout       {said}", f"batch        {batch}", f"recompute    {recompute}", "",
        f"one layer, one micro-batch, one rank: {bytes_text(document['layer_bytes'])} kept",
    ]  # fmt: skip
    rows = [["operator", "keeps", "bytes", "of sbh", ""]]
    rows += [
        [k["operator"], k["what"], f"{k['size_bytes']:,}", f"{k['sbh']:.4g}", "" if k["kept"] else "recomputed"] for k in document["layer"]
    ]
    lines += [*columns(rows), "", *_stage_lines(document), "", "policies, one layer (share of tensor parallelism keeping everything)"]
    rows = [["recompute", "sequence-parallel", "bytes", "share", "operations", "fullest rank"]]
    rows += [
        [
            p["recompute"], "yes" if p["sequence_parallel"] else "no", f"{p['layer_bytes']:,}", f"{100 * p['share']:.1f} %",
            f"{100 * p['hardware_over_model']:.1f} %", bytes_text(p["memory_bytes"]),
        ]
        for p in document["policies"]
    ]  # fmt: skip
    lines += [*columns(rows), "", *_flops_lines(document), f"not counted  {document['not_counted']}"]
    if model["attention"] == "flash":
        lines.append("note         fused attention keeps no scores: recomputing core attention saves its log-sum-exp only")
    return "\n".join(lines)


def _stage_lines(document: dict[str, Any]) -> list[str]:
    """All stages, or the first, the last and the fullest when there are many."""
    stages, worst = document["stages"], document["memory_bytes"]
    shown = stages if len(stages) <= 8 else [s for s in stages if s["stage"] in (0, 1, len(stages) - 1) or s["total_bytes"] == worst]
    rows = [["stage", "layers", "in flight", "state", "activations", "recomputing", "total"]]
    for s in shown:
        sizes = [bytes_text(s[k]) for k in ("state_bytes", "activations_bytes", "recompute_bytes", "total_bytes")]
        rows.append([str(s["stage"]), str(s["layers"]), f"{s['in_flight']:.4g}", *sizes])
    head = f"memory       fullest rank {bytes_text(worst)}"
    if "limit_bytes" in document:
        head += f" of {bytes_text(document['limit_bytes'])}"
    return [head, *columns(rows)]


def _flops_lines(document: dict[str, Any]) -> list[str]:
    flops = document["flops"]
    lines = [
        f"operations   model {flops['model']:.4g}, hardware {flops['hardware']:.4g} a step "
        f"(attention {100 * flops['attention_share']:.1f} %, causal scores counted {'in full' if flops['causal'] == 'full' else 'by half'})"
    ]
    if "mfu" in document:
        lines.append(
            f"utilisation  MFU {100 * document['mfu']:.1f} %, HFU {100 * document['hfu_paper']:.1f} % as the paper counts, "
            f"{100 * document['hfu']:.1f} % as executed, at {seconds_text(document['step_time_s'])} a step"
        )
    return lines
