"""The exact ledger of a training step: bytes kept for backward per operator, and floating-point operations, MFU and HFU.

Three roads to the same bytes, tested equal: formulas for a described transformer (`layer`, `stage`), a captured graph (`captured`), and
hooks on a real module (`meshwright.probe.costs.saved_bytes`). Storages are counted once each; parameters never.
"""
