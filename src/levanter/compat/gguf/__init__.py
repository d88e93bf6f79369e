"""GGUF files (llama.cpp): one file with weights, config and tokenizer, read as if it were a Hugging Face checkpoint."""

from levanter.compat.gguf.config import hf_document
from levanter.compat.gguf.file import GgufFile, open_gguf
from levanter.compat.gguf.source import GgufSource
from levanter.compat.gguf.tokenizer import tokenizer

__all__ = ["GgufFile", "GgufSource", "hf_document", "open_gguf", "tokenizer"]
