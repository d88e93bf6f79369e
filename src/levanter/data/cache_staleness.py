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
    """What was found out about a store's sources.

    Attributes:
        problems: a line for each source whose content is another.
        unverified: sources of which the store kept nothing to compare.
        read: sources whose content was read and is the same.
        identity: the store's, with the versions of today.
    """

    problems: tuple[str, ...]
    unverified: int
    read: int
    identity: StoreIdentity


def compare_sources(manifest: Manifest, wanted: StoreIdentity, *, thorough: bool) -> Freshness:
    """Compares the sources of a store with those that are there now; names and sizes are compared by `compare`.

    Args:
        manifest: the store's.
        wanted: the identity by the configuration, with today's versions.
        thorough: whether content is read where the version is the same.
    """
    digests = source_digests(manifest)
    now = {source.name: source for source in wanted.sources}
    problems: list[str] = []
    sources: list[SourceFile] = []
    unverified = read = 0
    for source in manifest.identity.sources:
        current, digest = now.get(source.name), digests.get(source.name)
        sources.append(source if current is None else replace(source, version=current.version))
        if current is None or source.digest is not None or current.size != source.size:
            continue
        same = source.version is not None and source.version == current.version
        # Same size and version: the content is taken to be the same without reading it.
        if same and not thorough:
            continue
        if digest is not None:
            read += 1
            if file_digest(source.name, remembered=not thorough) != digest:
                problems.append(f"source {source.name}: the text has changed, with the same {source.size:,} bytes")
        elif source.version is None or is_unbuilt(manifest):
            unverified += 1
        elif not same:
            problems.append(f"source {source.name}: was {source.version}, is {current.version}")
    more = [f"… and {len(problems) - MAX_LISTED} more sources"] if len(problems) > MAX_LISTED else []
    return Freshness(
        problems=tuple(problems[:MAX_LISTED] + more),
        unverified=unverified,
        read=read,
        identity=replace(manifest.identity, sources=tuple(sources)),
    )


def refuse_stale(folder: str, manifest: Manifest, wanted: StoreIdentity) -> Freshness:
    """Refuses a store whose sources have another text since it was built, as far as their versions tell.

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
    """Whether a store is only begun: what it keeps of its sources is not all there yet."""
    return manifest.shards is None


def source_digests(manifest: Manifest) -> dict[str, str]:
    """The digests of content that a finished store kept, by the source's name."""
    digests: dict[str, str] = {}
    for numbers, mark in zip(manifest.identity.shards, manifest.shards or (), strict=False):
        for number, digest in zip(numbers, mark.source_digests, strict=False):
            if digest is not None:
                digests[manifest.identity.sources[number].name] = digest
    return digests


def digest_sources(sources: Sequence[SourceFile]) -> tuple[str | None, ...]:
    """Digests of the content of files on a disk; None for what has no file, and for what a store's tag stands for."""

    def has_other_identity(source: SourceFile) -> bool:
        return source.digest is not None or source.version is None or is_remote(source.name)

    return tuple(None if has_other_identity(source) else file_digest(source.name) for source in sources)


def changed_files(folder: str, manifest: Manifest) -> tuple[list[str], int]:
    """Files of a store whose content is not what was written, in lines; and how many have no digest to compare."""
    problems, unknown = [], 0
    for number, mark in enumerate(manifest.shards or ()):
        for file, size in mark.files.items():
            path, digest = join(shard_folder(folder, number), file), mark.digests.get(file)
            if not exists(path):
                problems.append(f"{path}: is gone")
            elif file_size(path) != size:
                problems.append(f"{path}: {file_size(path):,} bytes, {size:,} were written")
            elif digest is None:
                unknown += 1
            elif file_digest(path) != digest:
                problems.append(f"{path}: its content has changed since it was written")
    return problems, unknown
