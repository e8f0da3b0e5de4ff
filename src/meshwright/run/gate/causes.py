"""Why a plan's step is not its owner's, by trial: what else would have given the plan's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Choice, Hint
from ...plan.batch_statistics import BATCH_NORM
from ..steps.forward_graph import ForwardGraph, ForwardNode

__all__ = [
    "Cause", "adds_samples_up", "batch_statistics", "described", "follows_rounding", "keeps_state", "mixes_samples", "of_no_number", "of_outside",
    "of_the_optimizer", "of_the_plan", "random_numbers",
]  # fmt: skip

BATCH_NORMS = ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_native_batch_norm_legit_functional")

STATE_IT = Hint(
    "state that it is meant with {}, or plan one micro-batch in all ({}, {} as large as the global batch)",
    Choice("stated.batch_statistics", "local"), Choice("data", 1), Choice("microbatch"),
)  # fmt: skip
SHARE_IT = Hint(
    f"plan with {{}}, so that data replicas share the batch (one micro-batch in each); or {STATE_IT.text}",
    Choice("recipe.batch_statistics", "global"), *STATE_IT.choices,
)  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """`name`: for scripts; `said`: the sentence; `hint`: what to do; `node`: the call that is to blame, where one is."""

    name: str
    said: str
    hint: str | Hint
    node: str = ""


def batch_statistics(graph: ForwardGraph) -> list[ForwardNode]:
    """Calls that normalise by the batch they see."""
    found = [n for n in graph.nodes if n.target.startswith("aten.") and n.target.split(".")[1] in BATCH_NORMS]
    return [n for n in found if _training(n)]


def _training(node: ForwardNode) -> bool:
    place = 3 if node.target.split(".")[1] == "_native_batch_norm_legit" and node.target.endswith("no_stats") else 5
    return bool(node.args[place]) if len(node.args) > place else bool(node.kwargs.get("training", True))


def mixes_samples(graph: ForwardGraph, mixing: ForwardNode | None, buffer: str = "", shared: bool = False) -> Cause:
    """The owner's module gives the plan's numbers micro-batch by micro-batch. `mixing`: the first call that brings samples together; `buffer`: where
    nothing but a buffer differs; `shared`: though replicas share what can be shared."""
    norms = batch_statistics(graph)
    if norms:
        what = f"batch statistics: {norms[0].target.split('.')[1]} of {_place(graph, norms[0].name)} normalises by the micro-batch it sees"
        return Cause("batch-statistics", what, SHARE_IT if all(n.target == BATCH_NORM for n in norms) else STATE_IT, norms[0].name)
    if buffer:
        module, operators = described(graph, buffer)
        what = f"{' and '.join(operators[:2]) or 'what changes it'} in module {module!r} keeps in it what depends on the whole micro-batch"
    else:
        what = "the loss depends on what else is in its micro-batch: a mean over a count that differs, a contrast or a balance within the batch"
        if mixing is not None:
            what += f"; {mixing.target} in {_place(graph, mixing.name)} brings samples together first"
    hint, node = (STATE_IT if shared or mixing is None else SHARE_IT), mixing.name if mixing is not None else ""
    return Cause("batch-statistics", what, hint, node)


def adds_samples_up(microbatches: int) -> Cause:
    """The loss of the whole batch is that of its micro-batches together."""
    what = f"the loss is a sum over samples inside of what is kept whole: the plan takes the mean over its {microbatches} micro-batches"
    hint = Hint(
        'let it be a mean over samples (reduction="mean"), or plan one micro-batch in all ({}, {} as large as the global batch)',
        Choice("data", 1), Choice("microbatch"),
    )  # fmt: skip
    return Cause("sum-over-samples", what, hint)


def keeps_state(graph: ForwardGraph, buffer: str) -> Cause:
    """Every micro-batch by itself is as in the whole batch, from the buffers that the step begins with."""
    module, operators = described(graph, buffer)
    what = f"every forward pass changes buffer {buffer!r}, which the loss of the next depends on ({' and '.join(operators[:2])} in module {module!r})"
    return Cause("batch-statistics", what, STATE_IT)


def _place(graph: ForwardGraph, node: str) -> str:
    module = graph.modules.get(node, "")
    return "the loss" if module == "loss" else f"module {module!r}" if module else "the model"


def random_numbers(opaque: bool) -> Cause:
    what = "random numbers of a model that could not be traced" if opaque else "random numbers other than dropout's"
    hint = Hint("state that it is meant with {}, or take them as an input", Choice("stated.dropout", "local"))
    return Cause("random-streams", f"{what} are drawn anew in every micro-batch", hint)


def of_no_number(what: str, value: float) -> Cause:
    hint = "compare on a batch of which all is a number (mend the module, or give other samples): what is none spreads here and not there"
    return Cause("no-number", f"the owner's own {what} of this batch is {value:g}, which says nothing of a plan", hint)


def of_outside() -> Cause:
    what = "the owner's own step is another one each time, with the same random numbers: it reads or changes something outside the module"
    return Cause("outside", what, "keep what changes in the module's buffers, and what it reads in its inputs")


def of_the_optimizer(name: str) -> Cause:
    hint = Hint("plan with {}, {} and {}", Choice("tensor", 1), Choice("pipeline", 1), Choice("zero", 0))
    return Cause("optimizer", f"gradients are equal; optimizer {name} looks beyond what a rank gives it", hint)


def follows_rounding(name: str, parameter: str, jitter: float) -> Cause:
    what = f"changed by {jitter:.0e}, they move {parameter!r} elsewhere in the owner's own step too"
    hint = Hint("its runs are not reproducible in any layout: make the update well conditioned, or train with {}", Choice("compare", False))
    return Cause("optimizer", f"gradients are equal but for rounding, which optimizer {name} follows: {what}", hint)


def of_the_plan(graph: ForwardGraph, name: str) -> Cause:
    return Cause(
        "operator", "neither the whole batch nor its micro-batches give the plan's numbers in the owner's module",
        Hint("plan without splitting the module ({}, or {} alone), and report it: this is a fault of meshwright", Choice("tensor", 1), Choice("data"))
        if described(graph, name)[1] else "report it: this is a fault of meshwright",
    )  # fmt: skip


def described(graph: ForwardGraph, name: str) -> tuple[str, list[str]]:
    """(module, operators) that use a parameter or buffer."""
    users = [n for n in graph.nodes if f"param:{name}" in n.inputs or f"buffer:{name}" in n.inputs]
    module = graph.modules.get(users[0].name, "") if users else name.rpartition(".")[0]
    return module, [n.target for n in users[:4]]
