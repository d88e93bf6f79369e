"""A byte-level tokenizer as GPT-2's, small enough to look through: every byte, a few merges, one special token."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from levanter.compat.hf.tokenizer import FastTokenizer

END = "<|eot|>"


def byte_level() -> FastTokenizer:
    """The tokenizer; its last id is `END`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: n for n, piece in enumerate(alphabet)}
    merges = [("Ġ", "a"), ("Ġa", "n"), ("i", "c"), ("æ", "Ĺ"), ("ð", "Ł")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(END, special=True)])
    return FastTokenizer(json.loads(built.to_str()), name="bytes")
