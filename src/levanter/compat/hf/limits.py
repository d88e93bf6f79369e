"""Sizes that Hugging Face checkpoints keep to."""

MAX_SHARD_BYTES = 5 * 10**9
"""Of one file of weights, where nobody asks for less or more."""
