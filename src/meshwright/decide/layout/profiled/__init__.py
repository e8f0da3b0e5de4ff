"""Predict and choose layouts from measured layer profiles (Metis, Sailor, our own profiler), instead of from a model's own graph."""
