"""Folded programs of many ranks: proved on the representatives, and that these stand for the others."""
