"""Execution traces: Chakra, and what PyTorch observes of one."""
