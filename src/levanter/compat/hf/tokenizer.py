"""`FastTokenizer`: a `tokenizer.json` behind the `Tokenizer` protocol, based on the `tokenizers` library.

The definition alone determines the result: it is loaded without transformers, and its truncation, padding and
post-processing are removed (byte-level post-processing would trim spaces off the spans). Its SHA-256 is the tokenizer's
identity in caches and results. The special tokens that the post-processor puts around a text are `frame`, which
generation and serving apply; training and evaluation add BOS and EOS by their own keys (`levanter.data`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from levanter.compat.hf.errors import ConfigMismatchError, CorruptFileError
from levanter.compat.hf.token_bytes import byte_lengths, count_ids, spelled_bytes, text_loss, unknown_id
from levanter.data.incremental_detokenizer import WindowStream
from levanter.data.tokenizer import TextFrame, TextStream, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

DEFINITION = "tokenizer.json"
_ROLES = ("bos", "eos", "pad")


class FastTokenizer:
    """A `Tokenizer` over a tokenizer.json definition.

    Attributes:
        name: its source, in messages.
        definition: the parsed tokenizer.json, as it encodes here.
        post_processor: the definition's post-processor, which is not applied here; exports write it.
        frame: the special tokens that the post-processor puts around a text.
        bos_id: id of the token that begins a document.
        eos_id: id of the token that ends a document.
        pad_id: id of the token that fills up batches.
        named_tokens: special tokens by name (`bos_token`, …), for chat templates.
        chat_templates: Jinja templates that render a conversation as text, by name.
        end_ids: every id that ends a text, `eos_id` first: a model may have several, such as the end of a turn.
        splits_special: whether a special token in a text is cut into pieces like other text.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        name: str,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        end_ids: Sequence[int] = (),
        splits_special: bool = False,
    ):
        """Builds the tokenizer; a single chat template is the one named `default`.

        Raises:
            CorruptFileError: the `tokenizers` library cannot read the definition.
        """
        # Truncation or padding in a definition would silently cut or extend documents.
        self.definition = {**definition, "truncation": None, "padding": None, "post_processor": None}
        self.post_processor: Mapping[str, Any] | None = definition.get("post_processor")
        self.name = name
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self._tokenizer = build_backend(self.definition, name)
        self.splits_special = splits_special
        if splits_special:
            self._tokenizer.encode_special_tokens = True
        self.frame = _text_frame(self.post_processor, name)
        self.vocab_size = count_ids(self.definition)
        out = [
            f"{role} {i}" for role in _ROLES if (i := getattr(self, f"{role}_id")) is not None and i >= self.vocab_size
        ]
        out += [f"post-processor {i}" for i in (*self.frame.prefix, *self.frame.suffix) if i >= self.vocab_size]
        if out:
            raise ConfigMismatchError(name, f"special token ids {', '.join(out)} are outside its {self.vocab_size} ids")
        ids = {f"{role}_token": getattr(self, f"{role}_id") for role in _ROLES}
        roles = {role: text for role, i in ids.items() if i is not None and (text := self.token(i)) is not None}
        self.named_tokens: Mapping[str, str] = roles if named_tokens is None else dict(named_tokens)
        if isinstance(chat_template, str):
            chat_template = {"default": chat_template}
        self.chat_templates: Mapping[str, str] = dict(chat_template or {})
        # EOS first, then the ids of generation_config.json; ids beyond the vocabulary occur in published files.
        ends = (*(() if eos_id is None else (eos_id,)), *(i for i in end_ids if 0 <= i < self.vocab_size))
        self.end_ids = tuple(dict.fromkeys(ends))

    @property
    def chat_template(self) -> str | None:
        """The chat template of conversations without tools; None if the files have none of the name `default`."""
        return self.chat_templates.get("default")

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer's files put BOS before a text."""
        return self.bos_id is not None and self.frame.prefix[:1] == (self.bos_id,)

    def __len__(self) -> int:
        return self.vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids of each text, without special tokens."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encoded]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text and the span of characters of each.

        Tokens that hold parts of one character all have that character's span.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32), np.asarray(encoded.offsets, np.int32).reshape(-1, 2)

    def byte_lengths(self) -> np.ndarray:
        """The UTF-8 bytes each id stands for; 0 for special tokens.

        The space that SentencePiece vocabularies put before a text counts where its token has it.
        """
        return self._byte_lengths.copy()

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return byte_lengths(self.definition)

    def byte_counts(self, text: str, ids: np.ndarray) -> np.ndarray | None:
        """The UTF-8 bytes of a text that each of its ids stands for; see `Tokenizer.byte_counts`."""
        spellings = self._spelled_bytes
        spelled, content = b"".join(map(spellings.__getitem__, ids.tolist())), text.encode(errors="surrogatepass")
        if spelled not in (content, b" " + content):
            return None
        counts = self._spelled_lengths[ids]
        if len(spelled) > len(content):
            # The space that many vocabularies put before a text is the first byte of the first token that has any.
            counts[np.flatnonzero(counts)[0]] -= 1
        return counts

    def lost_text(self, ids: np.ndarray) -> str | None:
        """Why the bytes of ids without their text are not known; see `Tokenizer.lost_text`."""
        if (loss := self._text_loss) is not None:
            return f"tokenizer {self.name}: {loss}"
        unknown = unknown_id(self.definition)
        if unknown is not None and (count := int(np.count_nonzero(ids == unknown))):
            return f"{count:,} tokens are {self.token(unknown)}, which stands for any text"
        return None

    @cached_property
    def _text_loss(self) -> str | None:
        return text_loss(self.definition)

    @cached_property
    def _spelled_bytes(self) -> list[bytes]:
        return spelled_bytes(self.definition)

    @cached_property
    def _spelled_lengths(self) -> np.ndarray:
        return np.array([len(spelling) for spelling in self._spelled_bytes], np.int32)

    @property
    def adds_space(self) -> bool:
        """Whether a text begins with a space that the tokenizer adds."""
        (ids,) = self.encode_batch(["a"])
        return b"".join(self._spelled_bytes[i] for i in ids.tolist()).startswith(b" ")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sequence of ids, including special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def stream(self, context: Sequence[int] = (), *, special: bool = False) -> TextStream:
        """A stream that decodes a text as its ids arrive; see `Tokenizer.stream`."""
        skipped = frozenset[int]() if special else self._special_ids
        return WindowStream(self.decode, skipped=skipped, byte_ids=self._byte_ids, context=context)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.definition.get("added_tokens") or ()
        return frozenset(token["id"] for token in added if token.get("special"))

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the special tokens, by their spelling in the vocabulary."""
        added = self.definition.get("added_tokens") or ()
        return {token["content"]: token["id"] for token in added if token.get("special")}

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """The ids of single bytes, whose meaning depends on the bytes around them; empty for other decoders."""
        if '"ByteFallback"' not in json.dumps(self.definition.get("decoder")):
            return frozenset()
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def token(self, i: int) -> str | None:
        """A token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(i)

    def token_bytes(self, i: int) -> bytes:
        """The bytes that a token stands for within a text; for an added token, those of its spelling."""
        if i in self.added_ids:
            return (self.token(i) or "").encode()
        return self._spelled_bytes[i] if 0 <= i < len(self._spelled_bytes) else b""

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """The ids of tokens that were added to the vocabulary, special or not."""
        return frozenset(token["id"] for token in self.definition.get("added_tokens") or ())

    @property
    def document(self) -> Mapping[str, Any]:
        """The tokenizer.json, including its post-processor."""
        return {**self.definition, "post_processor": self.post_processor}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The tokenizer_config.json: special tokens and chat templates."""
        templates: Mapping[str, Any] = {}
        if self.chat_templates.keys() == {"default"}:
            templates = {"chat_template": self.chat_templates["default"]}
        elif self.chat_templates:
            named = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
            templates = {"chat_template": named}
        # Null, where there is none, because a reader would otherwise take the name of the tokenizer's class.
        names = dict.fromkeys(f"{role}_token" for role in _ROLES) | dict(self.named_tokens)
        return {**names, **templates, **({"split_special_tokens": True} if self.splits_special else {})}

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the definition and the roles of its special tokens."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        roles = {role: getattr(self, f"{role}_id") for role in _ROLES}
        # The roles are part of the hash: another EOS gives other documents from the same definition.
        # Only where it is true, so that the hash of other tokenizers is what it always was.
        splits = ["split_special_tokens"] if self.splits_special else []
        text = json.dumps([self.definition, roles, *splits], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def build_backend(definition: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """The tokenizer of the `tokenizers` library for a definition.

    Raises:
        CorruptFileError: the library cannot read the definition.
    """
    # The library raises plain Exceptions for malformed definitions.
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:
        raise CorruptFileError(where, f"it is not a tokenizer.json ({error})") from error


def _text_frame(post_processor: Mapping[str, Any] | None, where: str) -> TextFrame:
    """The special tokens that a post-processor puts around a text.

    Raises:
        CorruptFileError: the `tokenizers` library cannot read the post-processor, or it does not keep a text once.
    """
    if post_processor is None:
        return TextFrame()
    # A vocabulary of one word, so that the post-processor is applied to a text of one known token.
    word = {"type": "WordLevel", "vocab": {"text": 0}, "unk_token": "text"}
    probe = build_backend({"version": "1.0", "model": word, "post_processor": post_processor}, where)
    try:
        encoding = probe.encode("text")
    except BaseException as error:
        # Where a template names a token that it does not define, the library panics, which is no `Exception`.
        if type(error).__name__ != "PanicException":
            raise
        raise CorruptFileError(where, f"its post-processor cannot be applied ({error})") from error
    at = [n for n, special in enumerate(encoding.special_tokens_mask) if not special]
    if len(at) != 1:
        raise CorruptFileError(where, f"its post-processor keeps {len(at)} copies of a text, expected 1")
    return TextFrame(tuple(encoding.ids[: at[0]]), tuple(encoding.ids[at[0] + 1 :]))


def as_transformers(tokenizer: FastTokenizer) -> "PreTrainedTokenizerFast":
    """The same tokenizer as an object of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=build_backend(tokenizer.document, tokenizer.name), **dict(tokenizer.named_tokens)
    )


def from_transformers(tokenizer: "PreTrainedTokenizerBase") -> FastTokenizer:
    """A tokenizer of transformers as ours.

    Raises:
        TypeError: it has no definition that the `tokenizers` library reads.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(f"tokenizer: expected a transformers fast tokenizer, a name or a folder, got {tokenizer!r}")
    ids = {f"{role}_id": getattr(tokenizer, f"{role}_token_id") for role in _ROLES}
    templates = tokenizer.chat_template
    return FastTokenizer(
        json.loads(backend.to_str()),
        name=str(tokenizer.name_or_path),
        **ids,
        named_tokens=tokenizer.special_tokens_map,
        chat_template=templates if isinstance(templates, str | Mapping) else None,
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, *, where: object) -> None:
    """Checks that every id of a tokenizer has a row in the model's embedding table.

    A smaller tokenizer is fine: tables are often padded.

    Raises:
        ConfigMismatchError: the tokenizer has more ids.
    """
    if tokenizer.vocab_size <= vocab_size:
        return
    raise ConfigMismatchError(
        where,
        f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model's vocabulary {vocab_size}: "
        f"ids {vocab_size} to {tokenizer.vocab_size - 1} have no embeddings",
        suggestion="use the tokenizer that belongs to the model",
    )
