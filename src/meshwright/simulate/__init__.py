"""What a program does on a fabric, in virtual time: one deterministic event engine for every plan.

    timeline = simulate_program(program, fabric, placement, cost, works=works)

Equal inputs give equal bits. See `engine` for the order of things at one instant, `network` for the two models of a shared link.
"""

from .folded import simulate_folded
from .network import Mode, Network, compile_network
from .pricing import durations
from .program import Extreme, simulate_program, simulate_stored

__all__ = ["Extreme", "Mode", "Network", "compile_network", "durations", "simulate_folded", "simulate_program", "simulate_stored"]
