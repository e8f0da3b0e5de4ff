"""What typical mistakes print: `python benchmarks/mistakes.py [--write]`. `--write` puts the table into benchmarks/results/mistakes.md.

Each command is one that a newcomer types. It must end with an exit code of the table of codes. It must print `error: ...` on one line and
`hint: ...` (what to do) on another, and neither a traceback nor a sentence about the inside of the program. `tests/cli/test_mistakes.py` runs
the list.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSIDE = ("Traceback", "Object missing", " at `$.", "unexpected ", "AssertionError", "KeyError", "NoneType", "object has no attribute",
          "is a bug", "File \"", "<class", " 0x")

# What lies in the folder in which they are typed.
FILES = {
    "empty.json": "",
    "broken.json": '{"schema": "meshwright.plan", ',
    "other.json": '{"schema": "somebody.else", "version": 1}',
    "newer.json": '{"schema": "meshwright.plan", "version": 99}',
    "list.json": "[1, 2, 3]",
    "broken.toml": "[fabric\nname = ",
    "nothing.toml": "",
    "typo.toml": 'name = "x"\n[[devcies]]\nname = "a"\n',
    "text.xml": "<system><cpu></system>",
    "page.html": "<html><body>404 not found</body></html>",
    "tensors.csv": "name,shape\nw,3x\n",
    "model.py": "import torch\n\ndef mine():\n    return torch.nn.Linear(2, 2)\n\n"
    "def fails():\n    raise ValueError('no weights here')\n\nthing = 3\n",
    "syntax.py": "def mine(:\n    pass\n",
    "trace.json": '{"traceEvents": []}',
    "größe ü.toml": "[[",
    "tasks.json": '{"schema": "meshwright.tasks", "version": 1, "name": "t", "tasks": [{"name": "a", "work": 1}, {"name": "b", "work": 1}], '
    '"edges": [{"src": "a", "dst": "b", "size_bytes": 8}]}',
    "circle.json": '{"schema": "meshwright.tasks", "version": 1, "name": "c", "tasks": [{"name": "a", "work": 1}, {"name": "b", "work": 1}], '
    '"edges": [{"src": "a", "dst": "b", "size_bytes": 8}, {"src": "b", "dst": "a", "size_bytes": 8}]}',
    "camera.json": '{"schema": "meshwright.tasks", "version": 1, "name": "c", "tasks": [{"name": "a", "work": 1, "kind": "camera"}], "edges": []}',
    "gang.json": '{"schema": "meshwright.queue", "version": 1, "name": "q", "profiles": [{"name": "any", "cores": [1], "memory_bytes": [1000000000], '
    '"speed": [[1.0]]}], "jobs": [{"name": "big", "gpus": 99, "profile": "any", "arrival_s": 0, "duration_s": 60}]}',
    "tables.json": '{"schema": "meshwright.tables", "version": 1, "name": "t", "batch": 64, "tables": [{"name": "user", "rows": 1000, "dim": 16}]}',
    "huge.json": '{"schema": "meshwright.tables", "version": 1, "name": "t", "batch": 64, '
    '"tables": [{"name": "user", "rows": 4000000000, "dim": 1024}]}',
}
SERVERS = "--fabric dgx1-v100:1 --cores 24 --memory 500GB"
QUEUE = "synthetic:jobs=3,per_hour=20,seed=1"
VMS = "vms:hosts=4,days=2,warm_days=1,load=0.5,seed=1"
EXPERTS = "--fabric laptop:2 --experts 4 --model-dim 64 --inner 128"

# (what went wrong, the command)
MISTAKES = (
    ("a command misspelt", "trian plan"),
    ("a verb misspelt", "train paln --model model.py:mine"),
    ("an option misspelt", "collective bound all-reduce --fabirc laptop:2 --size 1MiB"),
    ("an option of another command", "fabric list --size 1MiB"),
    ("nothing after an option", "collective bound all-reduce --fabric"),
    ("a required option left out", "collective bound all-reduce --size 1MiB"),
    ("a preset misspelt", "fabric show dgx-h10:2"),
    ("a preset of no kind", "fabric show my-cluster"),
    ("a preset with no boxes", "fabric show dgx-h100:0"),
    ("a preset with a negative number", "fabric show dgx-h100:-1"),
    ("a preset far too large", "fabric show dgx-h100:100000"),
    ("an option of a preset misspelt", "fabric show 'dgx-h100:2?nett=rails'"),
    ("a choice that is none", "fabric show 'dgx-h100:2?net=ring'"),
    ("devices that are not there", "fabric show laptop:2 --devices 0-7"),
    ("devices that are no list", "fabric show laptop:2 --devices a-b"),
    ("a fabric file that is not there", "fabric show mine.toml"),
    ("a fabric file that is no TOML", "fabric show broken.toml"),
    ("an empty fabric file", "fabric show nothing.toml"),
    ("a key misspelt in a fabric file", "fabric show typo.toml"),
    ("a name with spaces and umlauts", "fabric show 'größe ü.toml'"),
    ("a folder for a file", "fabric show ."),
    ("an operation misspelt", "collective bound allreduce --fabric laptop:2 --size 1MiB"),
    ("a size without a unit that is known", "collective bound all-reduce --fabric laptop:2 --size 1XB"),
    ("a negative size", "collective bound all-reduce --fabric laptop:2 --size -1"),
    ("a size of zero", "collective bound all-reduce --fabric laptop:2 --size 0"),
    ("a strategy misspelt", "collective plan all-reduce --fabric laptop:2 --size 1MiB --strategy rign --out x.json"),
    ("a strategy that does not do this", "collective plan all-to-all --fabric laptop:2 --size 1MiB --strategy ring --out x.json"),
    ("a folder that is not there", "collective plan all-reduce --fabric laptop:2 --size 1MiB --strategy ring --out nowhere/x.json"),
    ("sizes that are no range", "collective compare all-reduce --fabric laptop:2 --sizes 1MiB:"),
    ("one device", "collective bound all-reduce --fabric laptop:1 --size 1MiB"),
    ("a topology file that is a web page", "fabric import page.html --boxes 2 --out mine.toml"),
    ("a broken topology file", "fabric import text.xml --boxes 2 --out mine.toml"),
    ("a plan that is not there", "train explain plan.json"),
    ("an empty plan", "train explain empty.json"),
    ("a broken plan", "train explain broken.json"),
    ("a file of another program", "train explain other.json"),
    ("a plan of a newer version", "train explain newer.json"),
    ("JSON of another form", "train check list.json"),
    ("no model", "train plan --fabric laptop:2 --global-batch 8"),
    ("a model file that is not there", "train plan --model nets.py:mine --fabric laptop:2 --global-batch 8"),
    ("a function that is not there", "train plan --model model.py:main --fabric laptop:2 --global-batch 8"),
    ("no function named", "train plan --model model.py --fabric laptop:2 --global-batch 8"),
    ("a function that is no function", "train plan --model model.py:thing --fabric laptop:2 --global-batch 8"),
    ("a function without example inputs", "train plan --model model.py:mine --fabric laptop:2 --global-batch 8"),
    ("a model function that fails", "train plan --model model.py:fails --fabric laptop:2 --global-batch 8"),
    ("a syntax error in the model file", "train plan --model syntax.py:mine --fabric laptop:2 --global-batch 8"),
    ("a batch that is no number", "train plan --model model.py:mine --fabric laptop:2 --global-batch many"),
    ("a table of tensors with a wrong shape", "traffic plan --tensors tensors.csv --fabric laptop:2 --codecs fp16"),
    ("a codec misspelt", "traffic compare --tensors tensors.csv --fabric laptop:2 --codecs fp17"),
    ("a trace with nothing in it", "trace breakdown trace.json"),
    ("a trace that is not there", "trace annotate run.json.gz"),
    ("a lab that is not there", "lab run nosuch -- python job.py"),
    ("a run folder that is not there", "report plan.json run/"),
    ("a schedule misspelt", "pipeline plan --stages 4 --microbatches 8 --strategy 1f1 --out x.json"),
    ("no micro-batches", "pipeline compare --stages 4 --microbatches 0"),
    ("a transformer without its numbers", "train explain --transformer layers=32"),
    ("a number that is none", "train explain --transformer layers=many,hidden=8,heads=2,sequence=8,vocabulary=8"),
    ("a GPU that is not in the list", "train explain --transformer layers=2,hidden=8,heads=2,sequence=8,vocabulary=8 --device h1000"),
    ("a shell that is none", "completion powershell"),
    ("a citation of what is no plan", "cite list.json"),
    ("a queue that is not there", f"cluster plan queue.json {SERVERS}"),
    ("a queue without servers", f"cluster plan {QUEUE}"),
    ("a word of a synthetic queue misspelt", f"cluster simulate synthetic:job=3 {SERVERS}"),
    ("an order misspelt", f"cluster plan {QUEUE} {SERVERS} --order fifoo"),
    ("an allocation misspelt", f"cluster simulate {QUEUE} {SERVERS} --allocation price"),
    ("a server with no cores", f"cluster plan {QUEUE} --fabric dgx1-v100:1 --cores 0 --memory 500GB"),
    ("a memory that is no size", f"cluster plan {QUEUE} --fabric dgx1-v100:1 --cores 24 --memory lots"),
    ("a negative seed", f"cluster plan {QUEUE} {SERVERS} --seed -1"),
    ("shares that are no numbers", f"cluster plan {QUEUE} {SERVERS} --split a,b,c"),
    ("a job larger than the cluster", f"cluster plan gang.json {SERVERS}"),
    ("jobs that the queue does not have", f"cluster simulate {QUEUE} {SERVERS} --count 0-99"),
    ("rounds of no time", f"cluster simulate {QUEUE} {SERVERS} --round 0s"),
    ("an option of queues for machines", f"cluster plan {VMS} --cores 4"),
    ("a strategy of hosts misspelt", f"cluster plan {VMS} --strategy bestfit"),
    ("a predictor misspelt", f"cluster plan {VMS} --predictor kaplan"),
    ("a trace shorter than its warm-up", "cluster plan vms:hosts=4,days=1,seed=1"),
    ("a word of a synthetic trace misspelt", "cluster compare vms:host=4"),
    ("a warm-up without a unit that is known", f"cluster simulate {VMS} --warm-up soon"),
    ("an engine misspelt", f"cluster run {QUEUE} {SERVERS} --engine slrum --folder out"),
    ("a run of the cluster that is not there", "cluster audit nowhere"),
    ("limits that are no range", "cluster resize --cpu two --memory 1GiB-2GiB -- true"),
    ("limits the wrong way round", "cluster resize --cpu 2-1 --memory 1GiB-2GiB -- true"),
    ("a simulation of no size", "cluster resize --simulate many"),
    ("a log that is not there", "cluster resize --from nolog.jsonl"),
    ("a task graph that is not there", "place plan job.json --fabric laptop:2"),
    ("tasks that wait for each other", "place plan circle.json --fabric laptop:2"),
    ("a task that no device can run", "place plan camera.json --fabric laptop:2"),
    ("a placing strategy misspelt", "place plan tasks.json --fabric laptop:2 --strategy heftt"),
    ("a placing strategy without its net", "place plan tasks.json --fabric laptop:2 --strategy giph"),
    ("a net that is none", "place plan tasks.json --fabric laptop:2 --strategy giph --net broken.json"),
    ("ended tasks without a plan", "place plan tasks.json --fabric laptop:2 --done a"),
    ("tasks to learn from without devices", "place fit tasks.json"),
    ("a placement that is none", "place run other.json"),
    ("neither tables nor a model", "tables plan --fabric laptop:2"),
    ("tables of another form", "tables plan list.json --fabric laptop:2"),
    ("tables larger than all memory", "tables plan huge.json --fabric dgx1-v100:1"),
    ("columns that are no numbers", "tables plan tables.json --fabric laptop:2 --dim 64,x"),
    ("a table strategy misspelt", "tables plan tables.json --fabric laptop:2 --strategy neuroshrad"),
    ("costs that are not there", "tables plan tables.json --fabric laptop:2 --costs mine.safetensors"),
    ("a limit of moves without a plan", "tables plan tables.json --fabric laptop:2 --move-at-most 4GB"),
    ("a graph that is not there", "graph plan g.npz --fabric laptop:2"),
    ("a graph of no size", "graph partition rmat:many --workers 2"),
    ("more workers than nodes", "graph partition rmat:4,8 --workers 9"),
    ("a width that is none", "graph plan rmat:64,256 --fabric laptop:2 --bits 3"),
    ("two wishes at once", "graph plan rmat:64,256 --fabric laptop:2 --like 4 --max-variance 1"),
    ("a trade above 1", "graph compare rmat:64,256 --fabric laptop:2 --trade 2"),
    ("no capacity", f"experts plan {EXPERTS}"),
    ("more choices than experts", f"experts plan {EXPERTS} --tokens 64 --k 9"),
    ("an exchange misspelt", f"experts compare {EXPERTS} --capacities 64 --algorithms 3dh"),
    ("a degree that does not divide", f"experts plan {EXPERTS} --capacities 64 --degrees 3"),
    ("experts that no rank can share", "experts plan --fabric laptop:2 --experts 3 --model-dim 64 --inner 129 --capacities 64"),
    ("a density above 1", "collective sparse-switch --tree 4,2 --size 1MiB --rate 100Gbit/s --density 2"),
    ("a tree of no numbers", "collective sparse-switch --tree a,b --size 1MiB --rate 100Gbit/s --density 0.01"),
    ("a rate without a unit", "collective handlers --children 16 --rate 100 --size 64KiB"),
    ("a rate that is none", "collective sparse-switch --tree 4,2 --size 1MiB --rate fast --density 0.01"),
    ("more cables than ports", "fabric design --nodes 8 --ports 0"),
    ("a wiring of one node", "fabric design --nodes 1 --ports 4"),
    ("boards that are no rectangle", "fabric allocate --boards four --job 1x1"),
    ("a loader that is not there", "data analyse job.py:loader"),
    ("a loader that is none", "data bench model.py:mine"),
    ("two ways to say the device's time", "data analyse model.py:mine --step model.py:mine --device-time 0.1"),
)  # fmt: skip


@dataclass(frozen=True)
class Said:
    mistake: str
    command: str
    code: int
    text: str

    def faults(self) -> list[str]:
        """What is wrong with the answer; nothing where it is as it should be."""
        lines = self.text.strip().splitlines()
        found = [f"shows {word!r}" for word in INSIDE if word in self.text]
        if self.code not in (1, 2, 3, 4):
            found.append(f"exit code {self.code}")
        if not any(line.startswith("error: ") for line in lines):
            found.append("no line `error: ...`")
        if not any(line.startswith("hint: ") for line in lines):
            found.append("no line `hint: ...`")
        return found


def all_said() -> list[Said]:
    """What each mistake prints, typed in a folder of its own."""
    from meshwright.cli import main

    here = Path.cwd()
    said = []
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        os.chdir(folder)
        try:
            for mistake, command in MISTAKES:
                out = io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    code = main(shlex.split(command))
                said.append(Said(mistake, command, code, out.getvalue()))
        finally:
            os.chdir(here)
    return said


def table(said: list[Said]) -> str:
    lines = ["# What typical mistakes print", "", "Written by `benchmarks/mistakes.py`.", ""]
    lines += ["| mistake | command | exit | printed |", "|---|---|---|---|"]
    for s in said:
        text = "<br>".join(" ".join(line.split()) for line in s.text.strip().splitlines()).replace("|", "\\|")
        lines.append(f"| {s.mistake} | `meshwright {s.command.replace('|', '/')}` | {s.code} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ["MESHWRIGHT_PROGRESS"] = "0"  # it depends on the load
    with tempfile.TemporaryDirectory(prefix="mistakes-labs-") as labs:
        os.environ["MESHWRIGHT_LAB_DIR"] = labs  # not the labs that happen to be up
        answers = all_said()
    if "--write" in sys.argv:
        (ROOT / "benchmarks" / "results" / "mistakes.md").write_text(table(answers), encoding="utf-8")
    for answer in answers:
        print(f"$ meshwright {answer.command}   [{answer.code}]\n{answer.text.rstrip()}" + "".join(f"\n  FAULT: {x}" for x in answer.faults()))
    bad = [answer for answer in answers if answer.faults()]
    print(f"{len(answers)} mistakes, {len(bad)} with a fault")
    sys.exit(1 if bad else 0)
