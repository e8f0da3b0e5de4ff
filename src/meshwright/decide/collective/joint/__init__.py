"""Reduce and broadcast trees packed together: all-reduce at the optimum of its linear program, also over switches that add and copy."""
