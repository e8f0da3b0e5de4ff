"""Training jobs: layout, sharding, schedule, memory, division, collectives and compression decided together."""
