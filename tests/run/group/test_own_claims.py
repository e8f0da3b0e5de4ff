"""What a rank says of its own exception: its own fault, unless a typed error knows whose it is; what is no class of a group is a failure."""

from __future__ import annotations

from meshwright.errors import MessageDamaged, UsageError
from meshwright.run.group.health import claim_of
from meshwright.run.group.verdict import Claim

NAMES = (4, 7, 9)  # of the world, by rank of the group


def test_an_exception_is_its_ranks_own_by_the_name_in_the_world() -> None:
    found = claim_of(ValueError("a  long\ntext " + "x" * 600), 1, NAMES, "all_reduce")
    assert (found.code, found.rank, found.peer, found.step, found.hint) == ("rank-failed", 1, -1, -1, "see the output of rank 7")
    assert found.message.startswith("rank 7 failed in all_reduce: ValueError: a long text xx") and len(found.message) < 600


def test_a_typed_error_says_whose_fault_it_is() -> None:
    damaged = MessageDamaged("is not what was sent", where="link", hint="look", data={"group_rank": 0, "group_peer": 2, "step": 5})
    assert claim_of(damaged, 1, NAMES, "x") == Claim(
        code="message-damaged", message="is not what was sent", rank=0, peer=2, step=5, where="link", hint="look"
    )
    refused = UsageError("no such option", where="here")
    assert claim_of(refused, 1, NAMES, "x") == Claim(code="rank-failed", message="no such option", rank=1, where="here")
