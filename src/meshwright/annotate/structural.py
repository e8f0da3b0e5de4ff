"""Operators aligned with the module tree alone: which module ran which operator, by dynamic programming down the tree.

A class of module shows itself by certain operators (a Conv2d by `aten::conv2d`). A module's call is one stretch of such operators, in
which those of its own children lie, container after container in definition order; leaves of one class are called in definition order too,
but among the classes any order may occur (a norm defined last, a ReLU called twice). So at each module the stretch is cut into the
children's stretches such that each holds as many operators of every kind as its modules should show (`kernels.split`), and what lies in
none goes to the module's own leaves, the k-th of a class to the k-th. What no module accounts for belongs to the innermost module around
both neighbours. Nothing is greedy: a module that never ran costs something, and does not shift those after it.
Invariant: every operator is given to at most one module. Cost: O(operators · children · length of a child's stretch) per module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..trace.module_tree import ModuleTree
from .captured import Aligned, between
from .repeated import ACCUMULATED, UNACCUMULATED, sources_of

__all__ = ["StructuralMatch"]

I64 = NDArray[np.int64]

# Kind of operator -> operators of a trace, without "aten::" and leading underscores, that show it. The first six lines need parameters.
_OPERATORS: dict[str, tuple[str, ...]] = {
    "linear": ("linear", "addmm"), "bilinear": ("bilinear",), "embedding": ("embedding",), "embeddingbag": ("embedding_bag",),
    "conv": ("conv1d", "conv2d", "conv3d", "convolution"), "convtranspose": ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "batchnorm": ("batch_norm",), "layernorm": ("layer_norm",), "groupnorm": ("group_norm",), "rmsnorm": ("rms_norm",), "prelu": ("prelu",),
    "lstm": ("lstm",), "gru": ("gru",), "rnn": ("rnn_tanh", "rnn_relu"), "lstmcell": ("lstm_cell",), "grucell": ("gru_cell",),
    "multiheadattention": ("native_multi_head_attention",),
    "instancenorm": ("instance_norm",), "relu": ("relu", "relu_"), "relu6": ("relu6", "hardtanh", "hardtanh_"), "gelu": ("gelu",),
    "silu": ("silu", "silu_"), "elu": ("elu", "elu_"), "leakyrelu": ("leaky_relu", "leaky_relu_"), "sigmoid": ("sigmoid",), "tanh": ("tanh",),
    "softmax": ("softmax",), "logsoftmax": ("log_softmax",), "hardswish": ("hardswish", "hardswish_"), "dropout": ("dropout", "dropout_"),
    "maxpool": ("max_pool1d", "max_pool2d", "max_pool3d"), "avgpool": ("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    "adaptiveavgpool": ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), "flatten": ("flatten",),
    "adaptivemaxpool": ("adaptive_max_pool1d", "adaptive_max_pool2d"), "pixelshuffle": ("pixel_shuffle",),
    "upsample": ("upsample_nearest2d", "upsample_bilinear2d"),
}  # fmt: skip
_NEEDS_PARAMETERS = frozenset({
    "linear", "bilinear", "embedding", "embeddingbag", "conv", "convtranspose", "batchnorm", "layernorm", "groupnorm", "rmsnorm", "prelu", "lstm",
    "gru", "rnn", "lstmcell", "grucell", "multiheadattention",
})  # fmt: skip
_NAMED_OTHERWISE = {"syncbatchnorm": "batchnorm", "rnncell": "rnn"}
# The operators of a nn.MultiheadAttention, which calls no module for them: projections in, attention (fused or not), projection out.
_ATTENTION = re.compile("l{1,3}(?:s|bxd?b)l")
_LETTERS = {
    "linear": "l", "addmm": "l", "scaled_dot_product_attention": "s", "bmm": "b", "baddbmm": "b", "softmax": "x", "dropout": "d",
}  # fmt: skip
_SILENT = {"nondynamicallyquantizablelinear"}  # its parameters are used by the module around it, which does not call it
_NOTHING: frozenset[str] = frozenset()
_SHAPES = frozenset(
    f"aten::{name}"
    for name in (
        "view", "transpose", "permute", "reshape", "contiguous", "squeeze", "unsqueeze", "unflatten", "flatten", "select", "split_with_sizes",
    )
)
# Class -> operators that it runs right before, right after.
_BESIDE = {
    "multiheadattention": (_SHAPES, _SHAPES), "batchnorm": (frozenset({"aten::add_"}), _NOTHING), "lstm": (frozenset({"aten::zeros"}), _NOTHING),
    "gru": (frozenset({"aten::zeros"}), _NOTHING), "rnn": (frozenset({"aten::zeros"}), _NOTHING),
}  # fmt: skip
_KIND_OF_OPERATOR = {operator: kind for kind, operators in _OPERATORS.items() for operator in operators}
_DIMENSION = re.compile(r"[123]d|_")
_PLAIN = re.compile(r"^(?:aten::)?_*(.*)$")
_MISSING, _EXTRA_CALL = 20, 2  # charge per operator that a part lacks or has too many: with parameters, without
MAX_CUT_CELLS = 2_000_000_000  # cells of the table of one cut (the product of children, operators, lengths and kinds); beyond it the tree is not used


class StructuralMatch:
    """The tree with what each module's stretch should show, and what was aligned with it so far."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.children: list[list[int]] = [[] for _ in tree.modules]
        for i, module in enumerate(tree.modules[1:], 1):
            self.children[module.parent].append(i)
        self.kind = [self._kind(i) for i in range(len(tree.modules))]
        self.groups = {kind: g for g, kind in enumerate(k for k in _OPERATORS if k in self.kind)}
        self.weight = np.array([_MISSING if k in _NEEDS_PARAMETERS else _EXTRA_CALL for k in self.groups], np.int64)
        size = (len(tree.modules), len(self.groups))
        self.least, self.most = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.opens = np.full(len(tree.modules), -1, np.int64)
        # Children have greater numbers than their parents: from behind, each finds its children's figures complete.
        for i in range(len(tree.modules) - 1, -1, -1):
            self._expect(i)
        self.seen: dict[tuple[tuple[str, ...], bytes], Aligned | None] = {}

    def _kind(self, module: int) -> str:
        name = _class(self.tree.modules[module].kind)
        name = _NAMED_OTHERWISE.get(name, name)
        return name if name in _OPERATORS and (name == "multiheadattention" or not self.children[module]) else ""

    def _expect(self, i: int) -> None:
        """What the module's stretch holds of each kind: its own, and its children's (which have greater numbers)."""
        if self.kind[i]:
            g = self.groups[self.kind[i]]
            needs = self.kind[i] in _NEEDS_PARAMETERS
            self.least[i, g], self.most[i, g] = int(needs), 1 if needs else 4
            self.opens[i] = g
            return
        for child in self.children[i]:
            if _class(self.tree.modules[child].kind) not in _SILENT:
                self.least[i] += self.least[child]
                self.most[i] += self.most[child]
                self.opens[i] = self.opens[child] if self.opens[i] < 0 else self.opens[i]

    def align(self, names: Sequence[str], gradients: NDArray[np.int8]) -> Aligned | None:
        """None if no operator can be any module's. `gradients`: per operator what `repeated.gradients_of` says."""
        key = tuple(names), gradients.tobytes()
        if key not in self.seen:
            self.seen[key] = self._align(key[0], gradients)
        return self.seen[key]

    def _align(self, names: tuple[str, ...], gradients: NDArray[np.int8]) -> Aligned | None:
        """Further calls are taken out, so that every module is called once, and get the modules of the operators that they repeat."""
        source = self._sources(names, gradients)
        kept = np.flatnonzero(source < 0)
        found = self._align_once(tuple(names[i] for i in kept.tolist()))
        if found is None or len(kept) == len(names):
            return found
        module = np.full(len(names), -1, np.int32)
        module[kept] = found.module
        for i in np.flatnonzero(source >= 0).tolist():
            module[i] = module[source[i]]
        places = np.flatnonzero(module >= 0)
        return Aligned(
            operator=np.full(len(names), -1, np.int32), module=between(self.tree, module), first=int(places[0]), last=int(places[-1])
        )  # fmt: skip

    def _sources(self, names: tuple[str, ...], gradients: NDArray[np.int8]) -> I64:
        """Per operator of a further call the operator that it repeats, else -1."""
        if not self.groups or not (gradients == UNACCUMULATED).any():
            return np.full(len(names), -1, np.int64)
        group, owner = self._groups([_PLAIN.sub(r"\1", n) for n in names])
        gradients = gradients.copy()
        members = np.flatnonzero(owner >= 0)
        np.maximum.at(gradients, owner[members], gradients[members])
        strong = (group >= 0) & (self.weight[group] == _MISSING)
        further = np.zeros(len(names), bool)
        for kind, g in self.groups.items():
            mine = strong & (group == g)
            # Only if exactly as many operators accumulate as there are modules of the kind is each other one a further call.
            if int((gradients[mine] == ACCUMULATED).sum()) == self.kind.count(kind):
                further |= mine & (gradients == UNACCUMULATED)
        return sources_of(names, further, strong & ~further)

    def _groups(self, plain: list[str]) -> tuple[I64, I64]:
        """Per operator its kind, or -1; and the one that stands for those of an attention, or -1."""
        group = np.array([self.groups.get(_KIND_OF_OPERATOR.get(n, ""), -1) for n in plain], np.int64)
        return group, self._attention(plain, group)

    def _align_once(self, names: tuple[str, ...]) -> Aligned | None:
        group, owner = self._groups([_PLAIN.sub(r"\1", n) for n in names])
        places = np.flatnonzero(group >= 0)
        if not len(places):
            return None
        given = np.full(len(places), -1, np.int32)
        if not self._give(0, group[places], given):
            return None
        module = np.full(len(names), -1, np.int32)
        module[places] = given
        module = np.where(owner >= 0, module[np.maximum(owner, 0)], module).astype(np.int32)
        places = np.flatnonzero(module >= 0)
        self._absorb(names, module)
        return Aligned(
            operator=np.full(len(names), -1, np.int32), module=between(self.tree, module), first=int(places[0]), last=int(places[-1])
        )  # fmt: skip

    def _attention(self, plain: list[str], group: I64) -> I64:
        """Let the operators of each attention count as one; per operator the place of the one that stands for it, or -1."""
        owner = np.full(len(plain), -1, np.int64)
        if "multiheadattention" in self.groups:
            shown = [i for i, n in enumerate(plain) if group[i] >= 0 or n in _LETTERS]
            letters = "".join(_LETTERS.get(plain[i], "o") for i in shown)
            for match in _ATTENTION.finditer(letters):
                members = shown[match.start() : match.end()]
                owner[members] = members[0]
                group[members] = -1
                group[members[0]] = self.groups["multiheadattention"]
        return owner

    def _absorb(self, names: tuple[str, ...], module: NDArray[np.int32]) -> None:
        """Operators that a class runs right before or after those that show it."""
        anchors = np.flatnonzero(module >= 0).tolist()
        for at in anchors:
            before, after = _BESIDE.get(_class(self.tree.modules[module[at]].kind), (_NOTHING, _NOTHING))
            for step, wanted in ((-1, before), (1, after)):
                i = at + step
                while 0 <= i < len(names) and module[i] < 0 and names[i] in wanted:
                    module[i] = module[at]
                    i += step

    def _give(self, module: int, group: I64, given: NDArray[np.int32]) -> bool:
        """Give the operators of a module's stretch to it and what is inside it; False if that would be too much work."""
        given[:] = module
        if not len(group):
            return True
        inside = self.children[module]
        compound = [c for c in inside if not self.kind[c] and self.most[c].any()]
        leaves = [c for c in inside if self.kind[c]]
        own = np.ones(len(group), bool)
        if compound:
            parts = self._cut(module, inside, compound, leaves, group)
            if parts is None:
                return False
            for child, (begin, end) in zip(compound, parts.tolist(), strict=True):
                own[begin:end] = False
                if end > begin and not self._give(child, group[begin:end], given[begin:end]):
                    return False
        kinds = sorted(np.unique(group[own]).tolist(), key=lambda g: -int(self.weight[g]))
        # Containers took their stretches above; what is left is the module's own.
        for g in kinds:  # those with parameters first: the others are told by their neighbours
            mine = [c for c in leaves if self.groups[self.kind[c]] == g]
            places = np.flatnonzero(own & (group == g)).tolist()
            if self.weight[g] != _MISSING and len(mine) > 1:
                settled = self._between_neighbours(module, mine, places, group, given)
                # What neighbours decide is taken out; the k-th of the rest goes to the k-th leaf left.
                mine, places = [c for c in mine if c not in settled], [at for at in places if given[at] == module]
            for k, at in enumerate(places):
                if mine:
                    given[at] = mine[min(k, len(mine) - 1)]
        return True

    def _between_neighbours(self, module: int, mine: list[int], places: list[int], group: I64, given: NDArray[np.int32]) -> set[int]:
        """Give an operator to the leaf that is defined between the two modules between which the operator ran; returns those leaves."""
        inside = self.children[module]
        anchors = [c for c in inside if not self.kind[c] or self.kind[c] in _NEEDS_PARAMETERS]
        defined = {
            (max((a for a in anchors if a < c), default=-1), min((a for a in anchors if a > c), default=-1)): c for c in reversed(mine)
        }  # fmt: skip
        settled = set()
        strong = np.flatnonzero(self.weight[group] == _MISSING)
        for at in places:
            before, after = strong[strong < at], strong[strong > at]
            ends = tuple(self._child(module, int(given[x[i]]) if len(x) else -1) for x, i in ((before, -1), (after, 0)))
            if -1 not in ends and ends in defined:
                given[at] = defined[ends]
                settled.add(defined[ends])
        return settled

    def _child(self, parent: int, module: int) -> int:
        """The child of `parent` around a module, -1 if that is not inside it."""
        while module >= 0 and self.tree.modules[module].parent != parent:
            module = self.tree.modules[module].parent
        return module

    def _cut(self, module: int, inside: list[int], compound: list[int], leaves: list[int], group: I64) -> I64 | None:
        n, kinds = len(group), len(self.groups)
        prefix = np.zeros((kinds, n + 1), np.int64)
        for g in range(kinds):
            prefix[g, 1:] = np.cumsum(group == g)
        # Between the fewest and the most operators that a module shows when it runs once.
        usual = (self.least + self.most + 1) // 2
        outside = np.maximum(self.weight // 2, 1)
        # Operators of a kind that the module's own leaves show cost nothing outside all parts.
        outside[[self.groups[self.kind[c]] for c in leaves]] = 0
        # Where a child's stretch should begin, if all before it in definition order ran once.
        before = {c: int(sum(usual[b].sum() if not self.kind[b] else 1 for b in inside[: inside.index(c)])) for c in compound}
        longest = np.minimum(n, self.most[compound].sum(axis=1) + 8)
        if len(compound) * n * int(longest.max()) * kinds > MAX_CUT_CELLS:
            return None
        cost, back = np.zeros((len(compound) + 1, n + 1), np.int64), np.zeros((len(compound) + 1, n + 1), np.int64)
        parts = np.zeros((len(compound), 2), np.int64)
        from ..kernels.split import best_split  # loads numba, which a trace alone does not need

        best_split(
            group, prefix, self.least[compound], self.most[compound], self.weight, outside, self.opens[compound],
            np.array([before[c] for c in compound], np.int64), longest, cost, back, parts,
        )  # fmt: skip
        return parts


def _class(kind: str) -> str:
    return _DIMENSION.sub("", kind).lower()
