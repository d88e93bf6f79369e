"""Checks that all processes of a run have the same configuration, text and checkpoint.

A host with an older file than the others would compute something else, or wait forever in a collective that the others
do not run. So every input that determines a run is compared before a weight is read. A single process compares nothing.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from haliax_ext.sources import TensorSource
from levanter.config import plain
from levanter.data import EvalSequences
from levanter.distributed.agreement import current_peers, require_same, require_same_values

_LONGEST_VALUE = 60
_PER_PROCESS_KEYS = ("trainer.distributed",)
"""Keys that may differ between processes."""


def require_same_config(config: object) -> None:
    """Refuses a run whose processes have different configurations.

    Paths may differ, since a disk may be mounted elsewhere; their contents are compared when they are read.

    Raises:
        PeersDifferError: on every process; lists the keys that differ.
    """
    values = {key: text for key, text in _flat_values("", plain(config)) if not key.startswith(_PER_PROCESS_KEYS)}
    advice = "start every process with the same command, and with the same file on every host"
    require_same_values("the configuration", values, advice=advice)


def require_same_text(sequences: EvalSequences) -> None:
    """Refuses to score a text that differs between hosts.

    Raises:
        PeersDifferError: on every process; names the processes that differ.
    """
    hashed = hashlib.sha256(sequences.stream.tobytes())
    if sequences.counts is not None:
        hashed.update(np.packbits(sequences.counts).tobytes())
    digest = hashed.hexdigest()[:16]
    summary = f"{len(sequences.stream):,} tokens in {sequences.row_count:,} rows, sha256 {digest}…"
    require_same("the text", summary, advice="the files and the tokenizer must be the same on all hosts")


def require_same_weights(source: TensorSource) -> None:
    """Refuses to load a checkpoint that differs between hosts: each weight is read by only one of them.

    Raises:
        PeersDifferError: on every process; names the processes that differ.
    """
    if current_peers() is not None:
        # Only a run of several processes reads the checkpoint's headers a second time.
        from levanter.memorization.books import weights_digest

        digest = f"{len(source.tensors)} tensors, digest {weights_digest(source)[:16]}…"
        require_same("the checkpoint", digest, advice="its files must be the same on all hosts")


def _flat_values(key: str, value: object) -> Iterator[tuple[str, str]]:
    """The values of a configuration under dotted keys, without paths; long values as a digest."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat_values(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for n, item in enumerate(value):
            yield from _flat_values(f"{key}[{n}]", item)
    # A string with a slash is a path, which may differ between hosts.
    elif not (isinstance(value, str) and "/" in value and len(value) < 1000):
        text = json.dumps(value, default=str, ensure_ascii=False)
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
        yield key, text if len(text) <= _LONGEST_VALUE else f"{text[:20]}… ({len(text)} characters, {digest})"
