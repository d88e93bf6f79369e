"""Hugging Face checkpoints: references, files, configs, tokenizers.

`checkpoint.open_checkpoint` is the door; `tokenizer.load` and `config_bridge` serve where only a part is wanted. This
file imports nothing, so that `compat.gguf` can use the parts.
"""
