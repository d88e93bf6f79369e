"""`FastTokenizer`: a `tokenizer.json` behind the `Tokenizer` protocol, based on the `tokenizers` library.

The definition alone determines the result: it is loaded without transformers, and its truncation, padding and
post-processing are removed (`levanter.data` adds special tokens, and byte-level post-processing would trim spaces off
the spans). Its SHA-256 is the tokenizer's identity in caches and results.

Bits per byte needs the UTF-8 bytes of each token. Decoding tokens one at a time does not give them: a token may hold
part of a character (decoded alone, it becomes U+FFFD), and decoders treat the first token of a text differently. So the
bytes are computed from the vocabulary's spelling. *Byte-level* vocabularies (GPT-2) spell every byte as one character
of a fixed alphabet of 256. *Metaspace* vocabularies (SentencePiece) spell a space as `▁`, and a byte without a token as
`<0x0A>`.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from levanter.compat.hf.errors import CheckpointError, ConfigMismatchError, CorruptFileError, MissingCheckpointFileError
from levanter.compat.hf.repository import Repository, read_json
from levanter.data.incremental_detokenizer import WindowStream
from levanter.data.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_BYTE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: character → byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    Source: `bytes_to_unicode` of the GPT-2 release (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    # Every byte needs a visible character, since the merges file separates tokens by spaces.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [byte for byte in range(256) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable]
    pairs += [(chr(256 + n), byte) for n, byte in enumerate(other)]
    # The same pairs as in GPT-2's release: a different order would permute the bytes of all non-ASCII tokens.
    return dict(pairs)


def vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    """Token → id of a tokenizer.json's model, without added tokens."""
    vocab = definition["model"].get("vocab", {})
    if isinstance(vocab, list):  # Unigram: [[token, score], …]
        return {token: n for n, (token, _) in enumerate(vocab)}
    return dict(vocab)


def count_ids(definition: Mapping[str, Any]) -> int:
    """One more than the largest id, added tokens included."""
    ids = [*vocabulary(definition).values(), *(token["id"] for token in definition.get("added_tokens") or ())]
    return max(ids, default=-1) + 1


def byte_lengths(definition: Mapping[str, Any]) -> np.ndarray:
    """UTF-8 bytes of each id, int32; 0 for special tokens and for ids without a token.

    Args:
        definition: a parsed tokenizer.json.

    Raises:
        ValueError: the tokenizer spells its tokens in an unknown way.
    """
    lengths = np.zeros(count_ids(definition), np.int32)
    read = byte_reader(definition)
    for token, i in vocabulary(definition).items():
        lengths[i] = len(read(token))
    for added in definition.get("added_tokens") or ():
        # Special tokens stand for no text, so they add no bytes to bits per byte.
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


