"""Plans, programs and what goes with them: fills, traffic, arenas, schedules; names of files in a run folder."""
