"""A placement on real processes: one per device, under its share of a core, with messages over sockets (`run`)."""
