"""`load_from_repository`: a tokenizer from its files, with the special tokens that `AutoTokenizer` gives a text.

`tokenizer.json` defines how a text becomes ids: its vocabulary, its rules, and the post-processor that puts special
tokens around a text. The files beside it name the special tokens and add further ones. They are read as transformers 5
reads them:

- tokenizer_config.json names tokens (`bos_token`, …) and may list added tokens by id (`added_tokens_decoder`). Only
  where it has no such list do special_tokens_map.json, whose names then win, and added_tokens.json count.
- A name that no file has is that of the tokenizer's class (`GPT2Tokenizer`: `<|endoftext|>`); null means no token.
- Every token that these files name or list is added to the vocabulary, so that a text that contains it is not cut into
  pieces. One for which the model of the same folder has no row is left out, because its id could not be used.
- With a tokenizer.json `add_bos_token` and `add_eos_token` have no effect: the post-processor decides.

config.json names no special tokens: its `bos_token_id` is an id that generation may begin with, not a rule for texts.
A class never replaces rules of tokenizer.json. (transformers 5 rebuilds some classes from their vocabulary alone, which
loses, for instance, the separate digits of SmolLM2's `GPT2Tokenizer`.)
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from levanter.base.bounded_json import lone_surrogate
from levanter.compat.hf.errors import CheckpointError, CorruptFileError, MissingCheckpointFileError
from levanter.compat.hf.repository import Repository, read_json
from levanter.compat.hf.token_bytes import count_ids, vocabulary
from levanter.compat.hf.tokenizer import DEFINITION, FastTokenizer, build_backend

_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
_SETTINGS, _TOKENS_MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = "additional_chat_templates/"
"""The folder of further chat templates, each a file with its name."""
_ENDS = ("generation_config.json", "config.json")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names of special tokens that every tokenizer may have."""

_END_OF_TEXT = "<|endoftext|>"
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    "GPTNeoXTokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT)
    | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "CodeLlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {name: f"<{name.removesuffix('_token')}>" for name in _NAMES if name[:3] not in ("sep", "cls")},
    "BertTokenizer": {
        name: f"[{name.removesuffix('_token').upper()}]" for name in _NAMES if name not in ("bos_token", "eos_token")
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "RobertaTokenizer": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
        "cls_token": "<s>", "mask_token": "<mask>",
    },
}  # fmt: skip
"""Special tokens of tokenizer classes of transformers where no file names them."""

_GENERIC = "TokenizersBackend"
_MODEL_CLASSES: Mapping[str, str] = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "phi", "opt", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe", "mamba", "mamba2"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("mistral", "mixtral", "olmo2", "olmo3", "phi3", "nemotron"), _GENERIC),
}
"""The class that transformers registers for a `model_type`. Other types have none, and the folder's class counts."""


@dataclass(frozen=True)
class _Files:
    """The parsed files beside the definition; empty for those that are not there."""

    settings: Mapping[str, Any]
    tokens_map: Mapping[str, Any]
    added: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, repository: Repository) -> "_Files":
        def parsed(file: str) -> Mapping[str, Any]:
            if file not in repository.files:
                return {}
            content = read_json(repository, file, purpose="special tokens")
            # JSON can spell half of a surrogate pair, which no text contains.
            if (at := lone_surrogate(text := json.dumps(content, ensure_ascii=False))) is not None:
                raise CorruptFileError(repository.where(file), f"it has U+{ord(text[at]):04X}, which no text contains")
            return content

        return cls(*map(parsed, (_SETTINGS, _TOKENS_MAP, _ADDED, "config.json")))

    @property
    def rows(self) -> int | None:
        """The rows of the model's embedding table; None without a model."""
        text = self.config.get("text_config")
        sizes = (part.get("vocab_size") for part in (self.config, text) if isinstance(part, Mapping))
        return next((size for size in sizes if type(size) is int), None)


