"""A plan inside the owner's own training loop: `parallelize` gives a step of the owner's model, on ranks that run already."""
