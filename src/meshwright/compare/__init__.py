"""Predictions beside measurements, and runs beside each other."""
