"""Generated wrong inputs against what must refuse them, for as long as one likes: `python -m meshwright.testing soak`."""

from .run import SOAKS, soak

__all__ = ["SOAKS", "soak"]
