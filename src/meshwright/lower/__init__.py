"""Layouts to programs: one step of training on every rank, or on one rank of every stage."""

from .training import lower_training, training_works

__all__ = ["lower_training", "training_works"]
