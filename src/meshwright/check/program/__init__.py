"""One program: its form, deadlock, races, what its buffers hold at the end, its memory in the worst order, its messages on links."""
