"""One training step of a plan beside its owner's module, on the same samples: equal, or an error that says what differs."""
