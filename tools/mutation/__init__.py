"""Mutation of the package's own source: small wrong changes, and which of them the tests of a room notice."""
