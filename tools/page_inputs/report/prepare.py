"""The reader's traces: the same two steps, before and after a change."""

import runpy
import shutil

runpy.run_path("two_steps.py")
shutil.copy("trace.json", "before.json")
shutil.copy("trace.json", "after.json")
