"""Traces: Chrome JSON and Perfetto, read and written, and module trees beside them."""
