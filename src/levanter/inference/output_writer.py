"""`OutputWriter`: responses in the order of the requests, in a file that is written atomically and resumably.

Responses arrive in any order and are written in that of their requests. During a run they are in *parts*, files of
consecutive lines that are written atomically, in a folder next to the output; the next run with the same *identity*
(input, model, parameters) continues after them. At the end the parts become the output, in one step, and are removed.
As each response depends on its request alone, an interrupted run and its successors write, byte for byte, what one run
would have written.
"""

import json
import logging
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from levanter.base.bounded_json import Json
from levanter.inference.jsonl import InvalidLine
from levanter.inference.programs import PromptScores
from levanter.inference.requests import ChoiceId, Request
from levanter.io import Lease, OtherRunError, PartFolder, atomic_write, exists, open_read
from levanter.io.atomic import remove_stale_temporaries
from levanter.io.resumable import remove

logger = logging.getLogger(__name__)

PART_LINES = 256
"""Maximum number of responses in a part."""
PART_SECONDS = 15.0
"""Maximum seconds for which a response waits for others before it is stored."""
LOGPROB_DIGITS = 5
"""Decimals of log-probabilities: the last bits of a float32 depend on which rows were computed together."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A finished choice.

    Attributes:
        of: the choice.
        text: its text.
        tokens: its ids, one that ended it included.
        reason: `stop` or `length`.
        logprobs: log-probabilities of its tokens; None if they were not requested.
        top: the likeliest tokens at the position of each, as pairs of id and log-probability.
    """

    of: ChoiceId
    text: str
    tokens: tuple[int, ...]
    reason: str
    logprobs: tuple[float, ...] | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Echo:
    """The prompt as part of its response.

    Attributes:
        text: its text.
        scores: log-probabilities of its tokens; None if they were not requested.
    """

    text: str
    scores: PromptScores | None = None


def answer_line(request: Request, choices: Sequence[Choice], *, echo: Echo | None = None) -> bytes:
    """The line of a response, with the prompt if `echo` is given."""
    return _line(
        {
            "id": request.id,
            "seed": request.seed,
            "prompt_tokens": len(request.tokens),
            **({} if echo is None else _echo_json(request, echo)),
            "choices": [_choice_json(one) for one in sorted(choices, key=lambda one: one.of.choice)],
        }
    )


def _echo_json(request: Request, echo: Echo) -> dict[str, Json]:
    fields: dict[str, Json] = {"prompt": echo.text, "prompt_ids": list(request.tokens)}
    if echo.scores is not None:
        # Nothing predicts the first token, so its entry is null.
        fields["prompt_logprobs"] = [None, *(round(one, LOGPROB_DIGITS) for one in echo.scores.logprobs)]
        if request.params.logprobs:
            fields["prompt_top_logprobs"] = [None, *(_pairs(one) for one in echo.scores.top)]
    return fields


def _pairs(top: Sequence[tuple[int, float]]) -> list[Json]:
    return [[id, round(value, LOGPROB_DIGITS)] for id, value in top]


def _choice_json(choice: Choice) -> dict[str, Json]:
    fields: dict[str, Json] = {
        "index": choice.of.choice,
        "text": choice.text,
        "tokens": list(choice.tokens),
        "finish_reason": choice.reason,
    }
    if choice.logprobs is not None:
        fields["logprobs"] = [round(one, LOGPROB_DIGITS) for one in choice.logprobs]
    if choice.top:
        fields["top_logprobs"] = [_pairs(one) for one in choice.top]
    return fields


def error_line(broken: InvalidLine) -> bytes:
    """The response to an invalid line, or to a request that failed."""
    # The error may quote half of a surrogate pair, which UTF-8 cannot encode.
    error = broken.error.encode("utf-8", "backslashreplace").decode()
    return _line({"id": broken.id, "line": broken.line, "error": error})


