"""Cloud Collectives: the order of ranks that suits the network."""
