"""Top layer: configuration, command line, plan, reports; the only place that builds things."""
