"""What no schedule can beat: bounds on bandwidth and latency, with certificates, and what would move them."""
