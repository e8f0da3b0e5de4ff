"""What a plan recomputes, in the words of other systems.

Megatron-LM knows core attention (`selective`) and whole layers (`full`) for all stages alike; torchtitan whole layers (its own selective modes
keep other results than core attention's); DeepSpeed leaves it to the model's code. A choice per stage and call has no words in any of them.
"""

from __future__ import annotations

from dataclasses import replace

from ...plan.plan import Plan
from .exported import Exported

__all__ = ["with_recomputation"]

_MEGATRON = {
    "selective": ["--recompute-granularity selective", "--recompute-modules core_attn"],
    "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
}


def with_recomputation(made: Exported, plan: Plan) -> Exported:
    """The export with the plan's recomputation; unchanged where it recomputes nothing."""
    layout = plan.layout
    if layout is None or not any(s.recompute or s.step is not None for s in layout.segments):
        return made
    rule = str(plan.decisions.get("recompute", {}).get("strategy", "optimal"))
    text, missing, to_add = made.text, list(made.not_expressed), list(made.to_add)
    calls = sum(len(names) for s in layout.segments for names in s.computed_again())
    calls += sum(len(s.step.plan.actions) - len({a.node for a in s.step.plan.actions}) for s in layout.segments if s.step is not None)
    own = f"which {calls} calls run again in backward, by stage"
    if made.target == "megatron":
        flags = _MEGATRON.get(rule, _MEGATRON["full"])
        text = " \\\n".join([text.rstrip("\n"), *flags]) + "\n"
        if rule not in _MEGATRON:
            missing.append(f"{own}: written as full recomputation of every layer, which keeps no more")
    elif made.target == "torchtitan":
        text += '\n[activation_checkpoint]\nmode = "full"\n'
        if rule != "full":
            missing.append(f"{own}: written as full, which keeps no more; its selective modes keep other results")
    else:
        to_add.append("deepspeed.checkpointing.checkpoint around every layer in the model's forward (recomputes all of it)")
        missing.append(f"{own}: recomputation is not in the configuration")
    return replace(made, text=text, not_expressed=tuple(missing), to_add=tuple(to_add))
