"""`SlotState`: the state of every running sequence on the devices, between two calls.

Array updates start and end rows: a prefill call writes the rows whose prompts end in it (`begin`), a decode step
advances all of them (`advance`), and a mask releases rows. So no request compiles anything.

The *last token* of a row was sampled but not yet read by the model: the next step writes its key and value, at
`position`.
"""

from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.inference.sampling import GENERATED, IN_PROMPT, Sampled, SlotParams, Word


class SlotState(eqx.Module):
    """The state of all rows.

    Attributes:
        last_token: int32 `[batch]`, the token that is read next.
        position: int32 `[batch]`, its position in the row's sequence.
        remaining: int32 `[batch]`, how many tokens may still be sampled.
        done: boolean `[batch]`; a row that is done, or unused, samples nothing.
        noise: uint32 `[batch, seed_word]`, the key of the row's noise.
        counts: int32 `[batch, vocab]`, how often each token occurred (`sampling.IN_PROMPT`, `sampling.GENERATED`); None
            if penalties are not configured.
    """

    last_token: NamedArray
    position: NamedArray
    remaining: NamedArray
    done: NamedArray
    noise: NamedArray
    counts: NamedArray | None

    @staticmethod
    def empty(Batch: Axis, Vocab: Axis | None = None) -> "SlotState":
        """The state of unused rows.

        Args:
            Batch: the axis of rows.
            Vocab: the vocabulary, if tokens are counted for penalties.
        """
        # Every row starts as done, so the other values have no effect before a prefill call writes them.
        numbers = hax.zeros(Batch, dtype=jnp.int32)
        return SlotState(
            last_token=numbers,
            position=numbers,
            remaining=numbers,
            done=hax.ones(Batch, dtype=jnp.bool_),
            noise=hax.zeros((Batch, Word), dtype=jnp.uint32),
            counts=None if Vocab is None else hax.zeros((Batch, Vocab), dtype=jnp.int32),
        )

    @property
    def Batch(self) -> Axis:
        """The axis of rows."""
        return self.done.resolve_axis("batch")

    def take_rows(self, rows: NamedArray) -> "SlotState":
        """The state of some of the rows.

        Args:
            rows: int32, indices over the `batch` axis of the call; an index past the last row gives an arbitrary row,
                marked as done.
        """
        (Part,) = rows.axes
        # An index past the end reads an arbitrary row, which is marked as done below.
        indices = jnp.clip(rows.array, 0, self.Batch.size - 1)
        state = jax.tree.map(
            lambda x: hax.named(x.array[indices], (Part, *x.axes[1:])),
            self,
            is_leaf=lambda x: isinstance(x, NamedArray),
        )
        inside = hax.named((rows.array >= 0) & (rows.array < self.Batch.size), rows.axes)
        return eqx.tree_at(lambda s: s.done, state, state.done | ~inside)

    def replace_rows(self, rows: NamedArray, part: "SlotState") -> "SlotState":
        """The state with some of its rows replaced.

        Args:
            rows: int32, indices over the `batch` of `part`, each at most once; an index past the last row drops the
                entry.
            part: the new rows, such as a changed `take_rows(rows)`.
        """
        indices = self._scatter_indices(rows)

        def put(x: NamedArray, new: NamedArray) -> NamedArray:
            new = new.rearrange((rows.axes[0].name, *(axis.name for axis in x.axes[1:])))
            return hax.named(x.array.at[indices].set(new.array, mode="drop"), x.axes)

        return jax.tree.map(put, self, part, is_leaf=lambda x: isinstance(x, NamedArray))

    def begin(
        self,
        rows: NamedArray,
        sampled: Sampled,
        params: SlotParams,
        *,
        noise: NamedArray,
        position: NamedArray,
        remaining: NamedArray,
    ) -> "SlotState":
        """The state after the end of some rows' prompts, with their first tokens.

        Args:
            rows: int32 over the `batch` of the prefill call: the row of the state for each of its lanes. An index past
                the last row stands for prompts that do not end in this call, and for unused lanes.
            sampled: the first tokens.
            params: sampling parameters of the lanes.
            noise: the keys of their noise, see `sampling.noise_keys`.
            position: int32, the position of each first token in its sequence.
            remaining: int32, how many tokens each row may have, this first one included.
        """
        (Part,) = rows.axes
        fresh = SlotState(
            last_token=sampled.tokens,
            # `advance` adds one for the first token.
            position=position - 1,
            remaining=remaining,
            done=hax.zeros(Part, dtype=jnp.bool_),
            noise=noise,
            counts=None if self.counts is None else self.take_rows(rows).counts,
        )
        return self.replace_rows(rows, fresh.advance(sampled, params))

    def advance(self, sampled: Sampled, params: SlotParams) -> "SlotState":
        """The state after one more token of every row that is not done.

        A row is done when it samples one of its stop ids, has no tokens remaining, or has no token that it could
        sample.
        """
        # Rows that are done keep their state: their lanes of the call compute, and nothing is recorded.
        running = ~self.done
        remaining = self.remaining - running.astype(jnp.int32)
        is_stop = cast(NamedArray, params.stop_ids == sampled.tokens)
        counts = self.counts
        if counts is not None:
            Vocab = counts.resolve_axis("vocab")
            ids = hax.arange(Vocab, dtype=jnp.int32).broadcast_to(counts.axes)
            # A comparison with all ids instead of a scatter: over a sharded vocabulary it needs no communication.
            is_token = (ids == sampled.tokens) & running
            counts = (counts + GENERATED * is_token.astype(jnp.int32)).rearrange(counts.axes)
        return SlotState(
            last_token=hax.where(running, sampled.tokens, self.last_token),
            position=self.position + running.astype(jnp.int32),
            remaining=remaining,
            done=self.done | ~sampled.ok | (remaining <= 0) | hax.any(is_stop, "stop_id"),
            noise=self.noise,
            counts=counts,
        )

    def release(self, rows: NamedArray) -> "SlotState":
        """The state without the rows where the mask `[batch]` is true."""
        return eqx.tree_at(lambda s: s.done, self, self.done | rows)

    def count_prompt(
        self,
        rows: NamedArray,
        tokens: NamedArray,
        *,
        starts: NamedArray,
        lengths: NamedArray,
        prompts: NamedArray,
        fresh: NamedArray,
    ) -> "SlotState":
        """The state with the tokens of a prefill call counted; itself if penalties are not configured.

        Args:
            rows: int32 over the `batch` of the prefill call, the row of the state for each lane.
            tokens: int32 `[batch, position]`.
            starts: int32, the position of each lane's first token in its sequence.
            lengths: int32, number of tokens of each lane.
            prompts: int32, the length of the request's prompt. Later tokens were generated before the sequence was
                preempted.
            fresh: whether this is the first chunk of a sequence: nothing is counted yet.
        """
        if self.counts is None:
            return self
        (Part,), Pos = rows.axes, tokens.resolve_axis("position")
        Vocab = self.counts.resolve_axis("vocab")
        place = hax.arange(Pos, dtype=jnp.int32).broadcast_to((Part, Pos))
        valid = place < lengths
        # A preempted sequence is prefilled with tokens that it generated: these are counted as generated.
        in_prompt = place + starts < prompts
        ids = tokens.rearrange((Part, Pos)).array
        lanes = jnp.arange(Part.size)[:, None]

        # Indices `[batch, position]` into counts; tokens outside the mask get an id past the end, which the update
        # drops.
        def where(mask: NamedArray) -> tuple:
            return lanes, jnp.where(mask.rearrange((Part, Pos)).array, ids, Vocab.size)

        # Counts of a row continue from its previous chunk, unless this is its first.
        before = self.take_rows(rows).counts
        assert before is not None
        counts = hax.where(fresh, 0, before).rearrange((Part, Vocab)).array
        # The prompt sets a bit (max), generated tokens add. Positions that are not valid have ids out of range.
        counts = counts.at[where(valid & in_prompt)].max(IN_PROMPT, mode="drop")
        counts = counts.at[where(valid & ~in_prompt)].add(GENERATED, mode="drop")
        all_rows = (
            self.counts.rearrange((self.Batch, Vocab)).array.at[self._scatter_indices(rows)].set(counts, mode="drop")
        )
        return eqx.tree_at(lambda s: s.counts, self, hax.auto_sharded(hax.named(all_rows, (self.Batch, Vocab))))

    def _scatter_indices(self, rows: NamedArray) -> jax.Array:
        """Indices for a scatter that drops what is outside; JAX would count negative ones from the end."""
        return jnp.where(rows.array < 0, self.Batch.size, rows.array)
