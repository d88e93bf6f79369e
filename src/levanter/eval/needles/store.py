"""Batches that are answered already, kept so that a killed run goes on where it stopped.

A *part* is a batch's answers: one JSON file in `parts/` beside the results, which appears complete or not at all.
`results.json` is written last, and records the *identity* of the run: every fact that its answers depend on. A run with
another identity neither goes on with parts nor replaces results, unless it is told to.
"""

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from levanter.eval.needles.results import NeedleAnswer
from levanter.io import Lease, PartFolder, atomic_write, exists, join
from levanter.io.atomic import remove_stale_temporaries
from levanter.io.resumable import remove

logger = logging.getLogger(__name__)

PARTS, RESULTS = "parts", "results.json"
NeedleIdentity = Mapping[str, Any]
"""Every fact that answers depend on, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class NeedleStore:
    """The folder of a run.

    Attributes:
        folder: of its results.
        identity: what they depend on, as JSON values.
        lease: of the folder, in the process that writes.
    """

    folder: str
    identity: NeedleIdentity = field(repr=False)
    lease: Lease | None = field(default=None, repr=False)

    @property
    def parts(self) -> PartFolder:
        """Where its parts are."""
        return PartFolder(
            path=join(self.folder, PARTS),
            identity=self.identity,
            digits=6,
            ending=".json",
            writer="eval_needles",
            advice="another output_path, or if_exists: replace",
            lease=self.lease,
        )

    def is_done(self) -> bool:
        """Whether this same run has finished here.

        Raises:
            OtherRunError: another run has finished or begun here; lists what differs.
        """
        parts, path = self.parts, join(self.folder, RESULTS)
        if exists(path):
            found = parts.read_json(path)
            identity = found.get("identity") if isinstance(found, Mapping) else None
            parts.require_same(identity, f"output_path: {self.folder} holds the results of")
            return True
        parts.has_begun(f"output_path: {self.folder} holds a part of")
        return False

    def begin(self) -> None:
        """Records the identity, and removes what killed writers left behind."""
        self.parts.check_lease()
        remove_stale_temporaries(self.folder)
        self.parts.begin()

    def write(self, number: int, answers: Sequence[NeedleAnswer]) -> None:
        """Adds the answers of a batch."""
        parts = self.parts
        parts.check_lease()
        rows = [{"logprobs": list(each.logprobs), "ranks": list(each.ranks)} for each in answers]
        with atomic_write(parts.at(number)) as file:
            file.write(json.dumps({"rows": rows, "crc32": self._sum(number, rows)}).encode())

    def read(self) -> dict[int, tuple[NeedleAnswer, ...]]:
        """The answers that are there, by batch; damaged ones are left out."""
        parts, found = self.parts, {}
        for number, path in parts.numbered().items():
            try:
                part = parts.read_json(path)
                rows = part["rows"]  # pyright: ignore
                if part["crc32"] != self._sum(number, rows):  # pyright: ignore
                    raise ValueError("its checksum differs")
                found[number] = tuple(
                    NeedleAnswer(logprobs=tuple(r["logprobs"]), ranks=tuple(r["ranks"])) for r in rows
                )
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s is damaged (%s); its questions are asked again", path, error)
        return found

    def clean(self) -> None:
        """Removes the parts."""
        self.parts.check_lease()
        self.parts.remove()

    def start_over(self) -> None:
        """Discards what any run did here."""
        self.clean()
        remove(join(self.folder, RESULTS))

    def _sum(self, number: int, rows: object) -> int:
        identity = json.loads(json.dumps(dict(self.identity)))
        return zlib.crc32(json.dumps([identity, number, rows], sort_keys=True).encode())
