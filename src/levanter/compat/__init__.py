"""Other projects' checkpoint formats, read into and written from ours.

`compat.hf` is the Hugging Face layout (config.json, safetensors, tokenizer.json); `compat.gguf` is the llama.cpp
file. `compat.open`, above both, opens whichever a reference names. Either way the nouns are the same: a model config, a
`TensorSource` with Hugging Face tensor names, a `Tokenizer`.
"""
