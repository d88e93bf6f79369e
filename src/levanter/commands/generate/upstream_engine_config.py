"""`InferenceEngineConfig`: upstream's `engine:` block, and what becomes of each of its keys here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from levanter.config import ExplicitKeys
from levanter.config.validators import Count, Fraction, PositiveInt, Ranged
from levanter.inference.config import InferenceConfig

if TYPE_CHECKING:
    from levanter.inference.capacity import DecodeCost

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
"""Short names of `compute_dtype`."""
LEAST_ROWS = 8
"""Rows that are planned where fewer are needed: as many as most meshes divide."""
MOST_STEPS = 8
"""Tokens that a row gets in a call at most, whatever `max_rounds` says."""
WITHOUT_EFFECT = {
    "hbm_utilization": "the cache has the size that the plan says, whatever is free",
    "max_stop_seqs": "there may be any number of stop strings",
    "max_stop_tokens": "a stop string may have any number of tokens",
    "seed": "the noise comes from the request's seed",
    "max_queued_tokens": "prompts are taken as there is room for them",
    "max_seqs_in_prefill": "the calls for prompts have the sizes that the plan lists",
    "max_tokens_per_round": "the calls for prompts have the sizes that the plan lists",
}
"""Keys that nothing here depends on, and why."""


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig(Ranged):
    """Paged decoding of many requests at once, by upstream's keys.

    Attributes:
        max_seq_len: positions of a slot, prompt and generated text together; null for 1,024.
        max_seqs: decode slots; fewer are planned if fewer are needed.
        max_rounds: decode steps per call; at most 8.
        page_size: positions per page of a paged cache.
        max_pages: pages of the cache over all devices; null for one contiguous page per slot.
        max_prefill_size: prompt tokens per prefill call.
        compute_dtype: of keys and values; null for the compute dtype.
        hbm_utilization, max_stop_seqs, max_stop_tokens, seed, max_queued_tokens, max_seqs_in_prefill,
            max_tokens_per_round: without effect, and the plan says why.
    """

    range_prefix: ClassVar[str] = "engine."

    max_seq_len: PositiveInt | None = None
    hbm_utilization: Fraction = 0.9
    page_size: PositiveInt = 128
    max_rounds: PositiveInt = 32
    max_stop_seqs: Count = 4
    max_stop_tokens: Count = 16
    seed: Count = 0
    max_seqs: PositiveInt = 256
    max_pages: PositiveInt | None = None
    compute_dtype: str = "bfloat16"
    max_queued_tokens: PositiveInt = 512
    max_seqs_in_prefill: PositiveInt = 16
    max_prefill_size: PositiveInt | None = None
    max_tokens_per_round: PositiveInt | None = None

    def inference(self, *, needed: int, written: ExplicitKeys) -> InferenceConfig:
        """The rows and the cache that the keys stand for.

        Args:
            needed: rows that there is work for.
            written: the keys of the document.
        """
        rows = LEAST_ROWS
        while rows < needed:
            rows *= 2
        dtype = DTYPES.get(self.compute_dtype, self.compute_dtype) if "engine.compute_dtype" in written else None
        defaults = InferenceConfig()
        return InferenceConfig(
            max_rows=min(rows, self.max_seqs),
            max_seq_len=self.max_seq_len or 1024,
            prefill_chunk=self.max_prefill_size or defaults.prefill_chunk,
            steps=min(self.max_rounds, MOST_STEPS) if "engine.max_rounds" in written else defaults.steps,
            cache_dtype=dtype,
            allocation="fixed" if self.max_pages is None else "paged",
            page_size=self.page_size,
            pages=self.max_pages,
            penalties=False,
        )

    def notes(self, written: ExplicitKeys, *, served: "DecodeCost | None" = None) -> tuple[str, ...]:
        """What is said of keys that were written and change nothing, or not all that they ask for.

        Args:
            written: the keys of the document.
            served: what the plan came to; None before there is one.
        """
        said = [
            f"engine.{key}: without effect; {why}" for key, why in WITHOUT_EFFECT.items() if f"engine.{key}" in written
        ]
        if "engine.hbm_utilization" in written and served is not None:
            from haliax_ext.errors import gib

            cache = f"{served.rows} rows of {served.context:,} positions, {gib(served.cache_bytes)} a device"
            said = [f"{each}: {cache}" if "hbm_utilization" in each else each for each in said]
        if "engine.max_rounds" in written and self.max_rounds > MOST_STEPS:
            said.append(f"engine.max_rounds: {MOST_STEPS} instead of {self.max_rounds} tokens a call")
        if "engine.page_size" in written and self.max_pages is None:
            said.append("engine.page_size: without effect; each row owns its positions (max_pages makes pages of them)")
        return tuple(said)
