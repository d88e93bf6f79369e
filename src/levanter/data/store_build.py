"""Building token stores: documents → ids → shards, in parallel, resumable shard by shard.

Three stages run at once. A thread reads documents; a few threads hand batches of them to the tokenizer, which releases
the interpreter lock while it works (and has its own threads); the caller's thread concatenates ids and writes. Order is
kept throughout, so the bytes of a store depend on its identity only.

A shard is valid once its `shard.json` exists, which is written last. A shard that was incomplete when a process was
killed is written again from its beginning; valid shards are kept.
"""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from levanter.data.cache_staleness import digest_sources
from levanter.data.manifest import (
    MANIFEST,
    SHARD_MARK,
    Manifest,
    ShardMark,
    SourceFile,
    StoreError,
    StoreIdentity,
    compare,
    is_empty,
    read_json,
    read_manifest,
    shard_folder,
)
from levanter.data.store import MemoryTokens
from levanter.data.store_write import Encoded, ShardTotals, ShardWriter, file_sizes, write_file
from levanter.io.lease import leased
from levanter.io.paths import exists, filesystem, join

logger = logging.getLogger(__name__)

BATCH_CHARS = 1 << 19
"""Characters handed to the tokenizer at once."""
_AHEAD = 4


class Source(Protocol):
    """A source of records: a file, or a text in memory."""

    def records(self) -> Iterator[Any]:
        """Its records, in order."""
        ...


@runtime_checkable
class DescribedSource(Protocol):
    """A source that can report its current size and version."""

    def describe(self) -> SourceFile:
        """Its name, size and version."""
        ...


class Encoder(Protocol):
    """Turns records into ids."""

    def chars(self, record: Any) -> int:
        """The characters of a record, roughly; 0 for one that is empty and left out."""
        ...

    def encode(self, records: Sequence[Any]) -> list[Encoded]:
        """The ids of each record, with loss weights where the format has them."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuildProgress:
    """The progress of a build.

    Attributes:
        tokens: tokens written so far, those of earlier attempts included.
        fraction: the share of the sources' bytes that are done, estimated within a file.
    """

    tokens: int
    fraction: float


OnProgress = Callable[[BuildProgress], None]


@dataclass
class _Batch:
    """Some records of one shard, and the future of their ids."""

    shard: int
    records: list[Any]
    chars: int
    skipped: int
    last: bool
    encoded: "Future[list[Encoded]] | None" = None


def build_store(
    folder: str,
    identity: StoreIdentity,
    sources: Sequence[Source],
    encoder: Encoder,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Builds a store, or its missing shards; returns at once if it is finished.

    If another process is building it, on any machine, this one waits for it.

    Args:
        folder: of the store.
        identity: the identity of the store; `identity.sources` describes `sources` one by one.
        sources: the records.
        encoder: records to ids.
        on_progress: called with the progress.

    Raises:
        StoreError: the folder holds a store of another identity; a source changed while it was read.
        LeaseError: it cannot be written, or another process has taken it over.
        DataError: a document cannot be read or tokenized.
    """
    assert len(sources) == len(identity.sources) >= 1
    finished = read_manifest(folder)
    if finished is not None and finished.shards is not None:
        # Nothing is written, so no lease is needed: the folder may be read-only.
        compare(folder, finished.identity, identity, sources=True)
        return finished
    advice = "give another cache_dir"
    with leased(folder, what="building a token store", advice=advice, wait=True) as lease:
        # Under the lease nobody else writes a manifest, so its temporary files belong to dead processes.
        _remove_temporary(folder)
        manifest = read_manifest(folder)
        # A store without a finished shard may get a new identity; nothing in it would be lost.
        if manifest is not None and not is_empty(folder, manifest):
            compare(folder, manifest.identity, identity, sources=True)
            if manifest.shards is not None:
                return manifest
        # Written again even if it exists: it then has the current versions of the sources.
        write_file(join(folder, MANIFEST), Manifest(identity=identity, shards=None).content())
        marks = [_finished_mark(folder, number, identity) for number in range(len(identity.shards))]
        missing = [number for number, mark in enumerate(marks) if mark is None]
        done = sum(mark.tokens for mark in marks if mark is not None)
        if len(missing) < len(marks):
            logger.info("%s: %d of %d shards already exist", folder, len(marks) - len(missing), len(marks))
        meter = _Meter(identity, marks, on_progress, done)
        writer: ShardWriter | None = None
        for batch in _encode_batches(identity, sources, encoder, missing):
            if writer is None:
                writer = ShardWriter(shard_folder(folder, batch.shard), weighted=identity.weighted)
            assert batch.encoded is not None
            writer.add(batch.encoded.result(), chars=batch.chars, skipped=batch.skipped)
            meter.update(batch.shard, writer.sums)
            if batch.last:
                # Before the mark that makes the shard count: a process that lost its lease must not publish it.
                lease.check()
                shard_sources = [identity.sources[number] for number in identity.shards[batch.shard]]
                # Digests first, then the versions: a source that changes between reading and digest is detected by its
                # version.
                digests = digest_sources(shard_sources)
                _refuse_changed(shard_sources, sources, identity.shards[batch.shard])
                marks[batch.shard] = writer.finish(digests)
                meter.finished(batch.shard, writer.sums)
                writer = None
        finished = [mark for mark in marks if mark is not None]
        assert len(finished) == len(marks)
        manifest = Manifest(identity=identity, shards=tuple(finished))
        # Again before the manifest, which declares the store finished.
        lease.check()
        write_file(join(folder, MANIFEST), manifest.content())
        return manifest


