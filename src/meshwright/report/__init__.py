"""Draws and prints: pages, pictures, tables, documents. Decides nothing."""
