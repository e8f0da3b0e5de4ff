"""torchtitan's TOML, which 0.2.2 was the last release to read (`--job.config_file`)."""

from __future__ import annotations

import json
import math
from typing import Any

from .exported import Exporter, Subject, Written
from .shared import clip_norm, context_exchange, optimizer_name, optimizer_numbers, precision, stage_modules

__all__ = ["EXPORTER", "SAYS", "parallelism", "sharding_notes", "training_numbers"]


SAYS = frozenset({"precision", "clip_norm"})


def write(subject: Subject) -> Written:
    layout, job = subject.layout, subject.job
    missing = sharding_notes(subject)
    pipelined = layout.pipeline > 1
    training: dict[str, Any] = {
        "local_batch_size": layout.microbatch_size * (layout.microbatches if pipelined else 1), "global_batch_size": layout.global_batch,
    }  # fmt: skip
    degrees = parallelism(subject, "output", missing)
    if pipelined:
        degrees["pipeline_parallel_microbatch_size"] = layout.microbatch_size
    training |= training_numbers(subject, missing)
    optimizer: dict[str, Any] = {"lr": float(job.get("learning_rate", 1e-3))}
    if name := optimizer_name(job, 0, missing):
        numbers = optimizer_numbers(job)
        beta1, beta2 = numbers["betas"]
        more = {"beta1": beta1, "beta2": beta2, "eps": numbers["eps"], "weight_decay": numbers["weight_decay"]}
        optimizer = {"name": name} | optimizer | more
    sections = {"training": training, "optimizer": optimizer, "parallelism": degrees, "debug": {"seed": int(job.get("seed", 0))}}
    rule, calls = subject.again
    if calls:
        sections["activation_checkpoint"] = {"mode": "full"}
        if rule != "full":
            missing.append(f"which {calls} calls run again in backward, by stage: written as full, which keeps no more")
    lines = [f"# layout of {job.get('model', 'a model')}, planned by meshwright; for torchtitan 0.2.2, torchrun on {layout.ranks} processes"]
    for section, fields in sections.items():
        lines += ["", f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in fields.items())]
    return "\n".join(lines) + "\n", missing, ["[model] name and flavor", "[training] seq_len, steps and dataset"]


def _toml(value: Any) -> str:
    """JSON's numbers, texts and lists are TOML's, but for infinity."""
    return "inf" if value == math.inf else json.dumps(value)


def training_numbers(subject: Subject, missing: list[str]) -> dict[str, Any]:
    """Types and clipping by torchtitan's names. Left out they would be bfloat16 and a norm of 1."""
    layout, (computes, weights) = subject.layout, precision(subject.job)
    if computes == "float16":
        missing.append("the precision float16: torchtitan has float32 and bfloat16, which is written")
    narrow = computes != "float32"
    if narrow and not weights and not layout.zero_level and layout.context == 1 and (layout.tensor > 1 or layout.pipeline > 1):
        missing.append("bfloat16 without sharded replicas: beside tensor or pipeline degrees torchtitan's mixed precision needs them")
    return {
        "dtype": "bfloat16" if narrow and weights else "float32", "mixed_precision_param": "bfloat16" if narrow else "float32",
        "max_norm": clip_norm(subject.job) or math.inf,
    }  # fmt: skip


def sharding_notes(subject: Subject) -> list[str]:
    layout = subject.layout
    notes = {
        1: "sharding level 1: torchtitan shards parameters too, written as level 2 (kept gathered until backward is done)",
        2: "sharding level 2: torchtitan shards parameters too, and keeps them gathered until backward is done",
    }
    found = [notes[layout.zero_level]] if layout.zero_level in notes else []
    if layout.tensor > 1 and not layout.sequence:
        found.append("tensor parallelism without sequence parallelism: torchtitan's plans use both")
    if context_exchange(subject) == "ulysses":
        found.append("the exchange of heads (ulysses) of divided sequences: torchtitan sends blocks of keys and values")
    if layout.expert > 1:
        found.append("which exchange and capacity experts have: torchtitan's expert layers choose their own")
    return found


def parallelism(subject: Subject, head: str, missing: list[str]) -> dict[str, Any]:
    """The degrees by torchtitan's names, alike in its TOML and its Python configuration; `head`: its name of the last module."""
    layout, split = subject.layout, subject.split
    sharded, replicas = layout.zero_level > 0, layout.data // layout.context
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else replicas, "data_parallel_shard_degree": replicas if sharded else 1,
        "tensor_parallel_degree": layout.tensor, "pipeline_parallel_degree": layout.pipeline, "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert_ranks,
    }  # fmt: skip
    if sharded:
        fields["fsdp_reshard_after_forward"] = "always" if layout.zero_level == 3 else "never"
    if layout.pipeline > 1:
        fields["pipeline_parallel_schedule"] = "GPipe" if layout.schedule == "gpipe" else "1F1B"
        if split.prefix and not split.torn and len(split.blocks) == layout.pipeline:
            fields["module_fqns_per_model_part"] = stage_modules(split, head)
        else:
            missing.append("which modules form a stage: the target divides its layers evenly")
    return fields


EXPORTER = Exporter(name="torchtitan-toml", version="torchtitan 0.2.2, its JobConfig", write=write, own_models=True, says=SAYS)
