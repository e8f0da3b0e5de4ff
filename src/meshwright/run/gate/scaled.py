"""A copy of a plan that is cheap to compare: the same classes and the same kinds of cuts, with fewer layers, narrower, on fewer samples and replicas.

A model by its configuration is made anew from a smaller one (`capture.hf_smaller`), which divides over the plan's tensor-parallel ranks and stages as
it does; any other model is its owner's own, with fewer and smaller micro-batches. The copy is planned anew with the plan's degrees (two replicas at
most), sharding level, schedule and rule of recomputation. What is not copied: where stages and buckets end, unlike shares of unlike devices, which
collective algorithms are used, and steps planned by storage. Those are proved by the plan's checker alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...capture.hf import DEFAULT_LENGTH, config_of
from ...capture.hf_smaller import smaller_config
from ...capture.precision import capture_and_trace_job
from ...decide.layout.tensor_shares import TensorOptions
from ...drive.training.collective_choice import CollectivesWanted
from ...drive.training.pipeline import PipelineWanted
from ...drive.training.recompute import RecomputeWanted
from ...drive.training.sharding import ShardingWanted
from ...drive.training.training import plan_training
from ...drive.training.wishes import LayoutWanted
from ...errors import MissingExtra, UnknownName
from ...fabric.fabric import Fabric
from ...graph.model_names import PREFIX, hf_name
from ...job import Training
from ...plan.plan import Plan, TrainingLayout
from ..calibrate.transport import laptop_shape

__all__ = ["ScaledDown", "scaled_down"]

MAX_REPLICAS = 2
SAMPLES = 2  # of a micro-batch: of one, some classes are traced in another way
MAX_LENGTH = 32  # tokens, at least two per tensor-parallel rank
PEAK_FLOPS = 10**12  # per second, of a device of the copy
RULES = ("none", "selective", "full")


@dataclass(frozen=True)
class ScaledDown:
    """`said`: what of it is smaller than the plan's own. `data`: what its batches are taken from; "" for the plan's. `traced`: what it was planned
    from, so that it need not be traced again."""

    plan: Plan
    said: str
    data: str
    traced: Any = None


def scaled_down(plan: Plan, folder: Path) -> ScaledDown:
    """`folder`: for the smaller configuration, which the copy's model is named after.

    Raises: Unsupported, UsageError, Infeasible, CaptureError and the like where there is no copy that is planned in the same way.
    """
    layout = plan.layout
    assert layout is not None
    job = msgspec.convert(plan.job["training"], Training)
    model, smaller = _smaller_model(job.model, layout, folder, job.sizes[0][0] if job.sizes and len(job.sizes[0]) == 1 else 0)
    replicas, samples = min(layout.data, MAX_REPLICAS), SAMPLES
    count = min(layout.microbatches_of(0), 2 * len(layout.stages))
    smoothing: Literal["torch", "megatron"] = "megatron" if any(x.smoothing == "megatron" for x in layout.losses) else "torch"
    tensor = TensorOptions(sequence=layout.sequence, smoothing=smoothing)
    sizes = msgspec.UNSET if model else job.sizes  # a smaller model's name has its length
    smaller_job = msgspec.structs.replace(job, model=model or job.model, global_batch=replicas * samples * count, sizes=sizes)
    graph, traced = capture_and_trace_job(smaller_job, samples)  # of this one micro-batch: other sizes are not asked for
    copied = plan_training(
        smaller_job, _fabric(replicas * layout.tensor * layout.pipeline), graph=graph,
        wishes=(
            LayoutWanted(data=replicas, tensor=layout.tensor, pipeline=layout.pipeline, microbatch=samples, tensor_options=tensor),
            ShardingWanted(level=layout.zero_level, overlap=layout.overlap), _schedule(plan), RecomputeWanted(_rule(plan, layout)),
            CollectivesWanted("ring"),
        ),
        without=("division",),
    )  # fmt: skip
    said = [*smaller, f"{replicas * samples * count} samples of {layout.global_batch}"]
    if replicas < layout.data:
        said.append(f"{replicas} replicas of {layout.data}")
    return ScaledDown(copied, ", ".join(said), "synthetic" if model else "", traced)


def _fabric(devices: int) -> Fabric:
    """Nobody asks how fast the copy is; peaks are stated so that its bound, and so its plan, can be proved at the first attempt."""
    shape = laptop_shape(devices)
    return replace(shape, devices=tuple(replace(d, flops=dict.fromkeys(("fp32", "bf16", "fp16"), PEAK_FLOPS)) for d in shape.devices))


def _smaller_model(model: str, layout: TrainingLayout, folder: Path, length: int) -> tuple[str, list[str]]:
    """(the name of a smaller model, "" where there is none; what is smaller). `length`: of sequences, 0: as the name says."""
    name = hf_name(model)
    if name is None:
        return "", []
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", extra="hf", needed_for="a model by its configuration") from None
    fields = config_of(name.config.read_bytes(), str(name.config))
    if fields["model_type"] not in transformers.CONFIG_MAPPING:
        raise UnknownName(f"transformers {transformers.__version__} has no model type {fields['model_type']!r}", where=str(name.config))
    whole: dict[str, Any] = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields).to_dict()
    old = length or name.length or DEFAULT_LENGTH
    length = min(old, max(MAX_LENGTH, 2 * layout.tensor))
    smaller, said = smaller_config(whole, split=layout.tensor, stages=len(layout.stages), length=length)
    place = folder / "config.json"
    place.write_text(json.dumps({**smaller, "architectures": fields.get("architectures")}, default=str))
    kind = f":{name.kind}" if name.kind else ""
    return f"{PREFIX}{place}{kind}@{length}", [*said, f"{length} tokens of {old}"]


def _schedule(plan: Plan) -> PipelineWanted:
    entry = plan.decisions.get("pipeline", {})
    asked = entry.get("options", {}).get("asked", "1f1b")
    if asked == "auto":
        return PipelineWanted(name=entry["strategy"] if entry["strategy"] != "onefoneb" else "1f1b")
    return PipelineWanted(name=asked, options=entry.get("options", {}).get("asked_options", {}))


def _rule(plan: Plan, layout: TrainingLayout) -> str:
    rule = str(plan.decisions.get("recompute", {}).get("options", {}).get("policy", "none"))
    if rule in RULES:
        return rule
    return "full" if any(s.computed_again() for s in layout.segments) else "none"
