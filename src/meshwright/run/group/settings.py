"""What a process group is told from outside: environment variables, overridden by `meshwright.torch.configure`.

| variable | means |
|---|---|
| MESHWRIGHT_PLAN | plan files (`collective plan -o`), separated by `:`; each serves its operation on its devices |
| MESHWRIGHT_FABRIC | a fabric file or preset to plan for at first use, or `probe`: measure the group's own fabric when it starts |
| MESHWRIGHT_DEVICES | device of every rank, separated by commas; default: the fabric's devices in order |
| MESHWRIGHT_DEVICE | device of this rank alone; `lab run` sets it |
| MESHWRIGHT_TIMEOUT_S | deadline of every wait; default: the group's timeout |
| MESHWRIGHT_STRATEGIES | strategies to plan with, separated by commas; default: all |
| MESHWRIGHT_TUNE | N: the first calls of a size run the N programs predicted to be fastest and the built-in backend in turn; the fastest stays |
| MESHWRIGHT_TUNE_S | such calls of one size end when they have taken so many seconds (default 60) |
| MESHWRIGHT_MIN_BYTES | smaller collectives are not planned from a fabric (plan files serve every size) |
| MESHWRIGHT_SMALL | 1: those get a plan of few rounds where a few calls of both show that it is faster than the built-in backend |
| MESHWRIGHT_BUILTIN | 0: never choose the built-in backend where a plan exists |
| MESHWRIGHT_REPRODUCIBLE | run, tree or exact: the bits of sums that are promised (docs/reproducibility.md); unset: none are |
| MESHWRIGHT_CACHE | folder in which plans made for a fabric are kept between runs; 0: keep none |
| MESHWRIGHT_DEBUG | 1: checksum every message |
| MESHWRIGHT_RECORD_DIR | where the ranks' flight recorders lie |
| MESHWRIGHT_RECORD_BITS | a folder for what sums are made of and come to, which `run doctor --bits` compares between runs |
| MESHWRIGHT_REPORT | 1: rank 0 says at the end what was planned and what fell through |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from ...errors import UsageError
from ...program.program import REPRODUCIBLE

__all__ = ["Settings", "configure", "current_settings", "settings_from"]

MAX_TUNED_PROGRAMS = 8  # that MESHWRIGHT_TUNE may ask for: each is tried in calls of the job, the slow ones too
PREFIX = "MESHWRIGHT_"
MIN_NAME_LIKENESS = 0.8  # difflib's ratio from which an unknown variable is taken for a mistyped setting
NAMES = (
    "PLAN", "FABRIC", "DEVICES", "DEVICE", "TIMEOUT_S", "STRATEGIES", "TUNE", "TUNE_S", "MIN_BYTES", "BUILTIN", "CACHE", "DEBUG", "RECORD_DIR",
    "REPORT", "SMALL", "REPRODUCIBLE", "RECORD_BITS",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See the module's table. `plan_s`: most seconds of counted work (`kernels.effort`) that one candidate may plan."""

    plans: tuple[str, ...] = ()
    fabric: str = ""
    devices: tuple[str, ...] = ()
    device: str = ""
    timeout_s: float | None = None
    strategies: tuple[str, ...] = ()
    min_bytes: int = 1 << 15  # below, what a message costs whatever it carries decides, which no fabric says
    small: bool = False  # smaller ones get a plan of few rounds or the built-in backend, whichever is measured to be faster
    tune: int = 0
    tune_s: float = 60.0
    debug: bool = False
    record_dir: str = ""
    record_bits: str = ""
    report: bool = False
    plan_s: float = 5.0
    cache: str = ""
    reproducible: str = ""  # a level of `program.REPRODUCIBLE`
    builtin: bool = True  # may the built-in backend be chosen where it is predicted to be as fast; False: every plan is used

    def tries(self, size_bytes: int) -> bool:
        """Is a collective of this size so small that a plan and the built-in backend are both measured?"""
        return self.small and self.builtin and size_bytes < self.min_bytes


_configured: dict[str, Any] = {}


def configure(**options: Any) -> None:
    """Settings of groups made from now on; None takes a setting back to what the environment says. Raises: UsageError (unknown option, bad value)."""
    known = {f.name for f in fields(Settings)}
    for name, value in options.items():
        if name not in known:
            raise UsageError(f"no setting is called {name!r}", where="configure", hint=f"settings: {', '.join(sorted(known))}")
        if value is None:
            _configured.pop(name, None)
        else:
            _configured[name] = tuple(value) if isinstance(value, list) else value
    _validated(current_settings())