def _components(definition: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a component, sequences flattened."""
    inner = {"decoder": "decoders", "pre_tokenizer": "pretokenizers", "normalizer": "normalizers"}[name]

    def walk(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
        if part is None:
            return
        if part["type"] == "Sequence":
            for child in part[inner]:
                yield from walk(child)
        else:
            yield part

    yield from walk(definition.get(name))


def byte_reader(definition: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The function from a token, as the vocabulary spells it, to the bytes that it stands for.

    Args:
        definition: a parsed tokenizer.json.

    Raises:
        ValueError: the tokenizer spells its tokens in an unknown way.
    """
    decoders = list(_components(definition, "decoder"))
    kinds = {part["type"] for part in decoders}
    splits = {part["type"] for part in _components(definition, "pre_tokenizer")}
    # Some definitions have a byte-level pre-tokenizer and no decoder at all.
    if "ByteLevel" in kinds or (not kinds and "ByteLevel" in splits):
        alphabet = byte_alphabet()

        def of_bytes(token: str) -> bytes:
            # A token with a character outside the alphabet was added to the vocabulary as plain text.
            if all(sign in alphabet for sign in token):
                return bytes(alphabet[sign] for sign in token)
            return token.encode()

        return of_bytes
    spaces = [part["replacement"] for part in decoders if part["type"] == "Metaspace"]
    spaces += [
        part["pattern"]["String"]
        for part in decoders
        if part["type"] == "Replace" and part.get("content") == " " and "String" in part["pattern"]
    ]
    if unknown := kinds - {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise ValueError(f"tokens decoded by {', '.join(sorted(unknown))} cannot be counted in bytes")
    # With byte fallback `<0x0A>` is one byte; without it, it is text that happens to look like that.
    falls_back = "ByteFallback" in kinds or bool(definition["model"].get("byte_fallback"))

    def of_text(token: str) -> bytes:
        if falls_back and _BYTE.match(token):
            return bytes([int(token[3:5], 16)])
        for space in spaces:
            token = token.replace(space, " ")
        return token.encode()

    return of_text


DEFINITION = "tokenizer.json"
_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE = "chat_template.jinja"
_ENDS = ("generation_config.json", "config.json")
_ROLES = ("bos", "eos", "pad")


class FastTokenizer:
    """A `Tokenizer` over a tokenizer.json definition.

    Attributes:
        name: its source, in messages.
        definition: the parsed tokenizer.json, as it encodes here.
        post_processor: the definition's post-processor, which is not applied here; exports write it.
        bos_id: id of the token that begins a document.
        eos_id: id of the token that ends a document.
        pad_id: id of the token that fills up batches.
        chat_template: Jinja template that renders a conversation as text; None if there is none.
        end_ids: every id that ends a text, `eos_id` first: a model may have several, such as the end of a turn.
        adds_bos: whether the tokenizer's own rules put BOS before a text. They are not applied here, since
            `levanter.data` decides; the evaluation harness reads this, because published numbers follow those rules.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        name: str,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        chat_template: str | None = None,
        end_ids: Sequence[int] = (),
        adds_bos: bool | None = None,
    ):
        """Builds the tokenizer; without `adds_bos`, the definition determines it.

        Raises:
            CorruptFileError: the `tokenizers` library cannot read the definition.
        """
        # Truncation or padding in a definition would silently cut or extend documents.
        self.definition = {**definition, "truncation": None, "padding": None, "post_processor": None}
        self.post_processor: Mapping[str, Any] | None = definition.get("post_processor")
        self.name = name
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.adds_bos = _begins_with(definition, bos_id) if adds_bos is None else adds_bos and bos_id is not None
        # The library raises plain Exceptions for malformed definitions.
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.definition))
        except Exception as error:
            raise CorruptFileError(name, f"it is not a tokenizer.json ({error})") from error
        self.vocab_size = count_ids(self.definition)
        out = [
            f"{role} {i}" for role in _ROLES if (i := getattr(self, f"{role}_id")) is not None and i >= self.vocab_size
        ]
        if out:
            raise ConfigMismatchError(name, f"special token ids {', '.join(out)} are outside its {self.vocab_size} ids")
        self.chat_template = chat_template
        # EOS first, then the ids of generation_config.json; ids beyond the vocabulary occur in published files.
        ends = (*(() if eos_id is None else (eos_id,)), *(i for i in end_ids if 0 <= i < self.vocab_size))
        self.end_ids = tuple(dict.fromkeys(ends))

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

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sequence of ids, including special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def stream(self) -> TextStream:
        """A stream that decodes a text as its ids arrive, without special tokens."""
        return WindowStream(self.decode, skipped=self._special_ids, byte_ids=self._byte_ids)

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
        """The bytes that a token stands for; for an added token, those of its spelling.

        Raises:
            ValueError: the tokenizer spells its tokens in an unknown way.
        """
        token = self.token(i)
        if token is None:
            return b""
        return token.encode() if i in self.added_ids else self._byte_reader(token)

    @cached_property
    def _byte_reader(self) -> Callable[[str], bytes]:
        return byte_reader(self.definition)

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
        """The tokenizer_config.json: special tokens, template, and `add_bos_token` if the post-processor differs."""
        roles = {
            f"{role}_token": self.token(number)
            for role in _ROLES
            if (number := getattr(self, f"{role}_id")) is not None
        }
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        same = self.adds_bos == _begins_with(self.document, self.bos_id)
        return {**roles, **template, **({} if same else {"add_bos_token": self.adds_bos})}

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the definition and the roles of its special tokens."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        roles = {role: getattr(self, f"{role}_id") for role in _ROLES}
        # The roles are part of the hash: another EOS gives other documents from the same definition.
        text = json.dumps([self.definition, roles], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _begins_with(definition: Mapping[str, Any], bos_id: int | None) -> bool:
    """Whether the post-processor of a tokenizer.json puts this token before a text."""
    # Processors nest (`Sequence`); the list grows while it is walked.
    waiting: list[Any] = [definition.get("post_processor")]
    for step in waiting:
        if not isinstance(step, dict) or bos_id is None:
            continue
        waiting += step.get("processors") or []
        first = next(iter(step.get("single") or ()), None)
        special = first.get("SpecialToken") if isinstance(first, dict) else None
        # A template lists special tokens by name; the map gives their ids.
        token = (step.get("special_tokens") or {}).get(special.get("id")) if isinstance(special, dict) else None
        if isinstance(token, dict) and (token.get("ids") or [None])[0] == bos_id:
            return True
    return False


def as_transformers(tokenizer: FastTokenizer) -> "PreTrainedTokenizerFast":
    """The same tokenizer as an object of transformers."""
    from transformers import PreTrainedTokenizerFast

    ids = {f"{role}_token": getattr(tokenizer, f"{role}_id") for role in _ROLES}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(tokenizer.definition)),
        **{role: tokenizer.token(i) for role, i in ids.items() if i is not None},
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
    return FastTokenizer(json.loads(backend.to_str()), name=str(tokenizer.name_or_path), **ids)


def load_from_repository(repository: Repository, *, file: str = DEFINITION) -> FastTokenizer:
    """Loads the tokenizer from the files of a repository.

    Raises:
        MissingCheckpointFileError: there is none.
        CorruptFileError: it cannot be read.
    """
    if file in repository.files:
        definition = read_json(repository, file, purpose="the tokenizer")
        if not isinstance(definition.get("model"), dict):
            raise CorruptFileError(repository.where(file), "it is not a tokenizer.json: it has no model")
        if not _are_tokens(definition.get("added_tokens")):
            raise CorruptFileError(
                repository.where(file), "added_tokens is not a list of tokens, each with content and id"
            )
    # Only for the default name: a file that was asked for by name is not replaced by a conversion.
    elif file == DEFINITION and any(name in repository.files for name in _SLOW):
        definition = _convert(repository)
    else:
        raise MissingCheckpointFileError(
            repository.name, f"there is no tokenizer ({file}); it has {', '.join(sorted(repository.files)[:8])}"
        )
    return FastTokenizer(
        definition,
        name=repository.name,
        **_roles(repository, definition),
        chat_template=_chat_template(repository),
        end_ids=_end_ids(repository),
        adds_bos=_adds_bos(repository),
    )


def _are_tokens(added: object) -> bool:
    """Whether a value is valid as `added_tokens` of a tokenizer.json."""
    if added is None:
        return True
    return isinstance(added, list) and all(
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and isinstance(number := token.get("id"), int)
        and number >= 0
        for token in added
    )


def _roles(repository: Repository, definition: Mapping[str, Any]) -> dict[str, int | None]:
    """The ids of the special tokens, from the settings files of the repository."""
    ids = dict(definition["model"].get("vocab", {})) if isinstance(definition["model"].get("vocab"), dict) else {}
    # Added tokens win: a vocabulary may hold the same text as an ordinary token.
    ids |= {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    role_ids: dict[str, int | None] = {}
    for file in _SETTINGS:
        if file not in repository.files:
            continue
        settings = read_json(repository, file, purpose="special tokens")
        for role in _ROLES:
            token = settings.get(f"{role}_token")
            content = token.get("content") if isinstance(token, dict) else token
            # The first file that gives a role wins: tokenizer_config.json before special_tokens_map.json.
            if isinstance(content, str) and role_ids.get(f"{role}_id") is None:
                role_ids[f"{role}_id"] = ids.get(content)
    if "config.json" in repository.files:
        config = read_json(repository, "config.json", purpose="special tokens")
        for role in _ROLES:
            value = config.get(f"{role}_token_id")
            first = value[0] if isinstance(value, list) and value else value
            # config.json comes last, and only ids that exist: published files hold ids of other vocabularies.
            if role_ids.get(f"{role}_id") is None and isinstance(first, int) and 0 <= first < count_ids(definition):
                role_ids[f"{role}_id"] = first
    return role_ids


def _chat_template(repository: Repository) -> str | None:
    """The chat template: from its own file or the settings; of several, the one named `default`."""
    if CHAT_TEMPLATE in repository.files:
        return repository.text(CHAT_TEMPLATE).decode("utf-8", "replace")
    if _SETTINGS[0] not in repository.files:
        return None
    template = read_json(repository, _SETTINGS[0], purpose="the chat template").get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _adds_bos(repository: Repository) -> bool | None:
    """The settings' `add_bos_token`; None if they have none."""
    if _SETTINGS[0] not in repository.files:
        return None
    add_bos = read_json(repository, _SETTINGS[0], purpose="special tokens").get("add_bos_token")
    return add_bos if isinstance(add_bos, bool) else None


def _end_ids(repository: Repository) -> tuple[int, ...]:
    """The ids that end a text according to the model's files; transformers stops at the first of these."""
    end_ids: list[int] = []
    for file in _ENDS:
        if file in repository.files:
            value = read_json(repository, file, purpose="the ids that end a text").get("eos_token_id")
            # `type(i) is int` excludes booleans, which isinstance would accept.
            end_ids += [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
    return tuple(end_ids)


def _convert(repository: Repository) -> Mapping[str, Any]:
    """Converts older tokenizer files to a tokenizer.json, by transformers."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for file in (*_SLOW, *_SETTINGS, "config.json", "added_tokens.json"):
            if file in repository.files:
                (Path(folder) / file).write_bytes(repository.text(file))
        try:
            # From a local copy of the tokenizer's files only, so that
            # transformers neither downloads nor runs anything else.
            converted = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
            return json.loads(converted.backend_tokenizer.to_str())
        except (ImportError, ValueError, OSError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                repository.name,
                f"there is no {DEFINITION}, and transformers cannot make one from the older files "
                f"({str(error).splitlines()[0]})",
                suggestion="pip install sentencepiece (or tiktoken), or add a tokenizer.json",
            ) from error


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
