"""`meshwright lab down NAME`: end a lab with every process in it."""

from __future__ import annotations

import argparse

from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "End a lab: all processes in it, its namespaces and its files."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the lab")


def run(args: argparse.Namespace) -> Result:
    from ..lab.build import stop_holder
    from ..lab.state import folder_of, read_state, remove

    folder = folder_of(args.name)
    state = read_state(folder)
    was_alive = state.alive
    stop_holder(state)
    remove(folder)
    document = {"schema": "meshwright.lab-down", "version": 1, "lab": args.name, "was_alive": was_alive}
    return Result(document, f"lab {args.name} is down" if was_alive else f"lab {args.name} was dead already; its files are removed")
