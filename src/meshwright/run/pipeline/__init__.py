"""Pipeline schedules on real processes: given stage modules, or stages that do little and last as long as the plan says."""
