"""Folders of tokenizers drawn by a seed: kinds of vocabulary, post-processors, and special tokens in every file."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

WORDS = (
    "the", "value", "of", "a", "river", "crosses", "17", "low", "stones", "and", "then,", "it's", "over!", "naïve",
    "café", "日本語", "\ufb01ne", "Ünïcode", "🤖🎉", "x²",
)  # fmt: skip
SPECIAL = ("<s>", "</s>", "<unk>", "<pad>")
ADDED = ("<|call|>", "<|img|>", "wordlike", "<x y>")
KINDS = ("byte level", "sentencepiece", "sentencepiece bytes", "unigram", "wordpiece", "wordlevel")


def drawn_text(rng: random.Random) -> str:
    """A text of words, special tokens, spaces and signs."""
    pieces = rng.choices([*WORDS, *SPECIAL, *ADDED, " ", "  ", "\n", "\t", "ab", ""], k=rng.randint(0, 9))
    return rng.choice(["", " ", "  "]) + rng.choice([" ", ""]).join(pieces)


def build(kind: str) -> Tokenizer:
    """A trained tokenizer without post-processor, whose special tokens have the ids 0 to 3."""
    corpus = [" ".join(random.Random(n).choices(WORDS, k=12)) for n in range(60)]
    options: dict[str, Any] = dict(vocab_size=340, special_tokens=list(SPECIAL), show_progress=False)
    if kind == "byte level":
        built = Tokenizer(models.BPE())
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    elif kind.startswith("sentencepiece"):
        bytes_too = kind == "sentencepiece bytes"
        built = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=bytes_too))
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        built.decoder = decoders.Sequence(steps)
        if bytes_too:
            options["special_tokens"] = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(**{**options, "vocab_size": 420}, limit_alphabet=24)
    elif kind == "unigram":
        built = Tokenizer(models.Unigram())
        built.normalizer = normalizers.NFKC()
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**{**options, "vocab_size": 90}, unk_token="<unk>")
    elif kind == "wordpiece":
        built = Tokenizer(models.WordPiece(unk_token="<unk>"))
        built.normalizer = normalizers.BertNormalizer()
        built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        built.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    else:
        built = Tokenizer(models.WordLevel(unk_token="<unk>"))
        built.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(**options)
    built.train_from_iterator(corpus, trainer)
    definition = json.loads(built.to_str())
    # Byte tokens are part of the vocabulary only.
    definition["added_tokens"] = [t for t in definition["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(definition))


def template(before: Sequence[str], after: Sequence[str], tokens: Sequence[str] = SPECIAL) -> dict[str, Any]:
    """A post-processor that puts tokens around a text; their ids are their places in `tokens`."""
    special = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in (*before, *after)}
    around = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens] for tokens in (before, after)]
    text, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    single = [*around[0], text, *around[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second], "special_tokens": special}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_AROUND = {"sep": ["</s>", 1], "cls": ["<s>", 0]}
POST_PROCESSORS: tuple[dict[str, Any] | None, ...] = (
    None,
    template(("<s>",), ()),
    template(("<s>",), ("</s>",)),
    template((), ("</s>",)),
    BYTES,
    {"type": "Sequence", "processors": [BYTES, template(("<s>",), ())]},
    {"type": "BertProcessing", **_AROUND},
    {"type": "RobertaProcessing", **_AROUND, "trim_offsets": True, "add_prefix_space": True},
)


def _added(rng: random.Random, files: dict[str, dict[str, Any]], size: int) -> None:
    """Tokens that stand only in files beside the definition."""
    settings, tokens_map, token = files["tokenizer_config.json"], files["special_tokens_map.json"], rng.choice(ADDED)
    where = rng.choice(["none", "by id", "added_tokens", "map", "extra", "extra names", "named", "pad"])
    flags = {name: rng.random() < 0.4 for name in ("lstrip", "rstrip", "normalized", "single_word", "special")}
    if where == "by id":
        settings["added_tokens_decoder"] = {str(size): {"content": token, **flags}, "1": {"content": "</s>", **flags}}
    elif where == "added_tokens":
        files["added_tokens.json"] = {token: size, ADDED[0]: size + 1} if token != ADDED[0] else {token: size}
        tokens_map["additional_special_tokens"] = rng.choice([[token], []])
    elif where == "map":
        tokens_map["additional_special_tokens"] = [token]
    elif where == "extra":
        settings[rng.choice(["extra_special_tokens", "additional_special_tokens"])] = [token, "<s>"]
    elif where == "extra names":
        settings["extra_special_tokens"] = {"image_token": token}
    elif where == "named":
        settings["image_token"] = token
    elif where == "pad":
        settings["pad_token"] = token


def write_drawn(folder: Path, seed: int) -> str:
    """Writes a folder; returns a description of what was drawn."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    definition = json.loads(build(kind).to_str())
    definition["post_processor"] = rng.choice(POST_PROCESSORS)
    if definition["post_processor"] in (BYTES, *POST_PROCESSORS[5:6]) and kind != "byte level":
        definition["post_processor"] = template(("<s>",), ())
    size = len(definition["model"]["vocab"])
    files: dict[str, dict[str, Any]] = {name: {} for name in ("tokenizer_config.json", "special_tokens_map.json")}
    settings, tokens_map = files["tokenizer_config.json"], files["special_tokens_map.json"]
    bos = rng.choice(["null", "absent", "settings", "map", "contradiction", "null in the map"])
    if bos in ("settings", "contradiction", "null in the map"):
        settings["bos_token"] = "<s>"
    if bos in ("map", "contradiction"):
        tokens_map["bos_token"] = {"map": {"content": "<s>", "lstrip": False}, "contradiction": "<pad>"}[bos]
    if bos == "null":
        settings["bos_token"] = None
    if bos == "null in the map":
        tokens_map["bos_token"] = None
    settings |= {"eos_token": "</s>"} if rng.random() < 0.7 else {}
    settings |= {"add_bos_token": rng.random() < 0.5} if rng.random() < 0.6 else {}
    settings |= {"split_special_tokens": True} if rng.random() < 0.1 else {}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"} if rng.random() < 0.8 else {}
    _added(rng, files, size)
    if rng.random() < 0.5:
        files["config.json"] = {"model_type": "llama", "bos_token_id": 2, "eos_token_id": 3, "vocab_size": 512}
    folder.mkdir(parents=True)
    for name, content in {"tokenizer.json": definition, **files}.items():
        if content:
            (folder / name).write_text(json.dumps(content))
    rules = definition["post_processor"] and definition["post_processor"]["type"]
    return f"{seed}: {kind}, BOS {bos}, {rules}, {files}"
