"""torchtitan's TOML, which 0.2.2 was the last release to read (`--job.config_file`)."""

from __future__ import annotations

import json
from typing import Any

from .exported import Exporter, Subject, Written
from .shared import optimizer_name, stage_modules

__all__ = ["EXPORTER", "parallelism", "sharding_notes"]


def write(subject: Subject) -> Written:
    layout, job = subject.layout, subject.job
    missing = sharding_notes(subject)
    pipelined = layout.pipeline > 1
    training = {
        "local_batch_size": layout.microbatch_size * (layout.microbatches if pipelined else 1), "global_batch_size": layout.global_batch,
    }  # fmt: skip
    degrees = parallelism(subject, "output", missing)
    if pipelined:
        degrees["pipeline_parallel_microbatch_size"] = layout.microbatch_size
    optimizer: dict[str, Any] = {"lr": float(job.get("learning_rate", 1e-3))}
    if name := optimizer_name(job, 0, missing):
        optimizer = {"name": name} | optimizer
    sections = {"training": training, "optimizer": optimizer, "parallelism": degrees, "debug": {"seed": int(job.get("seed", 0))}}
    rule, calls = subject.again
    if calls:
        sections["activation_checkpoint"] = {"mode": "full"}
        if rule != "full":
            missing.append(f"which {calls} calls run again in backward, by stage: written as full, which keeps no more")
    lines = [f"# layout of {job.get('model', 'a model')}, planned by meshwright; for torchtitan 0.2.2, torchrun on {layout.ranks} processes"]
    for section, fields in sections.items():
        lines += ["", f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in fields.items())]  # JSON's numbers, texts and lists are TOML's
    return "\n".join(lines) + "\n", missing, ["[model] name and flavor", "[training] seq_len, steps and dataset"]


def sharding_notes(subject: Subject) -> list[str]:
    layout = subject.layout
    notes = {
        1: "sharding level 1: torchtitan shards parameters too, written as level 2 (kept gathered until backward is done)",
        2: "sharding level 2: torchtitan shards parameters too, and keeps them gathered until backward is done",
    }
    found = [notes[layout.zero_level]] if layout.zero_level in notes else []
    if layout.tensor > 1 and not layout.sequence:
        found.append("tensor parallelism without sequence parallelism: torchtitan's plans use both")
    return found


def parallelism(subject: Subject, head: str, missing: list[str]) -> dict[str, Any]:
    """The degrees by torchtitan's names, alike in its TOML and its Python configuration; `head`: its name of the last module."""
    layout, split = subject.layout, subject.split
    sharded, replicas = layout.zero_level > 0, layout.data // layout.context
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else replicas, "data_parallel_shard_degree": replicas if sharded else 1,
        "tensor_parallel_degree": layout.tensor, "pipeline_parallel_degree": layout.pipeline, "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert,
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


EXPORTER = Exporter(name="torchtitan-toml", version="torchtitan 0.2.2, its JobConfig", write=write, own_models=True)
