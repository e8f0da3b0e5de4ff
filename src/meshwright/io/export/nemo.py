"""NeMo 2's strategy and data settings in Python; NeMo hands them to megatron-core, so what Megatron has no words for it has none for either."""

from __future__ import annotations

from typing import Any

from .exported import Exporter, Subject, Written
from .megatron import EXPORTER as MEGATRON
from .megatron import optimizer_words
from .shared import clip_norm, optimizer_name, precision

__all__ = ["EXPORTER"]


def write(subject: Subject) -> Written:
    layout = subject.layout
    _, missing, _ = MEGATRON.write(subject)
    strategy: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor, "pipeline_model_parallel_size": layout.pipeline, "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert_ranks, "sequence_parallel": layout.sequence,
    }  # fmt: skip
    strategy |= {"expert_tensor_parallel_size": 1} if layout.expert_ranks > layout.expert else {}
    counts = subject.split.counts
    if layout.pipeline > 1 and len(set(counts)) > 1:
        missing.append(f"stages of {', '.join(map(str, counts))} blocks: the strategy divides evenly")
    if layout.zero_level > 1:
        missing.append(f"sharding level {layout.zero_level}: written as level 1, the distributed optimizer")
    if layout.bucket_bytes:
        missing.append(f"buckets of {layout.bucket_bytes} bytes")
    rule, calls = subject.again
    granularity = "" if not calls else "selective" if rule == "selective" else "full"
    recompute = f"# in the model's config: recompute_granularity={granularity!r}\n" if calls else ""
    ddp = {"use_distributed_optimizer": layout.zero_level > 0, "overlap_grad_reduce": layout.overlap}
    computes, _ = precision(subject.job)
    kind = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}.get(computes, "32")
    adam = {"optimizer": optimizer_name(subject.job, 1, []), "lr": float(subject.job.get("learning_rate", 1e-3)), **optimizer_words(subject.job)}
    adam |= {"bf16": computes == "bfloat16", "fp16": computes == "float16", "clip_grad": clip_norm(subject.job)}
    adam["use_distributed_optimizer"] = layout.zero_level > 0
    lines = "".join(f"    {k}={v!r},\n" for k, v in strategy.items())
    text = (
        f'"""Layout of a plan by meshwright, for NeMo 2 (nemo.lightning) on {layout.ranks} GPUs."""\n\n'
        "from megatron.core.distributed import DistributedDataParallelConfig\nfrom megatron.core.optimizer import OptimizerConfig\n"
        "from nemo import lightning as nl\n\n"
        f"strategy = nl.MegatronStrategy(\n{lines}    ddp=DistributedDataParallelConfig({', '.join(f'{k}={v!r}' for k, v in ddp.items())}),\n)\n"
        f"trainer = nl.Trainer(devices={subject.per_node}, num_nodes={len(subject.nodes)}, accelerator='gpu', strategy=strategy,\n"
        f"    plugins=nl.MegatronMixedPrecision(precision={kind!r}))\n"
        f"optimizer = nl.MegatronOptimizerModule(config=OptimizerConfig({', '.join(f'{k}={v!r}' for k, v in adam.items() if v != '')}))\n"
        f"data_settings = dict(micro_batch_size={layout.microbatch_size}, global_batch_size={layout.global_batch})  # for the data module\n"
        f"{recompute}"
    )
    return text, missing, ["the model and its data module"]


EXPORTER = Exporter(
    name="nemo", version="NeMo 2.7.3, the parameters in its source (NeMo 3 has no such strategy); not run", write=write, own_models=True,
    says=MEGATRON.says,
)  # fmt: skip
