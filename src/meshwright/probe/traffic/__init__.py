"""Profiles of gradient traffic, fitted to steps of the training itself."""
