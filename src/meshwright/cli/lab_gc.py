"""`meshwright lab gc`: remove what killed labs left behind."""

from __future__ import annotations

import argparse

from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Remove what dead labs left: files, holders without an owner, CPU groups. Live labs are never touched."


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> Result:
    from ..lab.build import collect

    del args
    removed = collect()
    text = "\n".join(f"removed {x}" for x in removed) or "nothing to remove"
    return Result({"schema": "meshwright.lab-gc", "version": 1, "removed": removed}, text)
