"""A fabric inferred from transfers between its ends."""