def _refuse_changed(before: Sequence[SourceFile], sources: Sequence[Source], numbers: Sequence[int]) -> None:
    """Refuses files that were written while they were read: the store would have neither text."""
    for old, number in zip(before, numbers, strict=True):
        source = sources[number]
        new = source.describe() if old.version is not None and isinstance(source, DescribedSource) else old
        if (new.size, new.version) != (old.size, old.version):
            raise StoreError(f"{old.name}: changed while it was tokenized ({old.version}, now {new.version})")


def tokenize_in_memory(
    identity: StoreIdentity, sources: Sequence[Source], encoder: Encoder, on_progress: OnProgress | None = None
) -> MemoryTokens:
    """The same ids without a store.

    Raises:
        DataError: a document cannot be read or tokenized.
    """
    shards = range(len(identity.shards))
    meter = _Meter(identity, [None] * len(shards), on_progress, 0)
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    ends: list[int] = [0]
    sums, skipped = ShardTotals(), 0
    for batch in _encode_batches(identity, sources, encoder, shards):
        assert batch.encoded is not None
        encoded = batch.encoded.result()
        sums.skipped += batch.skipped + sum(not len(document.ids) for document in encoded)
        for document in filter(lambda document: len(document.ids), encoded):
            ids.append(document.ids)
            ends.append(ends[-1] + len(document.ids))
            if document.weights is not None:
                weights.append(document.weights)
        sums.chars += batch.chars
        sums.tokens = ends[-1]
        meter.update(batch.shard, sums)
        if batch.last:
            meter.finished(batch.shard, sums)
            skipped += sums.skipped
            sums = ShardTotals(tokens=ends[-1])
    return MemoryTokens(
        ids=np.concatenate([np.zeros(0, np.int32), *ids]),
        starts=np.array(ends, np.int64),
        weights=np.concatenate([np.zeros(0, np.float32), *weights]) if identity.weighted else None,
        skipped=skipped,
    )


class _Meter:
    """Counts tokens, and estimates the share of the sources' bytes that are done."""

    def __init__(
        self, identity: StoreIdentity, marks: Sequence[ShardMark | None], on_progress: OnProgress | None, tokens: int
    ):
        self._sizes = [sum(identity.sources[i].size for i in group) for group in identity.shards]
        self._tell = on_progress
        self._total = max(sum(self._sizes), 1)
        self._bytes = sum(size for size, mark in zip(self._sizes, marks, strict=True) if mark is not None)
        self._chars = sum(mark.chars for mark in marks if mark is not None)
        self._tokens = tokens

    def update(self, shard: int, sums: ShardTotals) -> None:
        """Within a shard, bytes are estimated as characters times the bytes per character of finished shards."""
        if self._tell is not None:
            bytes_per_char = self._bytes / self._chars if self._chars else 1.0
            # An estimate must not exceed the shard, or progress would go back when it is finished.
            shard_bytes = min(sums.chars * bytes_per_char, self._sizes[shard])
            fraction = min((self._bytes + shard_bytes) / self._total, 1.0)
            self._tell(BuildProgress(tokens=self._tokens + sums.tokens, fraction=fraction))

    def finished(self, shard: int, sums: ShardTotals) -> None:
        self._bytes += self._sizes[shard]
        self._chars += sums.chars
        self._tokens += sums.tokens


