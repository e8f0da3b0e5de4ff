"""What a rank leaves behind: times of steps, modules and links, and profiler traces."""
