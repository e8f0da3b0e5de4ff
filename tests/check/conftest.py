"""The programs and the interpreter that the tests here share are imported by name, whatever pytest's import mode."""

import sys
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
