"""Commands one after the other in one interpreter: to start it and to import what they need costs more than most of them."""

from __future__ import annotations

PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from meshwright.cli import main

said = []
for command in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(command)
    said.append((code, out.getvalue(), err.getvalue()))
"""
SAYS = "print(json.dumps(said))\n"  # for each command: its exit code and both streams
