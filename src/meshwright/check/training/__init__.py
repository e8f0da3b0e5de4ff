"""Training steps: every gradient holds what it must when the optimizer reads it, whatever is divided, compressed or computed again."""
