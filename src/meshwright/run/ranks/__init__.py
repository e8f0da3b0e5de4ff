"""Starts the ranks of this machine from one warm process, watches them, names the first cause of a failure, ends them."""
