"""Strategies: one package per decision, each independent of the others."""
