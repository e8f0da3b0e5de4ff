"""The only place that composes decisions into plans."""