def current_settings() -> Settings:
    return replace(settings_from(os.environ), **_configured)


def settings_from(env: Mapping[str, str]) -> Settings:
    """Raises: UsageError for numbers that are none, and for variables that nearly have a setting's name: what they say would be ignored."""
    for name in sorted(env):
        near = get_close_matches(name.removeprefix(PREFIX), NAMES, 1, MIN_NAME_LIKENESS) if name.startswith(PREFIX) else []
        if near and near[0] != name.removeprefix(PREFIX):
            raise UsageError("no setting has this name", where=name, hint=f"did you mean {PREFIX}{near[0]}?")

    def words(name: str, separator: str) -> tuple[str, ...]:
        return tuple(x.strip() for x in env.get(name, "").split(separator) if x.strip())

    timeout = env.get("MESHWRIGHT_TIMEOUT_S", "")
    return _validated(
        Settings(
            plans=words("MESHWRIGHT_PLAN", os.pathsep), fabric=env.get("MESHWRIGHT_FABRIC", "").strip(), devices=words("MESHWRIGHT_DEVICES", ","),
            device=env.get("MESHWRIGHT_DEVICE", "").strip(),
            timeout_s=_number("MESHWRIGHT_TIMEOUT_S", timeout) if timeout else None, strategies=words("MESHWRIGHT_STRATEGIES", ","),
            min_bytes=int(_number("MESHWRIGHT_MIN_BYTES", env.get("MESHWRIGHT_MIN_BYTES", str(Settings.min_bytes)))),
            small=env.get("MESHWRIGHT_SMALL", "0") not in ("", "0"),
            tune=int(_number("MESHWRIGHT_TUNE", env.get("MESHWRIGHT_TUNE", "0"))),
            tune_s=_number("MESHWRIGHT_TUNE_S", env.get("MESHWRIGHT_TUNE_S", str(Settings.tune_s))),
            debug=env.get("MESHWRIGHT_DEBUG", "0") not in ("", "0"), record_dir=env.get("MESHWRIGHT_RECORD_DIR", ""),
            record_bits=env.get("MESHWRIGHT_RECORD_BITS", ""),
            report=env.get("MESHWRIGHT_REPORT", "0") not in ("", "0"), builtin=env.get("MESHWRIGHT_BUILTIN", "1") not in ("", "0"),
            cache=env.get("MESHWRIGHT_CACHE", "").strip(), reproducible=env.get("MESHWRIGHT_REPRODUCIBLE", "").strip(),
        )
    )  # fmt: skip


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"must be a number, got {text[:64]!r}", where=name) from None


def _validated(settings: Settings) -> Settings:
    if settings.timeout_s is not None and not 0 < settings.timeout_s < 1e7:
        raise UsageError(f"must be above 0 s, got {settings.timeout_s}", where="MESHWRIGHT_TIMEOUT_S")
    if settings.min_bytes < 0:
        raise UsageError(f"must be >= 0 bytes, got {settings.min_bytes}", where="MESHWRIGHT_MIN_BYTES")
    if not 0 <= settings.tune <= MAX_TUNED_PROGRAMS:
        raise UsageError(f"must be 0..{MAX_TUNED_PROGRAMS} programs, got {settings.tune}", where="MESHWRIGHT_TUNE")
    if settings.strategies:
        from ...decide.collective import strategy

        for name in settings.strategies:
            strategy(name, where="MESHWRIGHT_STRATEGIES")
    if settings.reproducible not in ("", *REPRODUCIBLE):
        hint = f"levels: {', '.join(REPRODUCIBLE)}"
        raise UsageError(f"no level {settings.reproducible[:32]!r}", where="MESHWRIGHT_REPRODUCIBLE", hint=hint)
    if settings.reproducible and (settings.tune or settings.small):
        text = "calls of one size run by several programs in turn, whose bits differ"
        raise UsageError(text, where="MESHWRIGHT_TUNE" if settings.tune else "MESHWRIGHT_SMALL", hint="unset it, or MESHWRIGHT_REPRODUCIBLE")
    if settings.reproducible == "run" and settings.fabric == "probe":
        text = "a fabric measured anew may give another plan, and with it other bits"
        raise UsageError(text, where="MESHWRIGHT_FABRIC", hint="keep the fabric in a file, or MESHWRIGHT_REPRODUCIBLE=tree")
    if not settings.tune_s >= 0:
        raise UsageError(f"must be >= 0 s, got {settings.tune_s}", where="MESHWRIGHT_TUNE_S")
    return settings
