"""What exporters share: which blocks lie on which stage, the optimizer's name, and what no target has words for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .exported import Exporter, LayerSplit, Subject

if TYPE_CHECKING:
    from ...plan.plan import Plan, TrainingLayout

__all__ = [
    "clip_norm", "context_exchange", "in_no_words", "layer_split", "optimizer_name", "optimizer_numbers", "precision", "stage_modules", "subject_of",
]  # fmt: skip

_NUMBERED = re.compile(r"^(.*?)\.(\d{1,6})\.")
# What torch.optim takes where the plan says nothing. Other tools take other numbers, so these are always written.
_NUMBERS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}, "sgd": {"weight_decay": 0.0, "momentum": 0.0},
}  # fmt: skip
_OPTIMIZERS = {"adamw": ("AdamW", "adam", "AdamW"), "sgd": ("", "sgd", "SGD")}  # torchtitan (it has no SGD), Megatron, torch and DeepSpeed


def subject_of(plan: Plan) -> Subject:
    """Raises: UsageError for a plan without a training layout."""
    from ...plan.forward_again import run_again

    if plan.layout is None or plan.kind != "training":
        raise UsageError("only training plans have a layout", hint="see `meshwright train plan`")
    layout = plan.layout
    from ..fabric.document import fabric_from_document  # here, so that `train export --help` loads little

    devices = fabric_from_document(dict(plan.target_fabric)).devices if "schema" in plan.target_fabric else ()
    group = {d.name: d.group or d.name for d in devices}
    servers = [group.get(str(device), str(device)) for device in plan.placement]
    nodes = {server: servers.count(server) for server in dict.fromkeys(servers)}
    in_order = servers == [server for server, count in nodes.items() for _ in range(count)]
    again = ("", 0)
    if any(s.recompute or s.step is not None for s in layout.segments):
        calls = sum(len(names) for s in layout.segments for names in s.computed_again())
        calls += sum(len(s.step.plan.actions) - len({a.node for a in s.step.plan.actions}) for s in layout.segments if s.step is not None)
        again = (str(plan.decisions.get("recompute", {}).get("strategy", "optimal")), calls)
    if twice := run_again(layout):  # what frameworks call full
        again = ("full", again[1] + sum(len(s.nodes) for s in layout.segments if s.key in twice))
    return Subject(plan, layout, layer_split(layout), plan.job.get("training", {}), nodes or {"node0": layout.ranks}, in_order, again)


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


def stage_modules(split: LayerSplit, head: str) -> list[list[str]]:
    """Modules of every stage by torchtitan's names for them: tok_embeddings, layers.N, norm and `head`."""
    parts = [[f"layers.{b}" for b in blocks] for blocks in split.blocks]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def optimizer_name(job: Mapping[str, Any], column: int, missing: list[str]) -> str:
    from ...plan.optimizers import named  # here, so that `train export --help` loads little

    asked = named(str(job.get("optimizer", "adamw")), where="plan.job.training.optimizer")
    name = asked.name.lower() if not asked.is_function else asked.name
    missing += [f"the optimizer's {k}={v}" for k, v in asked.options.items() if k not in _NUMBERS.get(name, {})]
    found = _OPTIMIZERS.get(name, ("", "", ""))[column]
    if not found:
        missing.append(f"the optimizer {name}")
    return found


def optimizer_numbers(job: Mapping[str, Any]) -> dict[str, Any]:
    """weight_decay, and betas and eps or momentum, as the plan trains; nothing for an optimizer that `optimizer_name` does not know."""
    from ...plan.optimizers import named  # here, so that `train export --help` loads little

    asked = named(str(job.get("optimizer", "adamw")), where="plan.job.training.optimizer")
    usual = _NUMBERS.get(asked.name.lower(), {}) if not asked.is_function else {}
    return usual | {k: v for k, v in asked.options.items() if k in usual}


def precision(job: Mapping[str, Any]) -> tuple[str, bool]:
    """(type in which forward computes: float32, bfloat16 or float16; whether weights are of it, too)."""
    kind = str(job.get("dtype") or "float32")
    under = dict(job.get("recipe", {})).get("precision", "fp32")
    return {"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}.get(under, kind), kind != "float32"


def clip_norm(job: Mapping[str, Any]) -> float:
    """0 where gradients are not clipped by norm. Tools that clip without being asked must be told so."""
    return float(dict(job.get("recipe", {})).get("clip_norm", 0.0))


def context_exchange(subject: Subject) -> str:
    """ring, ring-again or ulysses; nothing where sequences are whole."""
    return str(subject.plan.decisions.get("context", {}).get("strategy", "ring")) if subject.layout.context > 1 else ""


def in_no_words(subject: Subject, exporter: Exporter) -> list[str]:
    """What a target cannot be told, whichever it is; nothing for a launcher, which starts the plan as it is."""
    if exporter.launches:
        return []
    layout, split, job, found = subject.layout, subject.split, subject.job, []
    if exporter.own_models:
        modules = list(dict.fromkeys([*(x for names in split.others for x in names), *([f"{split.prefix}.0"] if split.prefix else [])]))
        some = f" with modules {', '.join(modules[:4])}{' ...' if len(modules) > 4 else ''}" if modules else ""
        found.append(f"the model {job.get('model', '')}{some}: {exporter.name} trains models of its own, whose blocks take the place of yours")
    chosen = sorted(k for k in subject.plan.decisions if k.startswith("collective"))
    if chosen:
        found.append(f"collective programs ({', '.join(chosen)}): the target uses its library's own")
    if split.torn and layout.pipeline > 1:
        some = ", ".join(split.torn[:4]) + (" ..." if len(split.torn) > 4 else "")
        found.append(f"stage borders inside {some}: stages are made of whole blocks there")
    if layout.replica_microbatches:
        found.append(f"unequal numbers of micro-batches ({layout.microbatch_counts}): the target gives every replica as many")
    if layout.shards:
        found.append(f"the split of {len(layout.shards)} single parameters: the target splits its own model's layers by its own rules")
    from ...plan.context import copies_in  # loads numpy, which the list of exporters does without

    if copied := copies_in(layout):
        found.append(f"copies of hot experts in {len(copied)} layers: the target's experts are at one place each")
    found += [f"the recipe's {k}, {v}" for k, v in dict(job.get("recipe", {})).items() if k not in exporter.says]
    if subject.plan.shapes:
        count = len(subject.plan.shapes)
        found.append(f"the steps for {count} other shape{'s' * (count > 1)} of batches: the target's batches are all of the largest")
    if ":" in str(job.get("loss", "")):
        found.append(f"the loss {job['loss']}")
    if layout.schedule not in ("1f1b",):
        found.append(f"the schedule {layout.schedule!r} as planned")
    if layout.placement or layout.copy_of:
        found.append("where stages lie, and their copies: the target puts stage i on pipeline rank i")
    return found
