"""`python -m meshwright.testing soak --minutes N --what plans|backend|readers|traces`: see `meshwright.testing.soak`. Exit code 4 after a mistake."""

from __future__ import annotations

import argparse
import json
import sys

from .soak import SOAKS, soak


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m meshwright.testing", description="Instruments for checkers, planners and readers.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("soak", help="generated wrong inputs against what must refuse them; prints counts as one line of JSON")
    made.add_argument("--what", choices=sorted(SOAKS), required=True)
    made.add_argument("--minutes", type=float, default=60.0, help="of wall time (default 60)")
    made.add_argument("--count", type=int, help="end after so many")
    made.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    found = soak(args.what, minutes=args.minutes, seed=args.seed, count=args.count)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["ok"] else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
