"""`InferenceEngineConfig`: upstream's `engine:` block, and its translation to `InferenceConfig`."""

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
"""The smallest number of planned rows; most meshes divide it."""
MOST_STEPS = 8
"""Largest number of decode steps in a call, whatever `max_rounds` is."""
WITHOUT_EFFECT = {
    "hbm_utilization": "the size of the cache is planned, not taken from free memory",
    "max_stop_seqs": "there may be any number of stop strings",
    "max_stop_tokens": "a stop string may have any number of tokens",
    "seed": "the noise comes from the request's seed",
    "max_queued_tokens": "prompts are admitted when slots are free",
    "max_seqs_in_prefill": "the calls for prompts have the sizes that the plan lists",
    "max_tokens_per_round": "the calls for prompts have the sizes that the plan lists",
}
"""Keys without effect, and why."""


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
        """The equivalent `InferenceConfig`.

        Args:
            needed: number of rows that can be used at once.
            written: the keys of the document.
        """
        rows = LEAST_ROWS
        # Powers of two from 8 on: batch axes of most meshes divide them.
        while rows < needed:
            rows *= 2
        # Upstream's default, bfloat16, would lower the precision of a float32 model, so only a written key counts.
        dtype = DTYPES.get(self.compute_dtype, self.compute_dtype) if "engine.compute_dtype" in written else None
        defaults = InferenceConfig()
        return InferenceConfig(
            max_rows=min(rows, self.max_seqs),
            max_seq_len=self.max_seq_len or 1024,
            prefill_chunk=self.max_prefill_size or defaults.prefill_chunk,
            # Longer calls delay the start of waiting requests.
            steps=min(self.max_rounds, MOST_STEPS) if "engine.max_rounds" in written else defaults.steps,
            cache_dtype=dtype,
            # Without `max_pages` a row has one contiguous page: page tables would only cost.
            allocation="fixed" if self.max_pages is None else "paged",
            page_size=self.page_size,
            pages=self.max_pages,
            # Upstream's engine has no penalties, whose token counts take memory for each row.
            penalties=False,
        )

    def notes(self, written: ExplicitKeys, *, served: "DecodeCost | None" = None) -> tuple[str, ...]:
        """Notes on keys that were written and have no effect, or less than their full effect.

        Args:
            written: the keys of the document.
            served: cost of the planned cache; None before it is planned.
        """
        notes = [
            f"engine.{key}: without effect; {why}" for key, why in WITHOUT_EFFECT.items() if f"engine.{key}" in written
        ]
        # The note names the planned size, which this key would have limited in upstream.
        if "engine.hbm_utilization" in written and served is not None:
            from haliax_ext.errors import gib

            cache = f"{served.rows} rows of {served.context:,} positions, {gib(served.cache_bytes)} a device"
            notes = [f"{note}: {cache}" if "hbm_utilization" in note else note for note in notes]
        if "engine.max_rounds" in written and self.max_rounds > MOST_STEPS:
            notes.append(f"engine.max_rounds: {MOST_STEPS} instead of {self.max_rounds} tokens a call")
        if "engine.page_size" in written and self.max_pages is None:
            notes.append("engine.page_size: without effect; each row has its own contiguous cache (max_pages pages it)")
        return tuple(notes)
