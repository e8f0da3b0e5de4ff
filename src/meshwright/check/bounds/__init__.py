"""Certificates of lower bounds, recomputed in exact rationals."""