def _line(value: Mapping[str, Json]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class LostPartsError(ValueError):
    """Parts of a run are no longer where it stored them."""


class OutputWriter:
    """Collects the responses of one run, and writes them to its output.

    Args:
        path: path of the output, local or a URL.
        identity: everything that the responses depend on, as JSON.
        lease: the lease on the folder of parts, if other processes may write there; None otherwise.
    """

    def __init__(self, path: str, identity: Mapping[str, Json], *, lease: Lease | None = None):
        self.path = path
        self._folder = PartFolder(
            path=f"{path}.parts",
            identity=identity,
            digits=9,
            ending=".jsonl",
            writer="generate",
            advice="name another output, or remove the folder",
            lease=lease,
        )
        # `_waiting` holds responses behind a gap, by request; `_ready` those that follow the stored ones without a gap.
        self._waiting: dict[int, bytes] = {}
        self._ready: list[bytes] = []
        self._stored = self._taken = 0
        self._since = time.monotonic()

    @property
    def folder(self) -> str:
        """The folder of the parts."""
        return self._folder.path

    @property
    def done(self) -> int:
        """Number of responses, from the first one on without a gap."""
        return self._taken

    def begin(self) -> int:
        """Finds the responses that earlier runs have stored.

        Returns:
            The number of requests, from the first one on, that have responses.

        Raises:
            OtherRunError: the parts belong to another run, or the output exists already.
        """
        self._folder.check_lease()
        if not self._folder.has_begun(f"{self.folder} has answers of"):
            if exists(self.path):
                raise OtherRunError(f"{self.path} exists already; remove it, or name another output")
            self._folder.begin()
        self._stored = self._taken = sum(len(part) for part in self._stored_parts())
        # Parts behind a damaged one are written again, and their old numbers may not match the new ones.
        for first, path in self._folder.numbered().items():
            if first >= self._stored:
                remove(path)
        return self._taken

    def add(self, index: int, line: bytes) -> None:
        """Adds the response to a request.

        Args:
            index: index of the request, from 0; each may be added once.
            line: its response.
        """
        assert index >= self._taken and index not in self._waiting, f"request {index} is answered twice"
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        self._waiting[index] = line
        while self._taken in self._waiting:
            self._ready.append(self._waiting.pop(self._taken))
            self._taken += 1
        if len(self._ready) >= PART_LINES or (self._ready and time.monotonic() - self._since >= PART_SECONDS):
            self.store()

    def store(self) -> None:
        """Stores the responses that are ready as a part, which survives the end of this process."""
        if not self._ready:
            return
        self._folder.check_lease()
        # The head lets a reader recognize a part that was cut or belongs to another position.
        body = b"".join(self._ready)
        head = {"first": self._stored, "lines": len(self._ready), "crc32": zlib.crc32(body)}
        # The counters change only after the part is complete: if writing fails, a later call writes the same lines.
        with atomic_write(self._folder.at(self._stored)) as file:
            file.write(json.dumps(head).encode() + b"\n" + body)
        self._stored += len(self._ready)
        self._ready = []
        self._since = time.monotonic()

    def finish(self) -> int:
        """Joins the parts to the output, and removes them.

        Returns:
            The number of responses in the output.

        Raises:
            LostPartsError: stored responses are missing; those that remain stay for the next run.
        """
        assert not self._waiting, f"request {self._taken} has no answer"
        self.store()
        self._folder.check_lease()
        # A run that was killed while it wrote the output has left a temporary file.
        parent, slash, name = self.path.rpartition("/")
        remove_stale_temporaries(parent or slash or ".", of=name)
        count = 0
        with atomic_write(self.path) as file:
            for part in self._stored_parts():
                file.write(b"".join(part))
                count += len(part)
            # In the block, so that no output with fewer lines appears.
            if count != self._taken:
                raise LostPartsError(
                    f"{self.folder}: it holds {count:,} of the {self._taken:,} responses that were stored there; "
                    "something removed or changed its files while the run wrote\n"
                    f"  → start the command again: it keeps these {count:,} and generates the others"
                )
        # After the output is complete: a run that is killed in between finds the parts, and joins them again.
        self._folder.remove()
        return count

    def _stored_parts(self) -> Iterable[list[bytes]]:
        """The lines of each stored part, up to the first part that is missing or damaged."""
        paths, first = self._folder.numbered(), 0
        while first in paths:
            part = _read_part(paths[first], first)
            if part is None:
                logger.warning("%s is damaged; its responses are generated again", paths[first])
                return
            yield part
            first += len(part)


def _read_part(path: str, first: int) -> list[bytes] | None:
    with open_read(path) as file:
        head, _, body = file.read().partition(b"\n")
    lines = body.splitlines(keepends=True)
    expected = {"first": first, "lines": len(lines), "crc32": zlib.crc32(body)}
    try:
        return lines if lines and json.loads(head) == expected else None
    except ValueError:
        return None
