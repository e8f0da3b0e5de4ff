"""Searches for layouts of a captured model on a fabric, before any plan is made."""
