"""Manifests: what a token store was built from, and what it contains.

The *identity* is everything that a store's ids depend on: the tokenizer, BOS and EOS around documents, the format, the
source files with their sizes. A store whose identity is not the configuration's is refused, with every difference. The
manifest also records versions and digests, from which `cache_staleness` detects changed sources.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import JSON_BYTES, read_bounded
from levanter.data.errors import DataError
from levanter.io.paths import exists, join, open_read

VERSION = 1
MANIFEST = "manifest.json"
SHARD_MARK = "shard.json"


class StoreError(DataError):
    """A token store that cannot be used: which folder, and what differs."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A source of a store: a file, or a text without a file.

    Attributes:
        name: its path, or a description.
        size: its bytes as stored.
        digest: hex SHA-256 of the text, for sources that have no file.
        version: of a file (`io.file_identity`); not compared, because a copy has another time.
    """

    name: str
    size: int
    digest: str | None = None
    version: str | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """Everything that a store's ids depend on; two stores of one identity hold the same ids.

    Attributes:
        tokenizer: its hash.
        tokenizer_name: where it came from; not compared.
        vocab_size: number of ids.
        bos, eos: the ids added before and after each document; None for none.
        format: the format's name and keys.
        weighted: whether ids carry loss weights.
        sources: the files, in order.
        groups: the maximum number of shards.
    """

    tokenizer: str
    tokenizer_name: str = field(compare=False)
    vocab_size: int
    bos: int | None
    eos: int | None
    format: Mapping[str, Any]
    weighted: bool
    sources: tuple[SourceFile, ...]
    groups: int

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the sources of each shard."""
        count = min(len(self.sources), self.groups)
        # Consecutive sources, in groups whose sizes differ by at most one.
        cuts = [len(self.sources) * i // count for i in range(count + 1)]
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(cuts))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StoreIdentity":
        """The identity in the JSON object of a manifest."""
        return cls(**{**value, "sources": tuple(SourceFile(**source) for source in value["sources"])})


@dataclass(frozen=True, kw_only=True)
class ShardMark:
    """The content of a finished shard.

    Attributes:
        documents: documents of at least one token.
        tokens: their ids.
        chars: characters read.
        skipped: empty documents, which are left out.
        largest_id: the largest id; −1 if it is empty.
        files: bytes of each file of the shard.
        digests: hex SHA-256 of those on a disk.
        source_digests: hex SHA-256 of the content of each source, in order; None for sources without a digest.
    """

    documents: int
    tokens: int
    chars: int
    skipped: int
    largest_id: int
    files: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)
    source_digests: tuple[str | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json; `shards` is None while the store is being built."""

    identity: StoreIdentity
    shards: tuple[ShardMark, ...] | None

    @property
    def tokens(self) -> int:
        """Tokens of all finished shards."""
        return sum(shard.tokens for shard in self.shards or ())

    @property
    def documents(self) -> int:
        """Documents of all finished shards."""
        return sum(shard.documents for shard in self.shards or ())

    @property
    def largest_id(self) -> int:
        """The largest id of all finished shards; −1 if there is none."""
        return max((shard.largest_id for shard in self.shards or ()), default=-1)

    def content(self) -> bytes:
        """The file's bytes: the same for the same manifest."""
        shards = None if self.shards is None else [asdict(shard) for shard in self.shards]
        value = {
            "version": VERSION,
            # These three are for readers of the file; `read_manifest` derives them from `shards`.
            "finished": self.shards is not None,
            "documents": self.documents,
            "tokens": self.tokens,
            "identity": asdict(self.identity),
            "shards": shards,
        }
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def shard_folder(folder: str, number: int) -> str:
    """The folder of a shard."""
    return join(folder, "shards", f"{number:05d}")


def read_json(path: str) -> Any:
    """The JSON value in a file of a store.

    Raises:
        StoreError: it is not JSON.
    """
    with open_read(path) as file:
        content = read_bounded(file, JSON_BYTES, where=path)
    try:
        return parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise StoreError(f"{path}: damaged ({error}); delete the folder to rebuild it") from error


def read_manifest(folder: str) -> Manifest | None:
    """The manifest of a store; None if there is no store.

    Raises:
        StoreError: it is damaged, or of another version.
    """
    path = join(folder, MANIFEST)
    if not exists(path):
        return None
    value = read_json(path)
    if not isinstance(value, dict) or value.get("version") != VERSION:
        version = value.get("version") if isinstance(value, dict) else type(value).__name__
        raise StoreError(f"{path}: expected version {VERSION} of a token store, found {version}")
    try:
        shards = value["shards"]
        return Manifest(
            identity=StoreIdentity.from_json(value["identity"]),
            shards=None if shards is None else tuple(ShardMark(**mark) for mark in shards),
        )
    # A missing key raises KeyError, an unknown or misplaced one TypeError in the dataclass.
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path}: damaged ({error}); delete the folder to rebuild it") from error


