from pathlib import Path

from meshwright.cli import main
from meshwright.drive.plans import read_plan

main(["collective", "plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MiB", "--strategy", "ring", "--out", "plan.json"])
plan = read_plan(Path("plan.json"))
program, callees = plan.main, plan.programs
