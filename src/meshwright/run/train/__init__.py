"""What one rank computes: segments forward and backward, optimizer, data, compressed sums; and the serial run beside it."""
