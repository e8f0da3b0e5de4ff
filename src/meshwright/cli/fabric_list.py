"""`meshwright fabric list`: the presets, their sizes and options."""

from __future__ import annotations

import argparse

from ..fabric.presets import PRESETS, Option, Preset
from .columns import hung
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "List the fabrics that ship with meshwright."
EPILOG = """\
A fabric is named everywhere as PRESET[:n][?option=value&...], or as FILE.toml or FILE.json:
  meshwright fabric show dgx-a100:2
  meshwright fabric show 'dgx-h100:16?net=rails'
  meshwright fabric show p5.48xlarge:4          the same by its provider's name
  meshwright fabric show v5p-128                a TPU slice, as its provider counts it
  meshwright fabric show examples/fabrics/two_islands.toml"""

_EXAMPLE = {"rate": "RATE", "size": "SIZE", "flops": "FLOP/s", "count": "N", "flag": "0|1", "sides": "AxB[xC]"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(args: argparse.Namespace) -> Result:
    presets = [
        {
            "name": p.name,
            "summary": p.summary,
            "unit": p.unit,
            "default": p.default,
            "devices_per_unit": p.devices_per_unit,
            "aliases": list(p.aliases),
            "sources": list(p.sources),
            "options": [{"name": name, "kind": o.kind, "help": o.help, "choices": list(o.choices)} for name, o in p.options.items()],
        }
        for p in PRESETS.values()
    ]
    text = "\n".join(line for p in PRESETS.values() for line in _lines(p))
    return Result({"schema": "meshwright.fabric-list", "version": 1, "presets": presets}, text)


def _lines(preset: Preset) -> list[str]:
    options = " ".join(f"{name}={_values(option)}" for name, option in preset.options.items())
    said = [f"n = {preset.unit}, default {preset.default}; options: {options}"]
    said += [f"also called {', '.join(preset.aliases)}"] if preset.aliases else []
    said += [f"from {'; '.join(preset.sources)}"] if preset.sources else []
    return [hung(f"{preset.name + ':n':<14} ", preset.summary), *(hung(" " * 15, line) for line in said)]


def _values(option: Option) -> str:
    return "|".join(option.choices) if option.choices else _EXAMPLE[option.kind]
