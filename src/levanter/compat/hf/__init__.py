"""Hugging Face checkpoints: references, files, configs, tokenizers.

`compat.open` opens a checkpoint of this folder or of `compat.gguf`, which uses parts of this one. This file imports
nothing.
"""
