"""Proofs about pipeline plans: what every step consumes and produces, and work put into idle time."""
