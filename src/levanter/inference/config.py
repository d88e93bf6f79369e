"""`InferenceConfig`: the `inference:` block of every entry point that generates text. Nothing here imports JAX."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from levanter.config.ranges import PositiveInt, Range, Ranged

Allocation: TypeAlias = Literal["fixed", "paged"]
Auto: TypeAlias = Literal["auto"]
StepCount: TypeAlias = Annotated[int, Range(1, 8)]

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")
SHORT_PARTS = (128, 32)
"""Shorter parts of prompts than `prefill_chunk` that have a Program of their own, so that little is padded."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Ranged):
    """How rows run, and how much of their keys and values is remembered.

    Attributes:
        max_rows: rows that run at once, over all devices; a multiple of the batch's shards. `auto` takes as many as the
            plan finds room for, 256 at most, and on CPUs 32.
        max_seq_len: positions that a row may have, prompt and text together; null for the model's.
        prefill_chunk: tokens of a prompt that a call takes at most.
        steps: tokens that each row gets in a call: more of them save time between calls, and a row that ends waits for
            the call's end.
        cache_dtype: of keys and values, float32, bfloat16, float16 or int8 (integers with a bfloat16 scale for each
            position and head); null for the compute dtype.
        allocation: `fixed`: each row owns one page as long as a row may get, and nothing is gathered; `paged`: rows
            take pages of `page_size` positions as they grow.
        page_size: positions in a page of a paged cache.
        penalties: whether rows count their tokens, which presence, frequency and repetition penalties go by: an integer
            for each row and id of the vocabulary.
        prompt_logprobs: whether there are Programs that score prompts, which `echo` with `logprobs` asks for.
        pages: pages of a paged cache over all devices; null for as many as all rows need at full length.
        share_prefixes: whether rows of a paged cache that begin alike share the pages of their beginning, so that it is
            computed once; a row whose prompt is scored or penalized for repetition computes its own.
    """

    range_prefix: ClassVar[str] = "inference."

    max_rows: PositiveInt | Auto = 8
    max_seq_len: PositiveInt | None = None
    prefill_chunk: PositiveInt = 512
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

    def parts(self, max_seq_len: int) -> tuple[int, ...]:
        """Tokens of a prompt that a call takes: of each of the Programs, ascending.

        Args:
            max_seq_len: positions that a row may have.
        """
        longest = min(self.prefill_chunk, max_seq_len)
        return (*(size for size in sorted(SHORT_PARTS) if size < longest), longest)