def _batches(
    identity: StoreIdentity, sources: Sequence[Source], encoder: Encoder, shards: Sequence[int]
) -> Iterator[_Batch]:
    """The records of some shards in batches; the last one of each shard is marked, and may be empty."""
    for shard in shards:
        batch = _Batch(shard, [], 0, 0, last=False)
        for source in identity.shards[shard]:
            for record in sources[source].records():
                chars = encoder.chars(record)
                if not chars:
                    batch.skipped += 1
                    continue
                batch.records.append(record)
                batch.chars += chars
                if batch.chars >= BATCH_CHARS:
                    yield batch
                    batch = _Batch(shard, [], 0, 0, last=False)
        # Also for a shard without records: its last batch makes the consumer write the mark.
        batch.last = True
        yield batch


def _encode_batches(
    identity: StoreIdentity, sources: Sequence[Source], encoder: Encoder, shards: Sequence[int]
) -> Iterator[_Batch]:
    """Batches in order, with the futures of their ids; the reader and the tokenizers are a few batches ahead."""
    ready: queue.Queue[_Batch | BaseException | None] = queue.Queue(maxsize=_AHEAD)
    stopped = threading.Event()

    def put(item: _Batch | BaseException | None) -> bool:
        while not stopped.is_set():
            # With a timeout: a consumer that stops early must not leave the reader blocked in a full queue.
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def read() -> None:
        try:
            for batch in _batches(identity, sources, encoder, shards):
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            put(error)

    reader = threading.Thread(target=read, name="read-documents", daemon=True)
    # Two batches in the tokenizer at once, so that it has work while the result of the first is fetched.
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize") as pool:
        reader.start()
        encoding: deque[_Batch] = deque()
        try:
            while True:
                item = ready.get()
                if isinstance(item, _Batch):
                    item.encoded = pool.submit(encoder.encode, item.records)
                    encoding.append(item)
                # What was read before an error still counts.
                # A finished reader or an error: give out all that is being encoded. Otherwise two batches stay in the
                # tokenizer.
                while encoding and (not isinstance(item, _Batch) or len(encoding) > 2):
                    yield encoding.popleft()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    return
        finally:
            # Also when the consumer abandons the generator: the reader must end and close its files.
            stopped.set()
            for batch in encoding:
                if batch.encoded is not None:
                    batch.encoded.cancel()
            reader.join()


def _finished_mark(folder: str, number: int, identity: StoreIdentity) -> ShardMark | None:
    """The mark of a valid shard: its files are complete, and its sources have not changed; None for any other."""
    path = join(shard_folder(folder, number), SHARD_MARK)
    if not exists(path):
        return None
    try:
        mark = ShardMark(**read_json(path))
    except (StoreError, TypeError):
        return None
    if file_sizes(shard_folder(folder, number)) != dict(mark.files):
        # Sizes are compared here; digests only by `changed_files`, which reads every byte.
        return None
    shard_sources = [identity.sources[source] for source in identity.shards[number]]
    return mark if not mark.source_digests or tuple(mark.source_digests) == digest_sources(shard_sources) else None


def _remove_temporary(folder: str) -> None:
    """Removes the temporary files of a manifest that a killed process left."""
    fs, name = filesystem(folder)
    if fs.isdir(name):
        for path in fs.ls(name, detail=False):
            last = path.rsplit("/", 1)[-1]
            if last.startswith(f".{MANIFEST}.") and last.endswith(".tmp"):
                fs.rm(path)
