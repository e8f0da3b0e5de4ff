"""Numeric kernels, each with a plain twin in the tests."""
