"""Training steps measured here, operator by operator and whole, and planned by what was measured."""