def load_from_repository(repository: Repository, *, file: str = DEFINITION) -> FastTokenizer:
    """Loads the tokenizer from the files of a repository.

    Raises:
        MissingCheckpointFileError: there is none.
        CorruptFileError: it cannot be read.
    """
    files = _Files.read(repository)
    if file in repository.files:
        definition = read_json(repository, file, purpose="the tokenizer")
        if not isinstance(definition.get("model"), dict):
            raise CorruptFileError(repository.where(file), "it is not a tokenizer.json: it has no model")
        if not _is_vocabulary(definition["model"].get("vocab", {})):
            raise CorruptFileError(
                repository.where(file), "model.vocab: expected an object of tokens and ids, or a list of [token, score]"
            )
        if not _are_tokens(definition.get("added_tokens")):
            raise CorruptFileError(
                repository.where(file), "added_tokens is not a list of tokens, each with content and id"
            )
        named, listed, extra = _special_tokens(files, definition)
        where = repository.where(_SETTINGS if _SETTINGS in repository.files else file)
        definition = _with_added_tokens(definition, named, listed, extra, rows=files.rows, where=where)
        names = {name: str(token.content) for name, token in named.items()}
    # Only for the default name: a file that was asked for by name is not replaced by a conversion.
    elif file == DEFINITION and any(name in repository.files for name in _SLOW):
        definition, names = _convert(repository)
    else:
        raise MissingCheckpointFileError(
            repository.name, f"there is no tokenizer ({file}); it has {', '.join(sorted(repository.files)[:8])}"
        )
    ids = vocabulary(definition)
    # Added tokens win: a vocabulary may hold the same text as an ordinary token.
    ids |= {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    return FastTokenizer(
        definition,
        name=repository.name,
        **{f"{role}_id": ids.get(names.get(f"{role}_token", "")) for role in ("bos", "eos", "pad")},
        named_tokens=names,
        chat_template=chat_templates(repository, files.settings),
        end_ids=_end_ids(repository),
        splits_special=files.settings.get("split_special_tokens") is True,
    )


MAX_ID = 1 << 27
"""Largest id of a token: tables have a row for each."""


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def _is_vocabulary(vocab: object) -> bool:
    """Whether a value is valid as `model.vocab` of a tokenizer.json; a list is that of a Unigram model."""
    if isinstance(vocab, list):
        return all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocab)
    return isinstance(vocab, dict) and all(map(_is_id, vocab.values()))


def _are_tokens(added: object) -> bool:
    """Whether a value is valid as `added_tokens` of a tokenizer.json."""
    if added is None:
        return True
    return isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and _is_id(token.get("id")) for token in added
    )


_Token = tokenizers.AddedToken
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _token(value: object, *, special: bool) -> _Token | None:
    """A token as a settings file writes it: its text, or an object with its flags; None if it is neither."""
    if isinstance(value, str):
        return _Token(value, special=special)
    if isinstance(value, Mapping) and isinstance(content := value.get("content"), str):
        flags = {name: flag for name in _FLAGS if isinstance(flag := value.get(name), bool)}
        return _Token(content, **{"special": special, **flags})
    return None


def _tokens(values: object) -> Iterator[_Token]:
    """The special tokens of a list."""
    for value in values if isinstance(values, list) else ():
        if (token := _token(value, special=True)) is not None:
            yield token


def _special_tokens(
    files: _Files, definition: Mapping[str, Any]
) -> tuple[dict[str, _Token], dict[int, _Token], list[_Token]]:
    """The named special tokens, the added tokens that are listed with an id, and the special tokens without a name."""
    settings = dict(files.settings)
    listed: dict[int, _Token] = {}
    by_id = settings.get("added_tokens_decoder")
    if isinstance(by_id, Mapping):
        pairs = ((int(i), _token(value, special=False)) for i, value in by_id.items() if str(i).isdecimal())
        listed = {i: token for i, token in pairs if token is not None}
    else:
        # The older files count only without the list; null in them removes a name.
        settings |= files.tokens_map
    values = files.settings.get("extra_special_tokens") or files.settings.get("additional_special_tokens")
    # A list of tokens, or in newer files an object of names and tokens.
    named_extra = values if isinstance(values, Mapping) else {}
    extra = list(_tokens(values))
    if not isinstance(by_id, Mapping):
        extra += [token for token in _tokens(files.tokens_map.get("extra_special_tokens")) if token not in extra]
    # Tokens that added_tokens.json lists are special if one of these names them.
    stated = [*extra, *_tokens([settings.get(name) for name in _NAMES])]
    if not values and not isinstance(by_id, Mapping) and "extra_special_tokens" not in files.tokens_map:
        extra = list(_tokens(files.tokens_map.get("additional_special_tokens")))
    further = {name: settings[name] for name in settings if name.endswith("_token") and name not in _NAMES}
    names = {
        **_CLASS_TOKENS.get(_tokenizer_class(files, definition), {}),
        **{name: settings[name] for name in _NAMES if name in settings},
        **further,
        **named_extra,
    }
    pairs = ((name, _token(value, special=True)) for name, value in names.items())
    named = {name: token for name, token in pairs if token is not None}
    if not isinstance(by_id, Mapping):
        special = {token.content for token in stated}
        for content, i in files.added.items():
            if isinstance(content, str) and type(i) is int:
                listed[i] = _Token(content, special=content in special, normalized=content not in special)
    # The flags of a listed token are those of its list.
    flags = {token.content: token for token in listed.values()}
    return {name: flags.get(token.content, token) for name, token in named.items()}, listed, extra


