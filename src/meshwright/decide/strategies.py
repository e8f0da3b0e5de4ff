"""Strategies by name: ours from the tuple of their decision, others' from entry points of installed packages.

A package lists a strategy of its own in the entry-point group `meshwright.<decision>`, under the strategy's name. It is loaded only when it is
named or when all are listed. What cannot be loaded, is no strategy, or has a name of ours, is an error that says which package it is from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ..cite import FOLKLORE, Cite
from ..errors import StrategyNotLoaded, UnknownName

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

__all__ = ["GROUP", "Listed", "Outside", "answering", "cite_of", "cites", "found", "named", "options_given", "outside"]

GROUP = "meshwright."  # of entry points, followed by the decision


class Listed(Protocol):
    """What a strategy of any decision says of itself: its name on the command line, and where the method comes from."""

    name: ClassVar[str]
    cite: ClassVar[Cite]
    aliases: ClassVar[tuple[str, ...]] = ()  # what plans of earlier versions call it


Kind = TypeVar("Kind", bound=Listed)


@dataclass(frozen=True)
class Outside:
    """A strategy of an installed package, not yet loaded."""

    decision: str
    name: str
    package: str
    point: EntryPoint

    def load(self) -> type[Any]:
        """Raises: StrategyNotLoaded for a module that fails to import, and for an object that is no strategy of that name."""
        where = f"package {self.package}, entry point {GROUP}{self.decision}: {self.name}"
        try:
            kind = self.point.load()
        except Exception as error:  # whatever a stranger's module raises
            raise StrategyNotLoaded(
                f"{self.point.value} cannot be loaded: {type(error).__name__}: {str(error)[:160]}", where=where,
                hint="repair or uninstall the package", data={"package": self.package, "strategy": self.name},
            ) from error
        lacks = _lacks(kind, self.name)
        if lacks:
            raise StrategyNotLoaded(
                f"{self.point.value} is no strategy: {lacks}", where=where, hint="docs/extending.md says what a strategy is",
                data={"package": self.package, "strategy": self.name},
            )  # fmt: skip
        return kind  # type: ignore[no-any-return]


def _lacks(kind: Any, name: str) -> str:
    """What is missing at what should be a strategy of that name; "" for nothing."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return "it is not a dataclass"
    if getattr(kind, "name", None) != name:
        return f"its name is {getattr(kind, 'name', None)!r}, not {name!r}"
    if not isinstance(getattr(kind, "cite", None), Cite):
        return "it has no `cite`"
    return "" if callable(getattr(kind, "plan", None)) else "it has no method `plan`"


def named(strategies: Sequence[type[Kind]]) -> dict[str, type[Kind]]:
    """By name, in the order of the tuple."""
    return {kind.name: kind for kind in strategies}


def answering(strategies: Sequence[type[Any]], question: str) -> tuple[type[Any], ...]:
    """Those of a decision with several questions that answer this one."""
    return tuple(kind for kind in strategies if kind.answers == question)


def cites(strategies: Sequence[type[Listed]]) -> dict[str, Cite]:
    """Where each that has a publication comes from, by every name that a plan may hold."""
    return {name: kind.cite for kind in strategies if kind.cite is not FOLKLORE for name in (kind.name, *kind.aliases)}


def outside(decision: str, ours: Sequence[type[Listed]]) -> tuple[Outside, ...]:
    """Strategies of installed packages, by name; nothing is loaded.

    Raises: StrategyNotLoaded when one has a name of ours or of another package.
    """
    taken = {kind.name: "meshwright" for kind in ours}
    listed = []
    for point in sorted(_points(GROUP + decision, _path()), key=lambda p: (p.name, p.value)):
        package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        if point.name in taken:
            raise StrategyNotLoaded(
                f"the name {point.name!r} is taken by {taken[point.name]}", where=f"package {package}, entry point {GROUP}{decision}: {point.name}",
                hint="uninstall the package, or ask its authors for another name", data={"package": package, "strategy": point.name},
            )  # fmt: skip
        taken[point.name] = package
        listed.append(Outside(decision, point.name, package, point))
    return tuple(listed)


def _path() -> tuple[tuple[str, int], ...]:
    """Where packages are found, and when something was last installed there."""
    places = [Path(place or ".") for place in sys.path]
    return tuple((str(place), place.stat().st_mtime_ns if place.exists() else 0) for place in places)


@lru_cache(maxsize=64)
def _points(group: str, path: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Entry points of a group, read once: the metadata of everything that is installed takes tens of milliseconds."""
    from importlib.metadata import entry_points

    return entry_points(group=group)


def found(
    decision: str, ours: Sequence[type[Kind]], name: str, *, question: str = "", where: str = "", what: str = "strategy", also: Sequence[str] = ()
) -> type[Kind]:
    """The strategy of that name, ours or loaded from the package that brings it; of decisions with several questions, one that answers `question`.

    `also`: other words that the caller understands. Raises: UnknownName; as `outside` and `Outside.load`.
    """
    others = outside(decision, ours)
    known = named(answering(ours, question) if question else ours)
    if name in known:
        return known[name]
    for other in others:
        if other.name == name:
            kind = other.load()
            if question and getattr(kind, "answers", None) != question:
                answers = getattr(kind, "answers", None)
                raise UnknownName(f"{what} {name!r} of package {other.package} answers {answers!r}, not {question!r}", where=where)
            return kind
    names = (*known, *(other.name for other in others), *also)
    raise UnknownName(f"there is no {what} {name[:64]!r}", where=where, hint=f"there are: {', '.join(names)}")


def cite_of(decision: str, ours: Sequence[type[Listed]], name: str) -> Cite | None:
    """Where a strategy that a plan names comes from; None for one that is not installed here. Raises: as `Outside.load`."""
    known = cites(ours)
    if name in known:
        return known[name]
    return next((other.load().cite for other in outside(decision, ours) if other.name == name), None)


def options_given(strategy: object, told: Sequence[str] = ()) -> dict[str, Any]:
    """Its options that differ from the defaults, and those of `told`."""
    given: dict[str, Any] = {}
    for f in fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if value != default or f.name in told:
            given[f.name] = value
    return given
