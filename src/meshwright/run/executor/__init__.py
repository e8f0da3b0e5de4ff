"""Walks a rank's columns of a program with real tensors and messages."""
