"""Wrong programs, made from right ones: a test instrument for anyone who writes a planner or a checker.

    for m in mutants(program, np.random.default_rng(0), per_operator=5):
        assert not check_program(m.program).ok or equivalent(m.program, program)

An operator changes one thing at a random place where it applies. Mutants are not validated: many break the tables' own rules. Some
mean the same as the original (a deeper channel than needed made shallower); telling those apart is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..program.program import Part, Program
from . import mutate_order as order
from . import mutate_values as values
from .mutate_values import Rng

__all__ = ["OPERATORS", "Mutant", "mutants", "mutate"]

Operator = Callable[[Program, Rng], "tuple[Program, str] | None"]


@dataclass(frozen=True)
class Mutant:
    operator: str
    what: str
    program: Program


def mutate(program: Program, operator: str, rng: Rng) -> Mutant | None:
    """One mutant, or None where the operator does not apply. Raises KeyError for an operator that does not exist."""
    made = OPERATORS[operator](program, rng)
    return Mutant(operator, made[1], made[0]) if made is not None else None


def mutants(program: Program, rng: Rng, *, per_operator: int) -> Iterator[Mutant]:
    """Up to `per_operator` different mutants of every operator, in the operators' order."""
    for name in OPERATORS:
        seen: set[str] = set()
        for _ in range(3 * per_operator):
            made = mutate(program, name, rng)
            if made is not None and made.what not in seen and len(seen) < per_operator:
                seen.add(made.what)
                yield made


OPERATORS: Mapping[str, Operator] = {
    "drop step": order.drop_step,
    "duplicate step": order.duplicate_step,
    "swap adjacent steps": order.swap_adjacent,
    "swap two receives": order.swap_receives,
    "move step to another lane": order.move_step,
    "drop after edge": order.drop_after,
    "add reversed after edge": order.reverse_after,
    "raise lag": lambda p, rng: order.change_lag(p, rng, 1),
    "lower lag": lambda p, rng: order.change_lag(p, rng, -1),
    "redirect send": lambda p, rng: values.redirect(p, rng, Part.SEND, "chan_out", "src"),
    "redirect receive": lambda p, rng: values.redirect(p, rng, Part.RECV, "chan_in", "dst"),
    "shift source chunk": lambda p, rng: values.shift_chunk(p, rng, "src"),
    "shift destination chunk": lambda p, rng: values.shift_chunk(p, rng, "dst"),
    "wrong source buffer": lambda p, rng: values.wrong_buffer(p, rng, "src"),
    "wrong destination buffer": lambda p, rng: values.wrong_buffer(p, rng, "dst"),
    "reduce becomes copy": values.reduce_to_copy,
    "copy becomes reduce": values.copy_to_reduce,
    "fused step keeps nothing": values.drop_part,
    "change count": values.change_count,
    "lower depth": values.lower_depth,
    "change channel end": values.change_channel_end,
    "shrink buffer": values.shrink_buffer,
    "alias two buffers": values.alias_buffers,
    "shorten lifetime": values.shorten_life,
    "lower window": values.change_window,
    "change repeat": values.change_repeat,
    "drop backward": order.drop_backward,
    "double accumulate": order.double_accumulate,
    "drop accumulate": values.drop_accumulate,
    "wrong part": values.wrong_part,
    "wrong micro-batch": values.wrong_microbatch,
    "skip optimizer read": values.skip_optimizer_read,
    "drop write": values.drop_write,
    "drop call of a member": order.drop_call_member,
    "swap calls": order.swap_calls,
    "call on wrong buffer": values.wrong_bind,
}
