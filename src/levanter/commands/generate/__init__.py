"""Text from a model: `generate`."""
