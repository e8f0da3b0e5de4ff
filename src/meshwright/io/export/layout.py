"""A training plan's layout in the words of other systems: torchtitan TOML, Megatron-LM flags, DeepSpeed JSON.

What a target cannot express is named, never dropped: `Exported.not_expressed`. The rank order of all three is ours (tensor innermost, then data, then
pipeline), so placements carry over. Field names: torchtitan 0.3 `[parallelism]`, megatron-core 0.19 arguments, DeepSpeed 0.19 configuration.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported, UsageError
from ...plan.optimizers import named
from ...plan.plan import Plan, TrainingLayout
from .exported import TARGETS, Exported
from .recompute import with_recomputation

__all__ = ["LayerSplit", "export_layout", "layer_split"]

_NUMBERED = re.compile(r"^(.*?)\.(\d{1,6})\.")
_OPTIMIZERS = {"adamw": ("AdamW", "adam", "AdamW"), "sgd": ("", "sgd", "SGD")}  # names at the three targets; torchtitan has no SGD


@dataclass(frozen=True)
class LayerSplit:
    """Repeated blocks `prefix.0` ... by stage, other modules by stage, and blocks that a stage border cuts."""

    prefix: str
    blocks: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, ...], ...]
    torn: tuple[str, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(x) for x in self.blocks)


def layer_split(layout: TrainingLayout) -> LayerSplit:
    """Which blocks lie on which stage, told by the names of the parameters: the most frequent `name.<number>.` is the block list."""
    frequency: dict[str, int] = {}
    for stage in layout.stages:
        for p in stage.params:
            if m := _NUMBERED.match(p):
                frequency[m[1]] = frequency.get(m[1], 0) + 1
    prefix = max(frequency, key=lambda x: (frequency[x], x), default="")
    where: dict[int, set[int]] = {}
    others: list[dict[str, None]] = [{} for _ in layout.stages]
    for stage in layout.stages:
        for p in stage.params:
            m = _NUMBERED.match(p)
            if m and m[1] == prefix:
                where.setdefault(int(m[2]), set()).add(stage.index)
            else:
                others[stage.index][p.rpartition(".")[0] or p] = None
    blocks = tuple(tuple(sorted(b for b, stages in where.items() if min(stages) == s)) for s in range(len(layout.stages)))
    torn = tuple(f"{prefix}.{b}" for b, stages in sorted(where.items()) if len(stages) > 1)
    return LayerSplit(prefix, blocks, tuple(tuple(x) for x in others), torn)


def export_layout(plan: Plan, target: str) -> Exported:
    """Raises: UsageError for a plan without a training layout or an unknown target; Unsupported for degrees that it refuses itself."""
    if plan.layout is None or plan.kind != "training":
        raise UsageError("only training plans have a layout", hint="see `meshwright train plan`")
    if target not in TARGETS:
        raise UsageError(f"cannot export to {target!r}", hint=f"one of: {', '.join(TARGETS)}")
    job = plan.job.get("training", {})
    layout, split = plan.layout, layer_split(plan.layout)
    make = {"torchtitan": _torchtitan, "megatron": _megatron, "deepspeed": _deepspeed}[target]
    text, missing, to_add = make(layout, split, job)
    missing += _always(plan, layout, split, job)
    return with_recomputation(Exported(target, text, tuple(dict.fromkeys(missing)), tuple(to_add)), plan)


def _always(plan: Plan, layout: TrainingLayout, split: LayerSplit, job: Mapping[str, Any]) -> list[str]:
    """What none of the three has words for."""
    found = []
    chosen = sorted(k for k in plan.decisions if k.startswith("collective"))
    if chosen:
        found.append(f"collective programs ({', '.join(chosen)}): the target uses its library's own")
    if split.torn and layout.pipeline > 1:
        some = ", ".join(split.torn[:4]) + (" ..." if len(split.torn) > 4 else "")
        found.append(f"stage borders inside {some}: stages are made of whole blocks there")
    if layout.replica_microbatches:
        found.append(f"unequal numbers of micro-batches ({layout.microbatch_counts}): the target gives every replica as many")
    if layout.shards:
        found.append(f"the split of {len(layout.shards)} single parameters: the target splits its own model's layers by its own rules")
    found += [f"the recipe's {k}, {v}" for k, v in dict(job.get("recipe", {})).items()]
    if ":" in str(job.get("loss", "")):
        found.append(f"the loss {job['loss']}")
    if layout.schedule not in ("1f1b",):
        found.append(f"the schedule {layout.schedule!r} as planned")
    return found


def _optimizer(job: Mapping[str, Any], column: int, missing: list[str]) -> str:
    asked = named(str(job.get("optimizer", "adamw")), where="plan.job.training.optimizer")
    name = asked.name.lower() if not asked.is_function else asked.name
    missing += [f"the optimizer's {k}={v}" for k, v in asked.options.items()]
    found = _OPTIMIZERS.get(name, ("", "", ""))[column]
    if not found:
        missing.append(f"the optimizer {name}")
    return found


# ---- torchtitan --------------------------------------------------------------------------------------------------------


def _torchtitan(layout: TrainingLayout, split: LayerSplit, job: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    missing: list[str] = []
    sharded = layout.zero_level > 0
    if layout.zero_level == 1:
        missing.append("sharding level 1: torchtitan shards parameters too, written as level 2 (kept gathered until backward is done)")
    elif layout.zero_level == 2:
        missing.append("sharding level 2: torchtitan shards parameters too, and keeps them gathered until backward is done")
    pipelined, replicas = layout.pipeline > 1, layout.data // layout.context
    training = {
        "local_batch_size": layout.microbatch_size * (layout.microbatches if pipelined else 1), "global_batch_size": layout.global_batch,
        "seed": int(job.get("seed", 0)),
    }  # fmt: skip
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else replicas, "data_parallel_shard_degree": replicas if sharded else 1,
        "tensor_parallel_degree": layout.tensor, "pipeline_parallel_degree": layout.pipeline, "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert,
    }  # fmt: skip
    if sharded:
        parallelism["fsdp_reshard_after_forward"] = "always" if layout.zero_level == 3 else "never"
    if pipelined:
        parallelism |= {
            "pipeline_parallel_schedule": "GPipe" if layout.schedule == "gpipe" else "1F1B",
            "pipeline_parallel_microbatch_size": layout.microbatch_size,
        }  # fmt: skip
        if split.prefix and not split.torn:
            parallelism["module_fqns_per_model_part"] = _modules(split)
        else:
            missing.append("which modules form a stage: the target divides its layers evenly")
    if layout.tensor > 1 and not layout.sequence:
        missing.append("tensor parallelism without sequence parallelism: torchtitan's plans use both")
    optimizer: dict[str, Any] = {"lr": float(job.get("learning_rate", 1e-3))}
    if name := _optimizer(job, 0, missing):
        optimizer = {"name": name} | optimizer
    sections = {"training": training, "optimizer": optimizer, "parallelism": parallelism}
    lines = [f"# layout of {job.get('model', 'a model')}, planned by meshwright; start with torchrun on {layout.ranks} processes"]
    for section, fields in sections.items():
        lines += ["", f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in fields.items())]
    return "\n".join(lines) + "\n", missing, ["[model] name and flavor", "[training] seq_len, steps and dataset"]


def _modules(split: LayerSplit) -> list[list[str]]:
    """Modules of every stage; those that come before the blocks are named before them."""
    parts = []
    for s, (blocks, others) in enumerate(zip(split.blocks, split.others, strict=True)):
        names = [f"{split.prefix}.{b}" for b in blocks]
        last = s == len(split.blocks) - 1
        parts.append(names + list(others) if last and s else list(others) + names)
    return parts


def _toml(value: Any) -> str:
    """Numbers, texts and lists of texts; JSON's notation of these is TOML's."""
    return json.dumps(value)


# ---- Megatron ----------------------------------------------------------------------------------------------------------


def _megatron(layout: TrainingLayout, split: LayerSplit, job: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    missing: list[str] = []
    flags: list[Sequence[str]] = [
        ("--tensor-model-parallel-size", str(layout.tensor)), ("--pipeline-model-parallel-size", str(layout.pipeline)),
        ("--context-parallel-size", str(layout.context)), ("--micro-batch-size", str(layout.microbatch_size)),
        ("--global-batch-size", str(layout.global_batch)), ("--lr", repr(float(job.get("learning_rate", 1e-3)))), ("--seed", str(job.get("seed", 0))),
    ]  # fmt: skip
    if layout.expert > 1:
        flags.append(("--expert-model-parallel-size", str(layout.expert)))
    if layout.sequence:
        flags.append(("--sequence-parallel",))
    if layout.zero_level == 1:
        flags.append(("--use-distributed-optimizer",))
    elif layout.zero_level > 1:
        level = {2: "optim_grads", 3: "optim_grads_params"}[layout.zero_level]
        flags += [("--use-distributed-optimizer",), ("--use-megatron-fsdp",), ("--data-parallel-sharding-strategy", level)]
    if layout.overlap:
        flags.append(("--overlap-grad-reduce",))
        flags += [("--overlap-param-gather",)] if layout.zero_level == 3 else []
        flags += [("--ddp-bucket-size", str(max(1, layout.bucket_bytes // 4)))] if layout.bucket_bytes else []  # parameters, of 4 bytes here
    if name := _optimizer(job, 1, missing):
        flags.append(("--optimizer", name))
    if job.get("dtype") in ("bfloat16", "float16"):
        flags.append(("--bf16" if job["dtype"] == "bfloat16" else "--fp16",))
    counts = split.counts
    if sum(counts):
        flags.append(("--num-layers", str(sum(counts))))
        if layout.pipeline > 1 and not split.torn and len(set(counts)) > 1:
            groups = ["t" * n for n in counts]
            flags.append(("--pipeline-model-parallel-layout", "|".join(["E" + groups[0], *groups[1:-1], groups[-1] + "L"])))
    else:
        missing.append("the layers of each stage: no numbered blocks were found among the parameters")
    if layout.schedule == "gpipe" and layout.pipeline > 1:
        missing.append("the schedule gpipe: Megatron runs 1F1B")
    text = " \\\n".join(" ".join(shlex.quote(x) for x in flag) for flag in flags) + "\n"
    sizes = "sizes of the model (--hidden-size, --num-attention-heads, --seq-length, ...), data, --train-iters"
    return text, missing, [sizes, f"torchrun on {layout.ranks} processes"]


# ---- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _deepspeed(layout: TrainingLayout, split: LayerSplit, job: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    if layout.pipeline > 1 and layout.zero_level > 1:
        raise Unsupported(
            f"DeepSpeed has no pipeline with sharding level {layout.zero_level}", hint="plan with level 1, or without a pipeline"
        )  # fmt: skip
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
    }  # fmt: skip
    if name := _optimizer(job, 2, missing):
        document["optimizer"] = {"type": name, "params": {"lr": float(job.get("learning_rate", 1e-3))}}
    if job.get("dtype") in ("bfloat16", "float16"):
        document["bf16" if job["dtype"] == "bfloat16" else "fp16"] = {"enabled": True}
    if layout.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tensor}
    if layout.pipeline > 1:
        missing.append(f"{layout.pipeline} pipeline stages: not in the configuration, see what to add")
        topology = f"PipeModelDataParallelTopology(num_pp={layout.pipeline}, num_mp={layout.tensor}, num_dp={layout.data})"
        to_add.append(f"PipelineModule(num_stages={layout.pipeline}, topology={topology})")
        if split.torn or len(set(split.counts)) > 1:
            missing.append(f"stages of {', '.join(map(str, split.counts))} blocks: PipelineModule divides by count, by parameters or by a pattern")
    for degree, name in ((layout.context, "context"), (layout.expert, "expert")):
        if degree > 1:
            missing.append(f"{name} parallelism of degree {degree}")
    if layout.sequence:
        missing.append("sequence parallelism between tensor-parallel regions")
    if job.get("seed"):
        missing.append(f"the seed {job['seed']}")
    to_add.append(f"deepspeed on {layout.ranks} processes, with the model and its data")
    return json.dumps(document, indent=2) + "\n", missing, to_add
