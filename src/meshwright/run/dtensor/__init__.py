"""Sharding plans (SBP) on processes: pieces, redistributions, one step, a whole run."""
