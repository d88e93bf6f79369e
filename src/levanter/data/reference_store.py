"""Stores the reference model's log-probabilities of preference pairs: two float32 values per pair.

    <folder>/
        manifest.json        the identity of reference and pairs part-00000.f32 …     `PART` pairs each, then a digest
        of the identity, the part's number and the values

A part is valid if its digest is right, so a build that was killed continues with the missing parts and produces the
same bytes. A folder with another identity (another reference, other pairs) is refused.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levanter.base.input_limits import read_bounded
from levanter.data.errors import DataError
from levanter.data.manifest import MANIFEST, read_json
from levanter.data.pairs import PairRows, pair_targets
from levanter.data.store_write import write_file
from levanter.io.paths import exists, file_size, join, open_read

PART = 4096
"""Pairs in a file."""
VERSION = 1
_DIGEST = hashlib.sha256().digest_size
_NAMES_ONLY = ("reference",)
"""Keys of an identity that only name something: the same weights may have another path later."""


class ReferenceStoreError(DataError):
    """Stored log-probabilities are of another reference, or of other pairs."""


@dataclass(frozen=True, kw_only=True)
class ReferenceStore:
    """The log-probabilities of one set.

    Attributes:
        folder: the folder of the files.
        identity: what they depend on: the reference and its digest, the pairs' digest, template, length, dtype.
        pairs: the number of pairs.
    """

    folder: str
    identity: Mapping[str, Any]
    pairs: int

    @property
    def chunks(self) -> Sequence[range]:
        """The pairs of each file."""
        return [range(start, min(start + PART, self.pairs)) for start in range(0, self.pairs, PART)]

    def check(self) -> None:
        """Compares the manifest, if there is one, with this identity.

        Raises:
            ReferenceStoreError: it has another identity; lists every difference.
        """
        path = join(self.folder, MANIFEST)
        if not exists(path):
            return
        document = read_json(path)
        stored = document.get("identity") if isinstance(document, dict) and document.get("version") == VERSION else None
        if not isinstance(stored, dict):
            raise ReferenceStoreError(f"{path}: is no manifest of log-probabilities of a reference; delete the folder")
        differences = [
            f"  {key}: made with {stored.get(key)!r}, configured {self.identity.get(key)!r}"
            for key in sorted(stored.keys() | self.identity.keys())
            if key not in _NAMES_ONLY and stored.get(key) != self.identity.get(key)
        ]
        if differences:
            listed = "\n".join(differences)
            raise ReferenceStoreError(
                f"{self.folder}: these log-probabilities are of another reference, or of other pairs (they were made "
                f"with {stored.get('reference')}):\n{listed}\n  give another cache_dir, or delete this folder"
            )

    def begin(self) -> None:
        """Writes the manifest."""
        content = json.dumps({"version": VERSION, "identity": dict(self.identity)}, indent=1, sort_keys=True) + "\n"
        write_file(join(self.folder, MANIFEST), content.encode())

    def write(self, number: int, values: np.ndarray) -> None:
        """Writes a part as a whole.

        Args:
            number: of the part.
            values: float32 `[pairs of the part, 2]`.
        """
        assert values.shape == (len(self.chunks[number]), 2), (values.shape, number)
        # A fixed byte order, so that any machine can read the file.
        content = np.ascontiguousarray(values, "<f4").tobytes()
        write_file(self._path(number), content + self._digest(number, content))

    def read(self, number: int) -> np.ndarray | None:
        """A part; None if it is missing or damaged and must be computed again."""
        path, size = self._path(number), len(self.chunks[number]) * 8
        # The size check avoids reading a truncated file over the network.
        if not exists(path) or file_size(path) != size + _DIGEST:
            return None
        with open_read(path) as file:
            content = read_bounded(file, size + _DIGEST, where=path)
        # A file that was cut short or overwritten fails here and is computed again.
        if len(content) != size + _DIGEST or content[size:] != self._digest(number, content[:size]):
            return None
        return np.frombuffer(content[:size], "<f4").reshape(-1, 2).astype(np.float32)

    def missing(self) -> list[int]:
        """The parts that must be computed."""
        return [number for number in range(len(self.chunks)) if self.read(number) is None]

    def all(self) -> np.ndarray:
        """The values of all pairs, float32 `[pairs, 2]`.

        Raises:
            ReferenceStoreError: a part is missing.
        """
        chunks = [self.read(number) for number in range(len(self.chunks))]
        absent = [self._path(number) for number, chunk in enumerate(chunks) if chunk is None]
        if absent:
            # Each host has written its parts; a part that this host cannot see means that the folder is not shared.
            raise ReferenceStoreError(f"{absent[0]}: missing; the folder must be storage that all hosts see")
        return np.concatenate([np.zeros((0, 2), np.float32), *(chunk for chunk in chunks if chunk is not None)])

    def _path(self, number: int) -> str:
        return join(self.folder, f"part-{number:05d}.f32")

    def _digest(self, number: int, content: bytes) -> bytes:
        # The digest binds a part to its identity and number, so a part copied from another folder is not accepted.
        identity = {key: value for key, value in self.identity.items() if key not in _NAMES_ONLY}
        text = json.dumps([identity, number], sort_keys=True).encode()
        return hashlib.sha256(text + content).digest()


def pairs_digest(rows: PairRows) -> str:
    """Hex SHA-256 of the tokens of pairs and of the positions that count."""
    # The targets as one bit per position: which positions count is all that they add to the tokens.
    digest = hashlib.sha256(f"{len(rows)} {rows.half}".encode())
    for start in range(0, len(rows), PART):
        tokens, targets = pair_targets(rows.take(np.arange(start, min(start + PART, len(rows)))))
        digest.update(tokens.tobytes() + np.packbits(targets >= 0).tobytes())
    return digest.hexdigest()
