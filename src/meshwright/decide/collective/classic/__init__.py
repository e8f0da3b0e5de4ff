"""The textbook algorithms, one module each, and a choice among them."""
