"""Jobs that are one or several collectives: ranked schedules, check, plan; and plans for a fabric with parts down."""
