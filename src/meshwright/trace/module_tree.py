"""The modules of a model in definition order, and the operators that one forward pass of it runs, each with its module.

`train run` writes it beside a trace, `capture.modules` makes it from a module, `io.trace.module_tree` reads and writes it.
"""

from __future__ import annotations

import msgspec

__all__ = ["MODULE_SPAN", "CapturedOperator", "ModuleNode", "ModuleTree"]

MODULE_SPAN = "module:"  # a slice that says which module is running: this and the module's path, "module:encoder.layers.0"


class ModuleNode(msgspec.Struct, frozen=True, kw_only=True):
    """A module: where it lies (`""` is the model), its class, the index of the module around it (-1 for the model), its own parameters."""

    path: str
    kind: str
    parent: int
    parameters: tuple[str, ...] = ()  # names within the module; of shared ones only where they are first met


class CapturedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that no other operator called: its name as in a trace, the innermost module running, and the operators inside it, in order.

    `owners[i]` is (name of an autograd node, modules whose parameters it hands gradients to) of the nodes that it made.
    """

    name: str
    module: int
    inner: tuple[str, ...] = ()
    owners: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ModuleTree(msgspec.Struct, frozen=True, kw_only=True):
    """Modules in definition order (a parent before its children), operators in the order they ran; empty if the model was not run."""

    model: str
    modules: tuple[ModuleNode, ...]
    operators: tuple[CapturedOperator, ...] = ()

    def depth(self, module: int) -> int:
        """How many modules are around it."""
        return len(self.ancestors(module)) - 1

    def ancestors(self, module: int) -> list[int]:
        """The module and those around it, innermost first."""
        found = []
        while module >= 0:
            found.append(module)
            module = self.modules[module].parent
        return found

    def common(self, a: int, b: int) -> int:
        """The innermost module around both."""
        around = set(self.ancestors(a))
        return next(m for m in self.ancestors(b) if m in around)
