"""`RecordFile`: a small JSON file beside a run that serves its report, and that the run does not depend on."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from levanter.base.bounded_json import parse_json
from levanter.io.atomic import atomic_write

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 1
_MOST_BYTES = 16 << 20


class RecordFile:
    """A JSON object in a file of a run's folder, which is read once and written many times.

    A run does not end because the file cannot be read or written: that is logged, the latter once. A file that cannot
    be read is kept under another name.
    """

    def __init__(self, path: Path):
        self.path = path
        self._failed = False

    def read(self, parse: Callable[[Mapping[str, object]], T]) -> T | None:
        """The parsed content; None if there is none that can be read.

        Args:
            parse: the object → its value; a `ValueError` says that it is not what was written.
        """
        try:
            # `lexists`: a link to nothing is somebody's mistake, and is reported like one.
            if not os.path.lexists(self.path):
                return None
            # To read a pipe would be to wait for its writer.
            if not self.path.is_file() or self.path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it is not a regular file of at most {_MOST_BYTES >> 20} MiB")
            document = parse_json(self.path.read_text(encoding="utf-8"))
            if not isinstance(document, Mapping) or document.get("format") != FORMAT:
                raise ValueError(f"it is not a record of format {FORMAT}")
            return parse(document)
        except (OSError, ValueError) as error:
            self._set_aside(error)
            return None

    def write(self, document: Mapping[str, object]) -> None:
        """Replaces the content."""
        try:
            with atomic_write(str(self.path)) as file:
                file.write((json.dumps({"format": FORMAT, **document}) + "\n").encode())
        except (OSError, ValueError) as error:
            # A disk that is full now may have space later, so writing is tried again, silently.
            if not self._failed:
                logger.warning("%s cannot be written, and the report of this run lacks it: %s", self.path, error)
            self._failed = True

    def _set_aside(self, error: Exception) -> None:
        # Renamed and not deleted: somebody may want to know what it was.
        kept = self.path.with_name(f"{self.path.name}.unreadable")
        what = "the report of this run lacks its earlier attempts"
        try:
            os.replace(self.path, kept)
        except OSError as second:
            logger.warning("%s cannot be read, so %s: %s; nor can it be renamed: %s", self.path, what, error, second)
            return
        logger.warning("%s cannot be read, so %s: %s; it is kept as %s", self.path, what, error, kept.name)


def finite_or_none(value: object) -> float | None:
    """A number as it is; None for null.

    Raises:
        ValueError: it is neither a finite number nor null.
    """
    return None if value is None else finite(value)


def finite(value: object) -> float:
    """A number of a record.

    Raises:
        ValueError: it is not a finite number.
    """
    # The comparison is false for NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{value!r:.60} is not a number")
    return value
