"""Table plans that run: sharded embedding bags, forward and backward, between processes."""

from .sharded import ShardedTables

__all__ = ["ShardedTables"]
