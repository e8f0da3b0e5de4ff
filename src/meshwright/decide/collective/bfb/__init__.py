"""Breadth-first broadcasts on direct connections: every shard travels along all its shortest ways."""
