"""Schedules of other tools: MSCCL, MSCCL++, sketches of TACCL."""
