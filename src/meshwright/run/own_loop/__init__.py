"""A plan inside the owner's own training loop: `parallelize` gives a step of his model, on the ranks that he started."""
