"""Embedding lookups and their exchanges, measured on the user's own machine, and the cost nets that learn from them."""
