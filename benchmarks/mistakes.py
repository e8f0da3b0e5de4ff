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
INSIDE = ("Traceback", "unexpected ", "AssertionError", "KeyError", "NoneType", "object has no attribute", "is a bug", "File \"", "<class", " 0x")

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
}

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
    answers = all_said()
    if "--write" in sys.argv:
        (ROOT / "benchmarks" / "results" / "mistakes.md").write_text(table(answers), encoding="utf-8")
    for answer in answers:
        print(f"$ meshwright {answer.command}   [{answer.code}]\n{answer.text.rstrip()}" + "".join(f"\n  FAULT: {x}" for x in answer.faults()))
    bad = [answer for answer in answers if answer.faults()]
    print(f"{len(answers)} mistakes, {len(bad)} with a fault")
    sys.exit(1 if bad else 0)
