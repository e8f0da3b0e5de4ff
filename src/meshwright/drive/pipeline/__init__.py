"""Pipeline schedules from a problem: all that apply beside each other, one as a checked plan, its idle time filled."""
