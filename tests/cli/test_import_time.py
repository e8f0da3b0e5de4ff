"""What is cheap stays cheap: heavy packages are not loaded by the import or by help. (Times: benchmarks/import_time.py.)"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.interpreter
HEAVY = {"torch", "numpy", "numba", "highspy", "scipy", "pandas", "pyarrow", "networkx", "hypothesis", "safetensors"}

IMPORT = "import meshwright"
CLI = "import sys; from meshwright.cli import main; out, sys.stdout = sys.stdout, sys.stderr; main({argv!r}); sys.stdout = out"


def loaded(code):
    """Top-level packages in sys.modules after `code` in a fresh process."""
    script = f"{code}\nimport json, sys; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=200, check=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


LIGHT = [IMPORT, *(CLI.format(argv=argv) for argv in (["--help"], ["fabric", "--help"], ["train", "--help"], ["--version"]))]


@pytest.mark.parametrize("code", LIGHT)
def test_nothing_heavy(code):
    assert not loaded(code) & (HEAVY | {"msgspec"})


@pytest.mark.parametrize("argv", [["fabric", "list"], ["fabric", "show", "dgx-a100:2"], ["completion", "bash"]])
def test_fabric_commands_need_nothing_heavy(argv):
    assert not loaded(CLI.format(argv=argv)) & HEAVY


def test_the_check_can_fail():
    assert "numpy" in loaded("import numpy")
