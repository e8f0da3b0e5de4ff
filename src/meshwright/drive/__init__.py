"""Composes decisions into plans, and checks every plan. Nothing else makes plans."""
