"""BlueConnect: all-reduce as stages over a hierarchy."""
