"""`InferenceConfig`: the `inference:` block of every entry point that generates text. Nothing here imports JAX."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from levanter.config.validators import PositiveInt, Range, Ranged

Allocation: TypeAlias = Literal["fixed", "paged"]
Auto: TypeAlias = Literal["auto"]
StepCount: TypeAlias = Annotated[int, Range(1, 8)]

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")
SHORT_PARTS = (128, 32)
"""Shorter parts of prompts than `prefill_chunk` that have a Program of their own, so that little is padded."""
CHUNK = 512
"""Tokens of a prompt in a call where nothing is said, on accelerators: enough to multiply at their peak."""
LEAST_CHUNK = 16
"""The same on CPUs at least: fewer tokens take more time each."""
PROMPTS_TOGETHER = 8
"""Prompts of which a call takes a part at most."""
LEAST_PART = 8
"""Tokens of the shortest of those calls."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Ranged):
    """How rows run, and how much of their keys and values is remembered.

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
            problems.append(f"inference.cache_dtype: one of {known}, or null; got {self.cache_dtype!r}")
        if self.pages is not None and self.allocation == "fixed":
            problems.append("inference.pages: only a paged cache has a number of pages (allocation: paged)")
        if problems:
            raise ValueError("\n".join(problems))

    def chunk(self, rows: int, *, platform: str) -> int:
        """Tokens of a prompt that a call takes at most. The same prompt is cut alike whoever else is there, so this is
        as short as it has to be beside others, always.

        Args:
            rows: of a shard.
            platform: of the devices.
        """
        if self.prefill_chunk != "auto":
            return self.prefill_chunk
        if platform != "cpu" or rows == 1:
            return CHUNK
        return min(CHUNK, max(LEAST_CHUNK, 1 << ((2 * rows).bit_length() - 1)))

    def prefill_calls(self, rows: int, max_seq_len: int, *, platform: str) -> tuple[tuple[int, int], ...]:
        """The calls for prompts: parts of how many of a shard they take, and tokens of each, the longest last.

        Where a call takes as long as it has tokens, none has more than the longest.

        Args:
            rows: of a shard.
            max_seq_len: the largest number of positions of a slot, prompt and generated text together; null for the
                model's.
            platform: of the devices.
        """
        chunk, sizes = self.chunk(rows, platform=platform), SHORT_PARTS
        longest = min(chunk, max_seq_len)
        if self.prefill_chunk == "auto" and chunk < CHUNK:
            sizes = tuple(size for size in (longest // 2, longest // 4) if size >= LEAST_PART)
        # A TPU's compiler copies the whole cache for a call that writes to several rows by tables: 44 rows of 70B on
        # v5e-8 had 6.98 GiB of temporaries, and 15 MiB with one.
        together = 1 if platform == "tpu" else min(rows, PROMPTS_TOGETHER)
        every = (*(size for size in sorted(sizes) if size < longest), longest)
        return tuple((min(max(1, longest // size), together), size) for size in every)
