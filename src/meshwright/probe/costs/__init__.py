"""Costs by name, from measured tables of GPUs, and of a layout on this machine."""
