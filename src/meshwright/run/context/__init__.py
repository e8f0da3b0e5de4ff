"""Context parallelism: attention over positions that several ranks hold."""
