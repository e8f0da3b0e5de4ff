"""What is measured before a plan: fabrics, costs, steps, traffic."""
