"""Sizes that Hugging Face checkpoints keep to."""

MAX_SHARD_BYTES = 5 * 10**9
"""The default size of one file of weights."""
