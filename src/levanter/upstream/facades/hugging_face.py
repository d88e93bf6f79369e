"""References, tokenizers and configs of Hugging Face files, with the interfaces of earlier generations.

    ref = RepoRef("org/model", revision="main")
    tokenizer = load_tokenizer("org/model")
    ids = tokenizer.encode("a text")
    config = LlamaConfig.from_hf_config(hf_config)

`levanter.upstream.facades.tokenizers` has the calls of transformers' tokenizers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from levanter.commands.model.source import PASSTHROUGH
from levanter.compat.hf.converter import HFCheckpointConverter
from levanter.compat.hf.errors import ConfigMismatchError
from levanter.compat.hf.refs import RepoRef
from levanter.compat.hf.tokenizer import FastTokenizer, as_transformers
from levanter.compat.open import load_tokenizer as load_of_today
from levanter.data import LmDataConfig, PassthroughTokenizer, Tokenizer
from levanter.models.registry import LmConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class OldRepoRef(RepoRef):
    """`RepoRef`, constructed from a name and a revision, or with today's keywords."""

    def __init__(self, model_name_or_path: str | None = None, revision: str | None = None, **keys: Any):
        if model_name_or_path is not None:
            parsed = RepoRef.parse(model_name_or_path)
            # A revision inside the name (`org/model@main`) counts, unless the argument gives another one.
            keys = {"kind": parsed.kind, "location": parsed.location, "file": parsed.file, **keys}
            revision = revision or parsed.revision
        super().__init__(revision=revision, **keys)

    @staticmethod
    def from_string(text: str) -> "OldRepoRef":
        """Reads `name@revision`."""
        return OldRepoRef(text)

    @property
    def model_name_or_path(self) -> str:
        """The reference without its revision."""
        return str(replace(RepoRef(kind=self.kind, location=self.location, file=self.file), revision=None))


def load_tokenizer(
    model_name_or_path: str | RepoRef,
    revision: str | None = None,
    local_cache_dir: str | None = None,
    trust_remote_code: bool = True,
) -> FastTokenizer:
    """The tokenizer of a checkpoint; its code is never run, and it is cached in the Hub's cache."""
    # Accepted so that earlier calls work: the cache is the Hub's, and remote code is never trusted.
    del local_cache_dir, trust_remote_code
    ref = RepoRef.parse(model_name_or_path)
    return load_of_today(ref if revision is None else replace(ref, revision=revision))


def the_tokenizer(data: LmDataConfig) -> Tokenizer:
    """`data.the_tokenizer`: the tokenizer of the data."""
    if data.tokenizer == PASSTHROUGH:
        return PassthroughTokenizer(data.vocab_size or 0)
    return load_tokenizer(data.tokenizer)


# --- members of tokenizers ---


def eos_token_id(tokenizer: FastTokenizer) -> int | None:
    """The id of the token that ends a document."""
    return tokenizer.eos_id


def bos_token_id(tokenizer: FastTokenizer) -> int | None:
    """The id of the token that begins a document."""
    return tokenizer.bos_id


def name_or_path(tokenizer: FastTokenizer) -> str:
    """The source of the tokenizer."""
    return tokenizer.name


def encode(tokenizer: FastTokenizer) -> Callable[..., list[int]]:
    """`tokenizer.encode(text, add_special_tokens=False)`."""

    def of_text(text: str, *, add_special_tokens: bool = False) -> list[int]:
        # Upstream would prepend BOS here; silently leaving it out would change every id list.
        if add_special_tokens:
            raise ValueError(
                "add_special_tokens: encode returns the ids of the text only; prepend tokenizer.bos_id yourself"
            )
        return tokenizer.encode_batch([text])[0].tolist()

    return of_text


def get_vocab(tokenizer: FastTokenizer) -> Callable[[], dict[str, int]]:
    """`tokenizer.get_vocab()`: token → id."""
    return lambda: {token: i for i in range(tokenizer.vocab_size) if (token := tokenizer.token(i)) is not None}


def convert_ids_to_tokens(tokenizer: FastTokenizer) -> Callable[[int | Sequence[int]], Any]:
    """`tokenizer.convert_ids_to_tokens(ids)`: tokens as the vocabulary spells them."""
    return lambda ids: tokenizer.token(ids) if isinstance(ids, int) else [tokenizer.token(int(i)) for i in ids]


def as_hf_tokenizer(tokenizer: FastTokenizer) -> Callable[[], Any]:
    """`tokenizer.as_hf_tokenizer()`: one of transformers, which can be called."""
    return lambda: as_transformers(tokenizer)


# --- members of model configs ---


def from_hf_config(cls: type[LmConfig]) -> Callable[[Any], LmConfig]:
    """`LlamaConfig.from_hf_config(hf_config)`: our config, from a transformers config or the mapping in a config.json.

    Raises:
        ConfigMismatchError: the config belongs to another family.
    """

    def of_config(hf_config: "PretrainedConfig | Mapping[str, Any]") -> LmConfig:
        config = HFCheckpointConverter().config_from_hf_config(hf_config)
        # `from_hf_config` of a class promised that class; a Mistral file read by LlamaConfig would have no window.
        if not isinstance(config, cls):
            raise ConfigMismatchError("hf_config", f"describes a {type(config).__name__}, not a {cls.__name__}")
        return config

    return of_config


def to_hf_config(config: LmConfig) -> Callable[..., Any]:
    """`config.to_hf_config(vocab_size)`: the transformers config."""

    def of_size(vocab_size: int, config_overrides: Mapping[str, Any] | None = None) -> "PretrainedConfig":
        converter = HFCheckpointConverter(type(config), config_overrides=config_overrides)
        return converter.hf_config_from_config(config, vocab_size=vocab_size)

    return of_size
