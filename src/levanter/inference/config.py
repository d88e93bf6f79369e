"""`InferenceConfig`: the `inference:` block of every entry point that generates text. Nothing here imports JAX."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from levanter.config.validators import PositiveInt, Range, Ranged

Allocation: TypeAlias = Literal["fixed", "paged"]
Auto: TypeAlias = Literal["auto"]
StepCount: TypeAlias = Annotated[int, Range(1, 8)]

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")
SHORT_PARTS = (128, 32)
"""Sizes of prefill calls that are shorter than `prefill_chunk`, so that little is padded."""
CHUNK = 512
"""Default of `prefill_chunk` on accelerators: enough tokens to multiply at their peak."""
LEAST_CHUNK = 16
"""Smallest default of `prefill_chunk` on CPUs: fewer tokens take more time each."""
PROMPTS_TOGETHER = 8
"""Maximum number of prompts in a prefill call."""
LEAST_PART = 8
"""Tokens of the shortest prefill call on CPUs."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Ranged):
    """Decode slots and the KV cache.

    Attributes:
        max_rows: decode slots over all devices (sequences that are generated concurrently); a multiple of the batch
            shards. `auto` takes as many as fit by the plan, at most 256, and 32 on CPUs.
        max_seq_len: the largest number of positions of a slot, prompt and generated text together; null for the
            model's.
        prefill_chunk: the largest number of prompt tokens per prefill call; no slot decodes during that call. `auto` is
            512; on CPUs, where the time of a call grows with its tokens, it is twice the number of slots, so that a
            prefill call takes about as long as two decode calls.
        steps: decode steps per call: more of them save overhead between calls, but a finished slot stays occupied until
            the call ends.
        cache_dtype: dtype of cached keys and values: float32, bfloat16, float16 or int8 (integers with a bfloat16 scale
            per position and head); null for the compute dtype, and on CPUs float32 instead of bfloat16.
        allocation: `fixed`: each slot has one contiguous page of the full length, which needs no gather; `paged`: slots
            allocate pages of `page_size` positions as they grow.
        page_size: positions in a page of a paged cache.
        penalties: whether slots count their tokens, which presence, frequency and repetition penalties need: one
            integer per slot and vocabulary id.
        prompt_logprobs: whether Programs that score prompts are compiled, which `echo` with `logprobs` needs.
        pages: pages of a paged cache over all devices; null for as many as all slots need at full length.
        share_prefixes: whether slots of a paged cache share the pages of a common prefix, which is then computed once;
            a slot whose prompt is scored, or has a repetition penalty, computes its own.
    """

    range_prefix: ClassVar[str] = "inference."

    max_rows: PositiveInt | Auto = 8
    max_seq_len: PositiveInt | None = None
    prefill_chunk: PositiveInt | Auto = "auto"
    steps: StepCount = 1
    cache_dtype: str | None = None
    allocation: Allocation = "fixed"
    page_size: PositiveInt = 128
    penalties: bool = True
    prompt_logprobs: bool = False
    pages: PositiveInt | None = None
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            known = ", ".join(CACHE_DTYPES)
            problems.append(f"{self.range_prefix}cache_dtype: one of {known}, or null; got {self.cache_dtype!r}")
        if self.pages is not None and self.allocation == "fixed":
            problems.append(f"{self.range_prefix}pages: only a paged cache has a number of pages (allocation: paged)")
        if problems:
            raise ValueError("\n".join(problems))

    def chunk(self, rows: int, *, platform: str) -> int:
        """Maximum prompt tokens of a prefill call.

        A prompt is cut the same way whatever else runs, so this is short enough not to delay others in any case.

        Args:
            rows: rows of a shard.
            platform: platform of the devices.
        """
        # A configured size is taken as it is, whatever the platform.
        if self.prefill_chunk != "auto":
            return self.prefill_chunk
        if platform != "cpu" or rows == 1:
            return CHUNK
        # The largest power of two that is at most twice the number of rows.
        return min(CHUNK, max(LEAST_CHUNK, 1 << ((2 * rows).bit_length() - 1)))

    def prefill_calls(self, rows: int, max_seq_len: int, *, platform: str) -> tuple[tuple[int, int], ...]:
        """The prefill calls: prompts of a shard and tokens of each, the longest last.

        Calls of shorter chunks take more prompts, so that no call has more tokens than the longest.

        Args:
            rows: rows of a shard.
            max_seq_len: the largest number of positions of a slot, prompt and generated text together; null for the
                model's.
            platform: platform of the devices.
        """
        chunk, sizes = self.chunk(rows, platform=platform), SHORT_PARTS
        longest = min(chunk, max_seq_len)
        if self.prefill_chunk == "auto" and chunk < CHUNK:
            # On CPUs chunks are short already: the shorter calls are a half and a quarter of them.
            sizes = tuple(size for size in (longest // 2, longest // 4) if size >= LEAST_PART)
        # XLA on TPU copies the whole cache for a call that writes to several rows by tables: with 44 rows of 70B on
        # v5e-8 the temporaries were 6.98 GiB, and 15 MiB with one row.
        together = 1 if platform == "tpu" else min(rows, PROMPTS_TOGETHER)
        every = (*(size for size in sorted(sizes) if size < longest), longest)
        return tuple((min(max(1, longest // size), together), size) for size in every)
