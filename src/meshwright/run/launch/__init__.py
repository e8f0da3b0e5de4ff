"""Starts ranks, watches them, ends them, and reads what they left behind: `train run` and rehearsals."""
