"""All pairs' messages over many paths at once: permutations and all-to-alls at the optimum of the fabric."""
