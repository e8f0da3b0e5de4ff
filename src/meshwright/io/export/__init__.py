"""A training plan's layout in other systems' words: one file for each tool or scheduler."""
