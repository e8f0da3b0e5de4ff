"""Several groups at once on shared links."""
