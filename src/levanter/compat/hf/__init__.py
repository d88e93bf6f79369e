"""Hugging Face checkpoints: references, files, configs, tokenizers.

`compat.open` is the door, above this folder and `compat.gguf`, which uses parts of this one. This file imports nothing.
"""
