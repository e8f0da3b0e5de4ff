"""Networks with and without switches: HammingMesh and its rivals, their parts, bandwidths and rings, and where jobs fit on boards."""
