"""The same plans, byte for byte: what shows that a change of the code changed no decision.

    python tools/recorded_plans                            makes all plans again and compares them with recorded.json
    python tools/recorded_plans check --against DIR        makes them with this checkout and with DIR's, and compares the two: the proof
                                     [--but PATH]          apart from what a change says anew in a plan, by JSON path
    python tools/recorded_plans record                     writes recorded.json; with --only, those alone
    python tools/recorded_plans --list                     what is in the set

`--only WORDS` takes those whose kind or command holds all the words, `--jobs N` makes N at a time. Exit 1: a plan differs. Bytes may also differ with
numpy, highspy, torch or the processor's kernels; where recorded.json is of other versions, differences are shown and prove nothing (exit 0):
`--against` compares on one machine. What makes plans and where they come from: `plan_set.py`, `cases.txt`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compare import difference
from plan_set import HERE, KINDS, PAGES, ROOT, Case, SetError, plan_set
from trees import COSTS, Made, RunError, Tree, checkout

RECORDED = HERE / "recorded.json"
PACKAGES = ("highspy", "numba", "numpy", "torch")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def make_all(trees: list[Tree], cases: list[Case], jobs: int, done: Callable[..., None]) -> None:
    """Calls `done` for each case, in their order, with what every tree made of it."""

    def one(case: Case) -> list[Made | RunError]:
        found: list[Made | RunError] = []
        for tree in trees:
            try:
                found.append(tree.make(case))
            except RunError as error:
                found.append(error)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        for case, made in zip(cases, pool.map(one, cases), strict=True):
            done(case, *made)


def entry(case: Case, made: Made) -> dict[str, Any]:
    data = made.data()
    return {"kind": case.kind, "command": str(case), "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def line(verdict: str, case: Case, made: Made | RunError) -> str:
    seconds = f"{made.seconds:6.1f} s" if isinstance(made, Made) else " " * 8
    return f"{verdict:9} {seconds}  {case.kind:10}  {case}"


def record(tree: Tree, cases: list[Case], whole: list[Case], jobs: int, file: Path) -> int:
    """Writes the file, in which plans that are not among `cases` stay as they are; an operator that step-costs.json lacks is measured, kept there,
    and its plan made again. Raises: RunError when what stays was recorded with other versions."""
    entries, failed = {}, 0
    if len(cases) < len(whole):
        document = read(file)
        entries = {e["command"]: e for e in document["plans"]}
        if document["versions"] != versions():
            raise RunError(f"{file} is of other versions ({document['versions']}): record the whole set, without --only")

    def done(case: Case, made: Made | RunError) -> None:
        nonlocal failed
        if isinstance(made, RunError):
            failed += 1
            print(line("FAILED", case, made), f"\n    {made}")
            return
        while made.measured:
            tree.keep_costs(made.path.parent)
            made = tree.make(case, again=True)
        entries[str(case)] = entry(case, made)
        print(line("recorded", case, made), flush=True)

    make_all([tree], cases, jobs, done)
    if failed:
        print(f"{failed} commands failed; nothing written")
        return 1
    plans = [entries[str(c)] for c in whole if str(c) in entries]
    lines = ",\n".join(f" {json.dumps(plan)}" for plan in plans)
    file.write_text(f'{{"versions": {json.dumps(versions())}, "plans": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(plans)} of {len(whole)} plans recorded in {file}")
    return 0


def read(file: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read the record: {error}; `record` makes one") from error
    return document


def check(tree: Tree, cases: list[Case], jobs: int, file: Path, *, whole: bool) -> int:
    document = read(file)
    known = {e["command"]: e for e in document["plans"]}
    other = {k: (was, now) for k, now in versions().items() if (was := document["versions"].get(k, "none")) != now}
    counts = {"same": 0, "DIFFERS": 0, "FAILED": 0}

    def done(case: Case, made: Made | RunError) -> None:
        why, was = "", known.get(str(case))
        if isinstance(made, RunError):
            verdict, why = "FAILED", str(made)
        elif was is None:
            verdict, why = "FAILED", "not recorded yet: python tools/recorded_plans record"
        elif made.measured:
            verdict, why = "FAILED", f"measured {made.measured} operators that {COSTS.name} lacks"
        else:
            verdict = "same" if entry(case, made) == was else "DIFFERS"
        counts[verdict] += 1
        print(line(verdict, case, made) + (f"\n    {why}" if why else ""), flush=True)

    make_all([tree], cases, jobs, done)
    gone = [command for command in known if whole and command not in {str(c) for c in cases}]
    for command in gone:
        print(f"recorded, but no longer in the set: {command}")
    print(f"{counts['same']} of {len(cases)} plans as recorded, {counts['DIFFERS']} differ, {counts['FAILED']} failed")
    if counts["DIFFERS"]:
        print("what differs, by JSON path: --against DIR, a checkout of the commit before")
    if other:
        said = ", ".join(f"{k} {was}, here {now}" for k, (was, now) in other.items())
        print(f"recorded with {said}: bytes may differ for that reason alone, and prove nothing; compare with --against")
    return int(bool(counts["FAILED"] or gone or (counts["DIFFERS"] and not other)))


def against(tree: Tree, base: Tree, cases: list[Case], jobs: int, but: list[str]) -> int:
    counts = {"same": 0, "DIFFERS": 0, "FAILED": 0}

    def done(case: Case, here: Made | RunError, there: Made | RunError) -> None:
        if isinstance(here, RunError) or isinstance(there, RunError):
            verdict, why = "FAILED", f"here: {here}" if isinstance(here, RunError) else f"there: {there}"
        elif here.measured or there.measured:
            verdict, why = "FAILED", f"measured operators that {COSTS.name} lacks"
        else:
            why = difference(here.data(), there.data(), but)
            verdict = "DIFFERS" if why else "same"
        counts[verdict] += 1
        print(line(verdict, case, here) + (f"\n    {why}" if why else ""), flush=True)

    make_all([tree, base], cases, jobs, done)
    apart = f" but for {', '.join(but)}" if but else ""
    print(f"{counts['same']} of {len(cases)} plans equal, byte for byte{apart}; {counts['DIFFERS']} differ, {counts['FAILED']} failed")
    return int(counts["same"] < len(cases))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recorded_plans", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=("check", "record"), default="check")
    parser.add_argument("--against", metavar="DIR", help="another checkout (or its src)")
    parser.add_argument("--but", metavar="PATH", action="append", default=[], help="with --against: what may differ, as $.decisions.*.made")
    parser.add_argument("--only", metavar="WORDS", default="", help="cases whose kind or command holds all these words")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--file", type=Path, default=RECORDED, help="the record (default: recorded.json beside this program)")
    parser.add_argument("--list", action="store_true", help="only print the set")
    args = parser.parse_args()
    if args.verb == "record" and args.against:
        parser.error("record takes this checkout alone")
    return args


def main() -> int:
    args = arguments()
    whole = plan_set()
    cases = [c for c in whole if all(word in f"{c.kind}: {c}" for word in args.only.split())]
    if not cases:
        print(f"no plan of the set has the words {args.only!r}")
        return 2
    if args.list:
        for case in cases:
            print(f"{case.kind:10}  {case}")
        print(", ".join(f"{sum(c.kind == kind for c in cases)} {kind}" for kind in (PAGES, *KINDS)))
        return 0
    with tempfile.TemporaryDirectory(prefix="recorded-plans-") as folder:
        trees = [Tree(checkout(root), Path(folder, name)) for root, name in ((str(ROOT), "here"), (args.against, "there")) if root]
        for tree in trees:
            tree.folder.mkdir()
        try:
            if args.verb == "record":
                return record(trees[0], cases, whole, args.jobs, args.file)
            if args.against:
                return against(trees[0], trees[1], cases, args.jobs, args.but)
            return check(trees[0], cases, args.jobs, args.file, whole=not args.only)
        finally:
            for tree in trees:
                tree.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SetError, RunError) as error:
        sys.exit(f"error: {error}")
