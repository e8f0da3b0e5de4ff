"""A switch in software that sums what workers send, over UDP, without wrong sums on a network that loses, doubles, delays and reorders packets."""
