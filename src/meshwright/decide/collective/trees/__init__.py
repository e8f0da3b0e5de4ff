"""Spanning trees of a fabric: packed, exactly or as a linear program, their symmetries, the shards that they carry, and their steps."""
