"""Names that other tools have for options: Megatron-LM, DeepSpeed, torchtitan, vLLM, transformers. For hints only; no command takes them."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["ours"]

_OTHERS = {
    "--tp": ("tensor-parallel", "tensor-model-parallel-size", "tensor-parallel-size", "tensor-parallel-degree", "tp-size", "tp-degree"),
    "--pp": ("pipeline-parallel", "pipeline-model-parallel-size", "pipeline-parallel-size", "pipeline-parallel-degree", "pp-size", "stages"),
    "--dp": ("data-parallel", "data-parallel-size", "data-parallel-degree", "data-parallel-replicate-degree", "dp-size", "replicas"),
    "--ep": ("expert-parallel", "expert-model-parallel-size", "expert-parallel-size", "ep-size"),
    "--context": ("cp", "context-parallel", "context-parallel-size", "context-parallel-degree"),
    "--microbatch": ("micro-batch-size", "micro-batch", "per-device-train-batch-size", "local-batch-size"),
    "--global-batch": ("global-batch-size", "batch-size", "batch", "train-batch-size"),
    "--seq-len": ("seq-length", "sequence-length", "max-seq-len", "max-length", "max-model-len"),
    "--zero": ("zero-stage", "fsdp", "use-distributed-optimizer"),
    "--fabric": ("cluster", "topology", "hardware", "nodes"),
    "--learning-rate": ("lr",),
    "--out": ("output-file", "save"),
}  # fmt: skip


def ours(name: str, known: Collection[str]) -> str:
    """The option of ours that another tool's name means, where the command has it; else the name itself."""
    plain = name.removeprefix("--").replace("_", "-").casefold()
    return next((option for option, others in _OTHERS.items() if plain in others and option in known), name)
