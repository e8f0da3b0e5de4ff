"""`meshwright traffic compare`: every codec and every way to group, by predicted step, with what each states about its error."""

from __future__ import annotations

import argparse

from .frame import Result
from .traffic_plan import profile_given, traffic_arguments

HELP = "every codec and grouping beside each other: predicted step, bytes, and the error each codec states"


def arguments(parser: argparse.ArgumentParser) -> None:
    traffic_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..drive.traffic import compare_traffic
    from ..report.traffic_text import compare_text, row_document

    rows, cut = compare_traffic(profile_given(args), time_limit_s=args.time_limit)
    return Result({"schema": "meshwright.traffic.compare", "version": 1, "rows": [row_document(r) for r in rows]}, compare_text(rows), cut=cut)
