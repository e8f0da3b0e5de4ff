"""Checkpoints: written by rank, read by any layout."""