def is_empty(folder: str, manifest: Manifest) -> bool:
    """Whether a store has no finished shard, for instance because its first records were refused.

    Such a store may be built again with another identity, after the user has corrected the refused settings.
    """
    numbers = range(len(manifest.identity.shards))
    # A mark without the manifest's completion still holds finished work, which a new identity would discard.
    return manifest.shards is None and not any(exists(join(shard_folder(folder, n), SHARD_MARK)) for n in numbers)


def compare(folder: str, stored: StoreIdentity, configured: StoreIdentity, *, sources: bool) -> None:
    """Raises unless a store has the identity of the configuration.

    Args:
        folder: the store.
        stored: the store's identity.
        configured: the configuration's identity.
        sources: whether to compare the sources; false if the files are not available here.

    Raises:
        StoreError: with every difference.
    """
    differences = []
    if stored.tokenizer != configured.tokenizer:
        # Only the hash decides; the names help the user to see which tokenizer it was.
        differences.append(
            f"tokenizer: built with {stored.tokenizer_name} ({stored.vocab_size} ids, hash {stored.tokenizer[:12]}), "
            f"configured {configured.tokenizer_name} ({configured.vocab_size} ids, hash {configured.tokenizer[:12]})"
        )
    differences += [
        f"{key}: built with {getattr(stored, key)!r}, configured {getattr(configured, key)!r}"
        for key in ("bos", "eos", "format", "weighted")
        if getattr(stored, key) != getattr(configured, key)
    ]
    if sources:
        differences += _source_differences(stored.sources, configured.sources)
        # The division into shards alone changes no id, but a store can only be continued with the division it was begun
        # with.
        if not differences and stored.groups != configured.groups:
            differences.append(f"num_shard_groups: built with {stored.groups}, configured {configured.groups}")
    if differences:
        listed = "\n".join(f"  {difference}" for difference in differences)
        raise StoreError(
            f"{folder}: this token store was built from something else:\n{listed}\n"
            "  give another cache_dir, or delete this folder"
        )


def _source_differences(stored: Sequence[SourceFile], configured: Sequence[SourceFile]) -> list[str]:
    old_sources = {source.name: source for source in stored}
    new_sources = {source.name: source for source in configured}
    differences = [f"source {name}: in the store, not configured" for name in old_sources if name not in new_sources]
    differences += [f"source {name}: configured, not in the store" for name in new_sources if name not in old_sources]
    for name in old_sources.keys() & new_sources.keys():
        old, new = old_sources[name], new_sources[name]
        if old.size != new.size:
            differences.append(f"source {name}: had {old.size:,} bytes, has {new.size:,}")
        elif old.digest != new.digest:
            differences.append(f"source {name}: the text has changed")
    # Order matters: documents are numbered, and so shuffled, in the order of the files.
    if not differences and [s.name for s in stored] != [s.name for s in configured]:
        differences.append("sources: the same files in a different order")
    return differences[:8] + ([f"… and {len(differences) - 8} more sources"] if len(differences) > 8 else [])
