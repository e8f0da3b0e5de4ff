"""Where the time of measured steps went, across ranks: lanes of exclusive pieces, aligned clocks, the critical path, and what to do about it."""
