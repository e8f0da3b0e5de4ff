"""DeepSpeed's configuration in JSON. Pipelines, tensor splits of the user's model and recomputation are said in the user's code there."""

from __future__ import annotations

import json
from typing import Any

from ...errors import Unsupported
from .exported import Exporter, Subject, Written
from .shared import clip_norm, optimizer_name, optimizer_numbers, precision

__all__ = ["EXPORTER"]


def write(subject: Subject) -> Written:
    """Raises: Unsupported for a pipeline with sharded gradients, and for divided sequences."""
    layout, split, job = subject.layout, subject.split, subject.job
    if layout.pipeline > 1 and layout.zero_level > 1:
        raise Unsupported(
            f"DeepSpeed has no pipeline with sharding level {layout.zero_level}", hint="plan with level 1, or without a pipeline"
        )  # fmt: skip
    if layout.context > 1:  # its parser counts these ranks as replicas, and refuses the batch
        raise Unsupported("DeepSpeed's configuration has no divided sequences", hint="plan with --context 1; `train run` runs it")
    missing: list[str] = []
    to_add: list[str] = []
    zero: dict[str, Any] = {"stage": layout.zero_level}
    if layout.zero_level or layout.overlap:
        zero["overlap_comm"] = layout.overlap
    if layout.bucket_bytes:
        zero["reduce_bucket_size"] = max(1, layout.bucket_bytes // 4)  # elements, of 4 bytes here
    document: dict[str, Any] = {
        "train_batch_size": layout.global_batch, "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.microbatches, "zero_optimization": zero,
        "gradient_clipping": clip_norm(job),  # 0: none; it would clip at 1
    }  # fmt: skip
    if name := optimizer_name(job, 2, missing):
        document["optimizer"] = {"type": name, "params": {"lr": float(job.get("learning_rate", 1e-3)), **optimizer_numbers(job)}}
    computes, weights = precision(job)
    if computes != "float32":
        narrow = "bf16" if computes == "bfloat16" else "fp16"
        document |= {narrow: {"enabled": True}} if weights else {"torch_autocast": {"enabled": True, "dtype": computes}}
    if layout.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tensor}
    if layout.pipeline > 1:
        missing.append(f"{layout.pipeline} pipeline stages: not in the configuration, see what to add")
        topology = f"PipeModelDataParallelTopology(num_pp={layout.pipeline}, num_mp={layout.tensor}, num_dp={layout.data})"
        to_add.append(f"PipelineModule(num_stages={layout.pipeline}, topology={topology})")
        if split.torn or len(set(split.counts)) > 1:
            missing.append(f"stages of {', '.join(map(str, split.counts))} blocks: PipelineModule divides by count, by parameters or by a pattern")
    if layout.expert > 1:
        missing.append(f"expert parallelism of degree {layout.expert}")
    if layout.sequence:
        missing.append("sequence parallelism between tensor-parallel regions")
    if job.get("seed"):
        missing.append(f"the seed {job['seed']}")
    _, calls = subject.again
    if calls:
        to_add.append("deepspeed.checkpointing.checkpoint around every layer in the model's forward (recomputes all of it)")
        missing.append(f"which {calls} calls run again in backward, by stage: recomputation is not in the configuration")
    to_add.append(f"deepspeed on {layout.ranks} processes, with the model and its data")
    return json.dumps(document, indent=2) + "\n", missing, to_add


EXPORTER = Exporter(name="deepspeed", version="DeepSpeed 0.19.8, its parser", write=write, says=frozenset({"precision", "clip_norm"}))
