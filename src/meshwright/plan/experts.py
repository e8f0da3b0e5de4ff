"""Expert parallelism: neighbouring data replicas that divide the experts of a layer, and send each other their tokens. Names, without torch.

Of n neighbours, rank r holds experts r E/n up to (r+1) E/n of every layer of E. Expert layer M (`meshwright.expert_mlp`) of a captured graph reads
buffers with a part for every expert. `M/rows` and `M/counts` hold what came of the others' buffers and of their filled rows, `M/back` what came back
of M. Each is an exchange in equal blocks, block i for rank i. Gradients go the other way. Of rows, messages carry only the filled ones, whose numbers
have travelled before (`counts`): their sizes are symbols `filled:<exchange>:<member with the experts>`. Buffers have room for all.

Ranks that divide positions (`plan.context`) are replicas too: neighbours among them may belong to one group of them, to a part of it, or to several.
Each then has the tokens of its positions, and nothing else changes.

Replicas of the same experts add up their gradients, data / n of them (expert-data parallelism), which lie in buffers of their own: `gradients%`, with
buckets `gradients@<number>%`. At sharding levels above 0 these replicas divide experts' state among them, and all replicas divide the rest.
The gradient of an expert sums over the tokens of all n neighbours, because that of every token comes back to its expert.
Parts of a pack of embedding tables (`plan.packing`) are divided in the same way, with whole blocks.
Cite: D. Lepikhin and others, "GShard" (arXiv 2006.16668), section 3.2.
"""

from __future__ import annotations

from ..cite import Cite
from .packing import TABLE_IDS, TABLE_ROWS

__all__ = [
    "BACK", "COUNTS", "EXPERTS", "EXPERT_GRADIENTS", "FILLED", "GIVEN", "GSHARD", "INCOMING", "MLP", "ROWS", "SLOTS", "TOKENS", "of_experts",
]  # fmt: skip

GSHARD = Cite(
    key="lepikhin2020gshard", title="GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", year=2020,
    venue="ICLR '21, arXiv:2006.16668",
)  # fmt: skip
ROWS, COUNTS, MLP = "meshwright.expert_rows.default", "meshwright.expert_counts.default", "meshwright.expert_mlp.default"
EXPERTS = (ROWS, COUNTS, MLP, TABLE_IDS, TABLE_ROWS)  # what blocks go into and come out of; those of tables too
TOKENS = "meshwright.expert_sums.default"  # makes tokens of rows again
# Of layers with copies of experts (`plan.copies`): M/slots says where each choice goes, M/given holds the weights that others get.
SLOTS, GIVEN = "meshwright.expert_slots.default", "meshwright.expert_given.default"
INCOMING, BACK = ("counts", "rows"), "back"  # what is exchanged before a layer's experts, counts first, and after them
FILLED = "filled:"  # begins names of sizes of messages that carry the filled rows of a block of buffers
EXPERT_GRADIENTS = "%"  # in names of gradient buffers: those of experts that a rank shares with some of its data replicas only


def of_experts(group: str) -> bool:
    """Whether a gradient buffer, or the group of parameters behind it, is of experts that replicas divide."""
    return group.partition(":")[0].endswith(EXPERT_GRADIENTS)
