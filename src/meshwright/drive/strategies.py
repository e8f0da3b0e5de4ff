"""All strategies of all decisions: ours, and those that installed packages bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..cite import Cite
from ..decide.strategies import Listed, Outside, outside
from ..errors import StrategyNotLoaded, UnknownName

__all__ = ["Row", "decisions", "from_packages", "listed", "of_package"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """`question`: of decisions that have several. `options`: with their defaults. `package`: that brings it."""

    decision: str
    question: str
    name: str
    cite: Cite
    options: Mapping[str, Any]
    package: str


def decisions() -> dict[str, tuple[type[Listed], ...]]:
    """The tuple of every decision, by what follows `meshwright.` in the entry-point group."""
    from ..decide import cluster, collective, experts, layout, memory, pipeline, place, restart, tables, topology, traffic
    from ..decide.cluster import resize, vms
    from ..decide.collective import sparse
    from ..decide.data import STRATEGIES as FEED
    from ..decide.traffic import adaqp

    return {
        "collective": collective.STRATEGIES, "collective.sparse": sparse.STRATEGIES, "layout": layout.STRATEGIES, "memory": memory.STRATEGIES,
        "pipeline": pipeline.STRATEGIES, "traffic": traffic.STRATEGIES, "traffic.halo": adaqp.STRATEGIES, "restart": restart.STRATEGIES,
        "topology": topology.STRATEGIES, "experts": experts.STRATEGIES, "place": place.STRATEGIES,
        "tables": tables.STRATEGIES,
        "cluster": cluster.STRATEGIES,
        "cluster.vms": vms.STRATEGIES,
        "cluster.resize": resize.STRATEGIES,
        "data": FEED,
    }  # fmt: skip


def from_packages() -> tuple[Outside, ...]:
    """Of all decisions; nothing is loaded. Raises: StrategyNotLoaded for a name that is taken."""
    return tuple(found for decision, ours in decisions().items() for found in outside(decision, ours))


def listed(decision: str = "") -> list[Row]:
    """One row per strategy, ours first. Raises: UnknownName for a decision; StrategyNotLoaded for a package's that cannot be loaded."""
    known = decisions()
    if decision and decision not in known:
        raise UnknownName(f"there is no decision {decision[:64]!r}", where="decision", hint=f"there are: {', '.join(known)}")
    rows = []
    for name, ours in known.items():
        if decision in ("", name):
            rows += [_row(name, kind, "meshwright") for kind in ours]
            rows += [_row(name, found.load(), found.package) for found in outside(name, ours)]
    return rows


def of_package(package: str) -> dict[str, tuple[type[Any], ...]]:
    """The strategies that a package brings, by decision. Raises: UnknownName when it brings none, StrategyNotLoaded."""
    wanted = package.replace("_", "-").lower()
    mine = [found for found in from_packages() if found.package.replace("_", "-").lower() == wanted]
    if not mine:
        others = sorted({found.package for found in from_packages()})
        raise UnknownName(
            f"no installed package {package[:64]!r} brings strategies", where="PACKAGE",
            hint=f"these do: {', '.join(others)}" if others else "docs/extending.md says how a package lists its own",
        )  # fmt: skip
    kinds: dict[str, tuple[type[Any], ...]] = {}
    for found in mine:
        kinds[found.decision] = (*kinds.get(found.decision, ()), found.load())
    return kinds


def _row(decision: str, kind: type[Any], package: str) -> Row:
    try:
        made = kind()
    except TypeError as error:
        raise StrategyNotLoaded(f"{decision} strategy {kind.name!r} has an option without a default: {error}", where=f"package {package}") from None
    options = {f.name: getattr(made, f.name) for f in fields(made)}
    question = getattr(kind, "answers", "")
    return Row(decision=decision, question=question, name=kind.name, cite=kind.cite, options=options, package=package)
