"""Processes of this machine: their state, their share of the cores, what else runs on it."""
