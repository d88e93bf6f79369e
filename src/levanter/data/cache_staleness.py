"""Checks whether the sources of a token store changed since it was built, and whether its files are intact.

A store remembers of each source its size, its *version* (the time of a file, the tag of an object) and, for files on a
disk, a digest of its content. Where size and version are the same the content is taken to be; where the version differs
the content is read and decides. `thorough` reads it in any case, which also finds a text that was edited in place and
given its old time back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from levanter.data.manifest import Manifest, SourceFile, StoreError, StoreIdentity, shard_folder
from levanter.io.file_identity import file_digest
from levanter.io.paths import exists, file_size, is_remote, join

MAX_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """The result of comparing a store with its sources.

    Attributes:
        problems: a line for each source whose content has changed.
        unverified: sources for which the store has neither a version nor a digest.
        read: sources whose content was read and is the same.
        identity: the store's identity, with the current versions of the sources.
    """

    problems: tuple[str, ...]
    unverified: int
    read: int
    identity: StoreIdentity


def compare_sources(manifest: Manifest, wanted: StoreIdentity, *, thorough: bool) -> Freshness:
    """Compares the sources of a store with the current ones; `manifest.compare` compares names and sizes.

    Args:
        manifest: the store's.
        wanted: the identity by the configuration, with today's versions.
        thorough: whether content is read where the version is the same.
    """
    digests = source_digests(manifest)
    current_sources = {source.name: source for source in wanted.sources}
    problems: list[str] = []
    sources: list[SourceFile] = []
    unverified = read = 0
    for source in manifest.identity.sources:
        current, digest = current_sources.get(source.name), digests.get(source.name)
        sources.append(source if current is None else replace(source, version=current.version))
        # A missing source and another size or digest are differences of identity, which `manifest.compare` reports.
        if current is None or source.digest is not None or current.size != source.size:
            continue
        same = source.version is not None and source.version == current.version
        # Same size and version: the content is taken to be the same without reading it.
        if same and not thorough:
            continue
        if digest is not None:
            read += 1
            # `thorough` is for edits that kept size and time, so a digest remembered by size and time must not answer
            # it.
            if file_digest(source.name, remembered=not thorough) != digest:
                problems.append(f"source {source.name}: the text has changed, with the same {source.size:,} bytes")
        # Digests are written with a finished shard, so a store that is still being built has none to compare.
        elif source.version is None or is_unbuilt(manifest):
            unverified += 1
        # No digest and another version: without a reading at the time there is nothing to decide by, so it counts as
        # changed.
        elif not same:
            problems.append(f"source {source.name}: was {source.version}, is {current.version}")
    omitted = [f"… and {len(problems) - MAX_LISTED} more sources"] if len(problems) > MAX_LISTED else []
    return Freshness(
        problems=tuple(problems[:MAX_LISTED] + omitted),
        unverified=unverified,
        read=read,
        identity=replace(manifest.identity, sources=tuple(sources)),
    )


def refuse_stale(folder: str, manifest: Manifest, wanted: StoreIdentity) -> Freshness:
    """Refuses a store whose sources changed since it was built, as far as their versions show.

    Raises:
        StoreError: listing them.
    """
    freshness = compare_sources(manifest, wanted, thorough=False)
    if freshness.problems:
        raise StoreError(stale_message(folder, freshness.problems))
    return freshness


def stale_message(folder: str, problems: Sequence[str]) -> str:
    """The message for a store whose sources have changed."""
    listed = "\n".join(f"  {problem}" for problem in problems)
    return (
        f"{folder}: the sources of this token store have changed since it was built:\n{listed}\n"
        "  delete this folder to rebuild it from the current sources, or set another cache_dir"
    )


def is_unbuilt(manifest: Manifest) -> bool:
    """Whether a store is unfinished; its digests of sources are then incomplete."""
    return manifest.shards is None


def source_digests(manifest: Manifest) -> dict[str, str]:
    """The content digests in a finished store's manifest, by source name."""
    digests: dict[str, str] = {}
    for numbers, mark in zip(manifest.identity.shards, manifest.shards or (), strict=False):
        for number, digest in zip(numbers, mark.source_digests, strict=False):
            if digest is not None:
                digests[manifest.identity.sources[number].name] = digest
    return digests


def digest_sources(sources: Sequence[SourceFile]) -> tuple[str | None, ...]:
    """Content digests of files on a disk; None for sources without a file, and for remote ones, which have tags."""

    def has_other_identity(source: SourceFile) -> bool:
        return source.digest is not None or source.version is None or is_remote(source.name)

    return tuple(None if has_other_identity(source) else file_digest(source.name) for source in sources)


def changed_files(folder: str, manifest: Manifest) -> tuple[list[str], int]:
    """A line for each file of a store that differs from what was written, and the number of files without a digest."""
    problems, unknown = [], 0
    for number, mark in enumerate(manifest.shards or ()):
        for file, size in mark.files.items():
            path, digest = join(shard_folder(folder, number), file), mark.digests.get(file)
            if not exists(path):
                problems.append(f"{path}: is missing")
            elif file_size(path) != size:
                problems.append(f"{path}: {file_size(path):,} bytes, but {size:,} were written")
            elif digest is None:
                unknown += 1
            elif file_digest(path) != digest:
                problems.append(f"{path}: its content has changed since it was written")
    return problems, unknown
