"""Inference: text from a model, many sequences at a time, over a KV cache that may be sharded.

A *request* has a prompt and asks for `n` *choices*. A *row* is an entry of the axis `batch`, and the choice that it
holds is a running sequence. The cache consists of *pages* of consecutive positions.
"""
