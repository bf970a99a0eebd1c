"""From a traced network to an engine directory: lowerings per target, weights, manifest."""
