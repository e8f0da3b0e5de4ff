"""Every parser of an outside file, bounded and typed; and the writers beside them."""