def _tokenizer_class(files: _Files, definition: Mapping[str, Any]) -> str:
    """The class that transformers chooses for a folder, which names the special tokens that no file names."""
    declared = files.settings.get("tokenizer_class") or files.config.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if isinstance(declared, str) else None
    model = files.config.get("model_type")
    registered = _MODEL_CLASSES.get(model) if isinstance(model, str) else None
    # Llama 3's folders say `LlamaTokenizer`, which is not what their definition is.
    if declared == "LlamaTokenizer" and '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")):
        return _GENERIC
    if declared is not None and registered == _GENERIC:
        return _GENERIC
    # Folders of Qwen2 name several classes, none of which counts.
    if declared is None or (model == "qwen2" and registered is not None):
        return registered or _GENERIC
    return declared


def _with_added_tokens(
    definition: Mapping[str, Any],
    named: Mapping[str, _Token],
    listed: Mapping[int, _Token],
    extra: Sequence[_Token],
    *,
    rows: int | None,
    where: str,
) -> Mapping[str, Any]:
    """The definition with the tokens that the files beside it add.

    Args:
        definition: the parsed tokenizer.json.
        named: special tokens by name.
        listed: added tokens by the id that a file states.
        extra: special tokens without a name.
        rows: rows of the model's embedding table; None without a model.
        where: the file of the settings, in messages.
    """
    before = [{**dict.fromkeys(_FLAGS, False), **token} for token in definition.get("added_tokens") or ()]
    present = {token["content"]: token for token in before}
    # Listed tokens first, by id, then the others in the order of their files: the library numbers them in this order.
    tokens = [listed[i] for i in sorted(listed)]
    contents = {token.content for token in tokens}
    for token in (*named.values(), *extra):
        if token.content not in contents and token.content not in present:
            contents.add(token.content)
            tokens.append(token)
    specials = {token.content for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in specials
    ids = vocabulary(definition)
    new = [token for token in tokens if token.content not in present and token.content not in ids]
    # Ids of new tokens follow those of the vocabulary.
    free = len(new) if rows is None else max(0, rows - count_ids(definition))
    without_row = {token.content for token in new[free:]}
    tokens = [token for token in tokens if token.content not in without_row]
    changed = [
        token
        for token in tokens
        if (old := present.get(token.content)) is None or any(old[flag] != getattr(token, flag) for flag in _FLAGS)
    ]
    if not changed:
        return definition
    backend = build_backend({**definition, "truncation": None, "padding": None, "post_processor": None}, where)
    backend.add_tokens(tokens)
    after = backend.get_added_tokens_decoder()
    added = [
        {"id": i, "content": token.content, **{flag: getattr(token, flag) for flag in _FLAGS}}
        for i, token in sorted(after.items())
    ]
    return {**definition, "added_tokens": added}


def chat_templates(repository: Repository, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """The chat templates by name: those of files, or else those of the settings; a single one is `default`."""
    files = {
        file[len(CHAT_TEMPLATES) : -len(".jinja")]: file
        for file in sorted(repository.files)
        if file.startswith(CHAT_TEMPLATES) and file.endswith(".jinja")
    }
    if CHAT_TEMPLATE in repository.files:
        files["default"] = CHAT_TEMPLATE
    if files:
        return {name: repository.text(file).decode("utf-8", "replace") for name, file in files.items()}
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {part.get("name"): part.get("template") for part in template if isinstance(part, Mapping)}
    if isinstance(template, str):
        return {"default": template}
    named = template if isinstance(template, Mapping) else {}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _end_ids(repository: Repository) -> tuple[int, ...]:
    """The ids that end a text according to the model's files; transformers stops at the first of these."""
    end_ids: list[int] = []
    for file in _ENDS:
        if file in repository.files:
            value = read_json(repository, file, purpose="the ids that end a text").get("eos_token_id")
            # `type(i) is int` excludes booleans, which isinstance would accept.
            end_ids += [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
    return tuple(end_ids)


def _convert(repository: Repository) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Converts older tokenizer files to a tokenizer.json and the names of special tokens, by transformers."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for file in (*_SLOW, _SETTINGS, _TOKENS_MAP, _ADDED, "config.json"):
            if file in repository.files:
                (Path(folder) / file).write_bytes(repository.text(file))
        try:
            # From a local copy of the tokenizer's files only, so that
            # transformers neither downloads nor runs anything else.
            converted = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
            return json.loads(converted.backend_tokenizer.to_str()), dict(converted.special_tokens_map)
        except (ImportError, ValueError, OSError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                repository.name,
                f"there is no {DEFINITION}, and transformers cannot make one from the older files "
                f"({str(error).splitlines()[0]})",
                suggestion="pip install sentencepiece (or tiktoken), or add a tokenizer.json",
            ) from error
