"""Megatron-LM's arguments, one a line, for the shell.

Megatron knows recomputation of core attention (`selective`) and of whole layers (`full`), for all stages alike.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from .exported import Exporter, Subject, Written
from .shared import clip_norm, context_exchange, optimizer_name, optimizer_numbers, precision

__all__ = ["EXPORTER", "optimizer_words"]

_RECOMPUTE: dict[str, list[Sequence[str]]] = {
    "selective": [("--recompute-granularity", "selective"), ("--recompute-modules", "core_attn")],
    "full": [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")],
}


def write(subject: Subject) -> Written:
    layout, split, job = subject.layout, subject.split, subject.job
    missing: list[str] = []
    flags: list[Sequence[str]] = [
        ("--tensor-model-parallel-size", str(layout.tensor)), ("--pipeline-model-parallel-size", str(layout.pipeline)),
        ("--context-parallel-size", str(layout.context)), ("--micro-batch-size", str(layout.microbatch_size)),
        ("--global-batch-size", str(layout.global_batch)), ("--lr", repr(float(job.get("learning_rate", 1e-3)))), ("--seed", str(job.get("seed", 0))),
        ("--clip-grad", repr(clip_norm(job))),
    ]  # fmt: skip
    if exchange := context_exchange(subject):
        flags.append(("--cp-comm-type", "a2a" if exchange == "ulysses" else "p2p"))
    if layout.expert > 1:
        flags.append(("--expert-model-parallel-size", str(ranks := layout.expert_ranks)))
        flags += [("--expert-tensor-parallel-size", "1")] if ranks > layout.expert else []  # experts are divided whole
        missing.append("which exchange and capacity experts have: --num-experts and --moe-... are of your model")
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
    if name := optimizer_name(job, 1, missing):
        flags.append(("--optimizer", name))
        flags += [(f"--{word.replace('_', '-')}", repr(value)) for word, value in optimizer_words(job).items()]
    computes, _ = precision(job)
    if computes != "float32":
        flags.append(("--bf16" if computes == "bfloat16" else "--fp16",))
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
    rule, calls = subject.again
    if calls:
        flags += _RECOMPUTE.get(rule, _RECOMPUTE["full"])
        if rule not in _RECOMPUTE:
            said = "written as full recomputation of every layer, which keeps no more"
            missing.append(f"which {calls} calls run again in backward, by stage: {said}")
    text = " \\\n".join(" ".join(shlex.quote(x) for x in flag) for flag in flags) + "\n"
    sizes = "sizes of the model (--hidden-size, --num-attention-heads, --seq-length, ...), data, --train-iters"
    return text, missing, [sizes, f"torchrun on {layout.ranks} processes"]


def optimizer_words(job: Mapping[str, Any]) -> dict[str, float]:
    """The optimizer's numbers by megatron-core's names (OptimizerConfig), which are those of its options."""
    found: dict[str, float] = {}
    for name, value in optimizer_numbers(job).items():
        if name == "betas":
            found |= {"adam_beta1": value[0], "adam_beta2": value[1]}
        else:
            found[{"eps": "adam_eps", "momentum": "sgd_momentum"}.get(name, name)] = value
    return found


EXPORTER = Exporter(
    name="megatron", version="Megatron-LM d98e8a6 (megatron-core 0.20.0), names in its source", write=write, own_models=True,
    says=frozenset({"precision", "clip_norm"}),
)  # fmt: skip
