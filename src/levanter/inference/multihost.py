"""One engine on several processes: process 0 decides which calls run, and every process dispatches them.

Process 0 reads requests, plans steps and makes text; the other processes have neither requests nor a tokenizer. Before
process 0 dispatches a call it broadcasts the call (`LeaderRunner`), and the others dispatch the same one
(`run_follower`). A message is small: it holds sampling parameters of slots and page tables only where they changed
(`levanter.distributed.broadcast`).

Messages use the connections that the processes of a run have anyway (`levanter.distributed`), so a process that is
killed is noticed as everywhere else.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from haliax_ext.pytree import PyTree
from levanter.distributed.broadcast import ReceiveFrame, SendFrame, receive_message, send_message
from levanter.inference.engine import Masks, Runner, SampledArrays
from levanter.inference.programs import GenerationPrograms, PromptScores, ScorePromptFn
from levanter.inference.requests import ChoiceId, SamplingParams
from levanter.inference.sampling import SlotSampling
from levanter.inference.scheduler_state import DecodeSlot, PrefillChunk

MAX_INFLIGHT = 2
"""Calls that a following process dispatches before it waits for the first."""
_NO_CHOICE = ChoiceId("", 0)
"""Following processes do not know the requests, and need not."""


@dataclass(eq=False)
class _ChangeTracker:
    """Tables and sampling parameters as of the last message, so that a message contains only changes.

    The leader and each follower have one. All apply the same messages in order, so they always agree.
    """

    tables: np.ndarray | None = None
    sampling: list[SlotSampling | None] = field(default_factory=list)

    def of(self, tables: np.ndarray, sampling: Sequence[SlotSampling | None]) -> dict[str, Any]:
        """The changes since the last call, as JSON."""
        before = [None] * len(sampling) if not self.sampling else self.sampling
        # Identity is compared first: the engine passes the same object as long as a row has the same sequence.
        changed = [n for n, one in enumerate(sampling) if one is not before[n] and one != before[n]]
        # Rows of the page table that differ from the last call.
        moved = range(len(tables)) if self.tables is None else np.flatnonzero((tables != self.tables).any(axis=1))
        self.tables, self.sampling = tables.copy(), list(sampling)
        return {
            "shape": list(tables.shape),
            "tables": {str(n): tables[n].tolist() for n in moved},
            "sampling": {str(n): _encode_sampling(sampling[n]) for n in changed},
        }

    def taken(self, message: Mapping[str, Any]) -> tuple[np.ndarray, list[SlotSampling | None]]:
        """Tables and sampling parameters of a call: those of the last call with the changes of a message."""
        tables = np.zeros(message["shape"], np.int32) if self.tables is None else self.tables.copy()
        sampling = list(self.sampling) or [None] * len(tables)
        for n, row in message["tables"].items():
            tables[int(n)] = row
        for n, one in message["sampling"].items():
            sampling[int(n)] = _decode_sampling(one)
        # Copies: the arrays of an earlier call may still be in use by it.
        self.tables, self.sampling = tables, sampling
        return tables, sampling


def _encode_sampling(sampling: SlotSampling | None) -> dict[str, Any] | None:
    return None if sampling is None else asdict(sampling)


def _decode_sampling(plain: Mapping[str, Any] | None) -> SlotSampling | None:
    if plain is None:
        return None
    # JSON has lists and string keys where `SamplingParams` has tuples and integer keys.
    params: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain["params"].items()
    }
    params["logit_bias"] = {int(id): bias for id, bias in params["logit_bias"].items()}
    fields: dict[str, Any] = {**plain, "params": SamplingParams(**params), "stop_ids": tuple(plain["stop_ids"])}
    return SlotSampling(**fields)


def _encode_masks(masks: Masks | None) -> dict[str, list[int]]:
    return {str(n): mask.tolist() for n, mask in (masks or {}).items()}


def _decode_masks(plain: Mapping[str, list[int]]) -> dict[int, np.ndarray]:
    return {int(n): np.asarray(mask, np.uint32) for n, mask in plain.items()}


class LeaderRunner:
    """The runner of process 0: broadcasts each call before it dispatches it.

    Args:
        rows: the runner of this process's devices.
        send: sends a message to the other processes.
        scorer: scores prompts; None if no request may have its prompt scored.
    """

    def __init__(self, rows: Runner, send: SendFrame, scorer: ScorePromptFn | None = None):
        self._rows, self._send, self._scorer = rows, send, scorer
        self._changes = _ChangeTracker()

    @property
    def programs(self) -> GenerationPrograms:
        """The Programs of the run."""
        return self._rows.programs

    def prefill(
        self,
        bucket: tuple[int, int],
        chunks: Sequence[PrefillChunk],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """See `DeviceRunner.prefill`."""
        # The order is that of `_decode_chunk`.
        chunk_fields = [
            [p.slot, p.lane, p.start, list(p.tokens), p.fresh, p.ends, p.remaining, list(p.earlier), p.load, p.save]
            for p in chunks
        ]
        # Sent before the call: a Program with collectives runs only when all processes have dispatched it.
        self._broadcast_call("prefill", tables, sampling, masks, bucket=list(bucket), chunks=chunk_fields)
        return self._rows.prefill(bucket, chunks, tables, sampling, masks)

    def decode(
        self,
        rows: Sequence[DecodeSlot],
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """See `DeviceRunner.decode`."""
        row_fields = [[row.slot, row.start, row.tokens] for row in rows]
        self._broadcast_call("decode", tables, sampling, masks, rows=row_fields)
        return self._rows.decode(rows, tables, sampling, masks)

    def update(self, model: PyTree) -> None:
        """See `DeviceRunner.update`. Every process makes the model, and updates its runner itself."""
        self._rows.update(model)
        # The followers of the next calls know neither tables nor sampling parameters.
        self._changes = _ChangeTracker()

    def score(self, tokens: Sequence[int], top: int) -> PromptScores:
        """Scores a prompt; see `PromptScorer`."""
        assert self._scorer is not None
        send_message({"call": "score", "tokens": list(tokens), "top": top}, self._send)
        return self._scorer(tokens, top)

    def end(self) -> None:
        """Ends the followers: there are no more calls."""
        send_message({"call": "end"}, self._send)

    def _broadcast_call(
        self,
        call: str,
        tables: np.ndarray,
        sampling: Sequence[SlotSampling | None],
        masks: Masks | None,
        **fields: object,
    ) -> None:
        changes = self._changes.of(tables, sampling)
        send_message({"call": call, **changes, "masks": _encode_masks(masks), **fields}, self._send)


def run_follower(rows: Runner, receive: ReceiveFrame, scorer: ScorePromptFn | None = None) -> int:
    """Dispatches the calls of process 0 until it ends.

    Args:
        rows: the runner of this process's devices.
        receive: receives the messages of process 0.
        scorer: scores prompts; None if no request may have its prompt scored.

    Returns:
        The number of calls.
    """
    changes, count = _ChangeTracker(), 0
    in_flight: deque[SampledArrays] = deque()
    while (message := receive_message(receive))["call"] != "end":
        count += 1
        if message["call"] == "score":
            assert scorer is not None
            # The scores are returned to process 0 only; this process takes part in the computation.
            scorer(message["tokens"], message["top"])
            continue
        tables, sampling = changes.taken(message)
        masks = _decode_masks(message["masks"])
        if message["call"] == "decode":
            chosen = [DecodeSlot(id=_NO_CHOICE, slot=p, start=start, tokens=n) for p, start, n in message["rows"]]
            in_flight.append(rows.decode(chosen, tables, sampling, masks))
        else:
            size, length = message["bucket"]
            in_flight.append(
                rows.prefill((size, length), [_decode_chunk(one) for one in message["chunks"]], tables, sampling, masks)
            )
        # Bounds the calls in flight. The results themselves are used by process 0 only.
        if len(in_flight) > MAX_INFLIGHT:
            jax.block_until_ready(in_flight.popleft())
    # The process must not leave, and its devices with it, while a call is running.
    jax.block_until_ready(list(in_flight))
    return count


def _decode_chunk(fields: Sequence[Any]) -> PrefillChunk:
    place, lane, start, tokens, fresh, ends, remaining, earlier, load, save = fields
    return PrefillChunk(
        id=_NO_CHOICE,
        slot=place,
        lane=lane,
        start=start,
        tokens=tuple(tokens),
        fresh=fresh,
        ends=ends,
        remaining=remaining,
        earlier=tuple(earlier),
        load=load,
        save=save,
    )
