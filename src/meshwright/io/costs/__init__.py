"""Measured seconds: cost tables, performance tables of GPUs, layer profiles."""
