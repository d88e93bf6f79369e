"""Inference: text from a model, many sequences at a time, over a cache of keys and values that may be sharded.

A *row* is a running sequence, an entry of `batch`. A *request* asks for `n` *choices*, each of which is a row. The
cache consists of *pages*, and a *slot* is a position inside one.
"""
