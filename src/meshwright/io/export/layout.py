"""A training plan in the words of other systems: the list of exporters, and what they all do.

What a target cannot express is named, never dropped: `Exported.not_expressed`. The rank order of targets with a layout is ours (tensor innermost,
then data, then pipeline), so placements carry over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UsageError
from . import deepspeed, kubernetes, megatron, nccl, nemo, skypilot, slurm, torch_script, torchtitan, torchtitan_toml
from .exported import Exported, Exporter
from .shared import in_no_words, layer_split, subject_of

if TYPE_CHECKING:
    from ...plan.plan import Plan

__all__ = ["EXPORTERS", "TARGETS", "export_layout", "layer_split"]

EXPORTERS: tuple[Exporter, ...] = (
    torchtitan.EXPORTER, torchtitan_toml.EXPORTER, megatron.EXPORTER, nemo.EXPORTER, deepspeed.EXPORTER, torch_script.EXPORTER, slurm.EXPORTER,
    kubernetes.JOBSET, kubernetes.KUEUE, skypilot.EXPORTER, nccl.EXPORTER,
)  # fmt: skip
TARGETS: tuple[str, ...] = tuple(e.name for e in EXPORTERS)


def export_layout(plan: Plan, target: str) -> Exported:
    """Raises: UsageError for a plan without a training layout or an unknown target; Unsupported for what an exporter refuses itself."""
    subject = subject_of(plan)
    exporter = next((e for e in EXPORTERS if e.name == target), None)
    if exporter is None:
        raise UsageError(f"cannot export to {target!r}", hint=f"one of: {', '.join(TARGETS)}")
    text, missing, to_add = exporter.write(subject)
    missing += in_no_words(subject, exporter)
    return Exported(target, exporter.version, text, tuple(dict.fromkeys(missing)), tuple(to_add))
