"""Signatures of operators on one mesh axis, from a description of what their dimensions mean.

A `Spec` names the dimensions of operands and results by letters, as einsum does. From it follow all signatures of an operator on one axis:

- a letter that the result has: operands that have it are split there, the others broadcast (`B`: their gradients are summands), the result is split;
- a letter that only operands have, summed over: they are split there, the others broadcast; the result is partial (`P`);
- an operator that is linear in some operands taken together: these partial, the others broadcast; the result is partial;
- everything complete (`R`), and everything broadcast with partial gradients (`B`): a backward is linear in the gradient that arrives.

The backward needs no table of its own: local autograd on the pieces gives for every operand the gradient in the state that
`sbp.gradient_of` names. Both are tested for every operator against the whole operator.
Source: AutoDDL's signature table and OneFlow's; deviations: `R` and `B` are told apart, dimensions in blocks, exchanges inside an
operator (`Exchange`: cross-entropy over a split vocabulary, batch norm over a split batch) are priced with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....graph.graph import OpNode

__all__ = ["Call", "Exchange", "Shape", "Signature", "Spec", "aligned", "dims_without", "expand", "letters", "replicated"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """An all-reduce inside an operator: `elements` of the whole operator, of which a rank has those of its own pieces of the dimensions `letters`."""

    elements: int
    item: int  # bytes per element
    backward: bool = False
    letters: str = ""


@dataclass(frozen=True)
class Signature:
    """Types of the operands (in `OpNode.inputs` order) and of the result on one axis. `divided`: the axis divides the operator's work.

    `letter` is the dimension that is split ("" for none); the product of all axes that split it must divide `even` (0: uneven pieces are fine).
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    divided: bool
    exchanges: tuple[Exchange, ...] = ()
    letter: str = ""
    even: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operator call as the rules see it."""

    node: OpNode
    shapes: tuple[Shape, ...]  # of the tensor operands, in `node.inputs` order
    outputs: tuple[Shape, ...]
    items: tuple[int, ...]  # bytes per element of the operands
    differentiable: tuple[bool, ...]  # per operand: whether a gradient flows into it

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument that is no tensor, by position or name."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    @property
    def has_gradient(self) -> bool:
        return any(self.differentiable)

    @property
    def rank(self) -> int:
        return len(self.outputs[0])


@dataclass(frozen=True, kw_only=True)
class Spec:
    """`operands`, `result`: letters by dimension, "." for a dimension that cannot be split.

    `summed`: letters that are summed over (means too: the executor scales them). `maximum`: letters over which a maximum is taken. `added`: operands
    added to a sum of products, such as biases. `linear`: sets of operands in which, taken together, the call is linear. `exchanges`: inside
    the call where the letter is split. `complete`: letters of which a split leaves the result complete everywhere, thanks to the
    exchanges. `even`: a split along the letter must divide the number. `extra`: signatures that letters cannot say.
    """

    operands: tuple[str, ...]
    result: str
    summed: str = ""
    maximum: str = ""
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    exchanges: Mapping[str, tuple[Exchange, ...]] = field(default_factory=dict)
    complete: str = ""
    even: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[Signature, ...] = ()


def expand(spec: Spec, call: Call, blocks: Mapping[str, Iterable[int]] | None = None) -> list[Signature]:
    """All signatures of a call on an axis, the replicated ones last. `blocks`: block counts to try per letter, beside one block."""
    count = len(spec.operands)
    found: list[Signature] = []
    for letter in dict.fromkeys(c for word in (spec.result, *spec.operands) for c in word if c != "."):
        for b in (1, *sorted((blocks or {}).get(letter, ()))):
            signature = _split(spec, call, letter, b)
            if signature is not None:
                found.append(signature)
    found += spec.extra
    for together in spec.linear:
        found.append(Signature("partial", tuple("P" if i in together else "B" for i in range(count)), "P", False))
    return found + replicated(call)


def replicated(call: Call) -> list[Signature]:
    """The signatures that every deterministic call has: kept whole, with complete or with partial gradients."""
    count = len(call.shapes)
    whole = Signature("replicate", ("R",) * count, "R", False)
    return [Signature("broadcast", ("B",) * count, "B", False), whole] if call.has_gradient else [whole]


def _split(spec: Spec, call: Call, letter: str, blocks: int) -> Signature | None:
    suffix = f"/{blocks}" if blocks > 1 else ""
    inputs = tuple(f"S{word.index(letter)}{suffix}" if letter in word else "B" for word in spec.operands)
    name = spec.names.get(letter, f"split {letter}") + (f" in {blocks} blocks" if blocks > 1 else "")
    exchanges, even = spec.exchanges.get(letter, ()), spec.even.get(letter, 0)
    if letter in spec.complete:
        return Signature(name, tuple("R" if k == "B" else k for k in inputs), "R", True, exchanges, letter, even)
    if letter in spec.result:
        return Signature(name, inputs, f"S{spec.result.index(letter)}{suffix}", True, exchanges, letter, even)
    if letter in spec.summed:
        inputs = tuple("P" if i in spec.added else k for i, k in enumerate(inputs))
        return Signature(name, inputs, "P", True, exchanges, letter, even)
    if letter in spec.maximum and not call.has_gradient:
        return Signature(name, inputs, "M", True, exchanges, letter, even)
    return None


def letters(count: int, start: str = "a") -> str:
    """The first `count` letters from `start`."""
    return "".join(chr(ord(start) + i) for i in range(count))


def dims_without(count: int, excluded: Iterable[int]) -> str:
    """Letters for `count` dimensions, "." for the excluded ones (negative numbers count from the end)."""
    out = {d % count for d in excluded} if count else set()
    return "".join("." if i in out else chr(ord("a") + i) for i in range(count))


def aligned(shapes: Sequence[Shape], result: Shape) -> tuple[str, ...]:
    """Letters of broadcasting operands: dimensions are aligned at the end, a dimension of size 1 that is stretched has none."""
    names = letters(len(result))
    found = []
    for shape in shapes:
        offset = len(result) - len(shape)
        found.append("".join(names[offset + i] if n == result[offset + i] else "." for i, n in enumerate(shape)))
    return tuple(found)
