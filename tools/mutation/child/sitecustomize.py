"""Found by every Python process that a test starts while lines are recorded: this folder is on its PYTHONPATH then."""

from mutation.lines import record_child

record_child()
