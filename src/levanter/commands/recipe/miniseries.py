"""nanochat's miniseries: every number of a training run from its depth, each with its reason.

Formulas of karpathy/nanochat (92d63d4). With N the parameters of the matrices in blocks and of the head, D the tokens
of the run and B the tokens of a step:

    D = ratio · N
    B = 2^round(log₂(2¹⁹ · (D / D₁₂)^0.383)), where D₁₂ is the D of depth 12 at the same ratio
    learning rates × √(B / 2¹⁹);  those of embeddings, value tables and head also × √(768 / width)
    weight decay of matrices = 0.28 · √(B / 2¹⁹) · D₁₂ / D
    FLOPs of a token = 6 · N + 12 · width · min(window, T), summed over layers
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from levanter.models.nanochat.config import NanochatConfig, parameter_counts

REFERENCE_DEPTH = 12
REFERENCE_BATCH = 1 << 19
"""The best batch of depth 12, in tokens, as measured by nanochat."""
BATCH_EXPONENT = 0.383
"""How the best batch grows with the tokens of a run (Power Lines, https://arxiv.org/abs/2505.13738)."""
REFERENCE_WIDTH = 768
SPEEDRUN_RATIO = 8.0
COMPUTE_OPTIMAL_RATIO = 12.0
MATRIX_LR, HEAD_LR, EMBEDDING_LR, TABLE_LR = 0.02, 0.008, 0.3, 0.15
STREAM_SCALE_LR, X0_SCALE_LR, END_SCALE_LR = 0.005, 0.5, 0.2
WEIGHT_DECAY = 0.28
WARMUP_STEPS, WARMDOWN, FINAL_LR = 40, 0.65, 0.05
MOMENTUM, MOMENTUM_STEPS = (0.85, 0.97, 0.90), 400
"""Muon's momentum at the beginning, after so many steps, and at the end."""
CHARS_PER_TOKEN, SHARD_CHARS = 4.8, 250_000_000
"""Characters of a token of 32,768 ids on web text, and of a shard of nanochat's data; both rounded."""


@dataclass(frozen=True)
class Derived:
    """A number of a recipe: its name, its value as text, and why it is that."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Miniseries:
    """The numbers of one depth.

    Attributes:
        depth: layers.
        ratio: tokens for each parameter of the matrices in blocks and of the head.
        tokens: tokens of the run where they are given instead of the ratio.
        length: tokens of a row.
        vocab_size: ids.
        batch: tokens of a step where they are given.
    """

    depth: int
    ratio: float = SPEEDRUN_RATIO
    tokens: int | None = None
    length: int = 2048
    vocab_size: int = 32_768
    batch: int | None = None

    @cached_property
    def model(self) -> NanochatConfig:
        """The model of this depth."""
        return self._model(self.depth)

    def _model(self, depth: int) -> NanochatConfig:
        return NanochatConfig.for_depth(depth, max_seq_len=self.length, vocab_size=self.vocab_size)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Parameters by kind."""
        return parameter_counts(self.model)

    def _scaling(self, depth: int) -> int:
        counts = parameter_counts(self._model(depth))
        return counts["transformer_matrices"] + counts["lm_head"]

    @property
    def scaling_parameters(self) -> int:
        """The parameters that the horizon counts."""
        return self._scaling(self.depth)

    @cached_property
    def horizon(self) -> int:
        """D: the tokens to train on, before they are rounded to whole steps."""
        return int(self.ratio * self.scaling_parameters) if self.tokens is None else self.tokens

    @property
    def _share(self) -> float:
        # D / D₁₂: at the same ratio the tokens are as the parameters.
        return self.scaling_parameters / self._scaling(REFERENCE_DEPTH)

    @cached_property
    def step_tokens(self) -> int:
        """B: the tokens of a step."""
        if self.batch is not None:
            return self.batch
        return 2 ** round(math.log2(REFERENCE_BATCH * self._share**BATCH_EXPONENT))

    @property
    def steps(self) -> int:
        """Whole steps."""
        return self.horizon // self.step_tokens

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.step_tokens // self.length

    @property
    def lr_scale(self) -> float:
        """The factor of all learning rates."""
        return math.sqrt(self.step_tokens / REFERENCE_BATCH)

    @property
    def width_scale(self) -> float:
        """The further factor of embeddings, value tables and head."""
        return math.sqrt(REFERENCE_WIDTH / self.model.hidden_dim)

    @property
    def weight_decay(self) -> float:
        """The weight decay of matrices at the beginning."""
        return WEIGHT_DECAY * self.lr_scale / self._share

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs of training on one token, by nanochat's formula."""
        model = self.model
        # A window of W earlier tokens is W + 1 keys; nanochat counts W, and T for layers that see everything.
        spans = (self.length if w is None else w - 1 for w in map(model.window, range(model.num_layers)))
        return 6 * self.scaling_parameters + sum(12 * model.hidden_dim * min(span, self.length) for span in spans)

    @property
    def total_flops(self) -> float:
        """FLOPs of the run."""
        return float(self.flops_per_token) * self.step_tokens * self.steps

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """The peak learning rate of each kind of parameter."""
        wide = self.lr_scale * self.width_scale
        return {
            "matrices": MATRIX_LR * self.lr_scale,
            "head": HEAD_LR * wide,
            "embedding": EMBEDDING_LR * wide,
            "value tables": TABLE_LR * wide,
            # The scalars' own factors of 0.01 and 1: r moves slowly, because all layers multiply by it.
            "r": STREAM_SCALE_LR * self.lr_scale,
            "s": X0_SCALE_LR * self.lr_scale,
            "smear, backout": END_SCALE_LR,
        }

    @property
    def shards(self) -> int:
        """Shards of nanochat's data that the run reads at most."""
        # A third of the tokens is dropped where rows are cropped; the rest of the margin is for documents.
        return math.ceil(self.horizon * CHARS_PER_TOKEN * 1.5 / SHARD_CHARS)

    def derived(self) -> list[Derived]:
        """Every number with its reason."""
        model, counts = self.model, self.counts
        width, exact = model.hidden_dim, 64 * self.depth
        horizon_reason = (
            f"{self.ratio:g} tokens for each of {self.scaling_parameters:,} parameters (matrices in blocks + head)"
            if self.tokens is None
            else f"given; {self.horizon / self.scaling_parameters:.2f} for each of {self.scaling_parameters:,}"
        )
        exponent = math.log2(REFERENCE_BATCH * self._share**BATCH_EXPONENT)
        batch_reason = (
            f"2^round({exponent:.2f}): 2^19 at depth 12, × ({self._share:.2f} × its tokens)^{BATCH_EXPONENT}"
            if self.batch is None
            else "given"
        )
        rounded = "" if exact == width else f", rounded up from {exact:,} to whole heads"
        scale = f"× √(batch / 2^19) = {self.lr_scale:.4f}"
        wide = f"{scale} × √(768 / {width:,}) = {self.width_scale:.4f}"
        rates = self.learning_rates
        reasons = {
            "matrices": (MATRIX_LR, f"{scale}; Muon"),
            "head": (HEAD_LR, wide),
            "embedding": (EMBEDDING_LR, wide),
            "value tables": (TABLE_LR, f"half of the embedding's, {wide}"),
            "r": (STREAM_SCALE_LR, scale),
            "s": (X0_SCALE_LR, f"{scale}; beta1 0.96"),
            "smear, backout": (END_SCALE_LR, "at every batch"),
        }
        window = model.short_window - 1
        return [
            Derived("width", f"{width:,}", f"64 × depth {self.depth}{rounded}; {model.num_heads} heads of 128"),
            Derived(
                "windows",
                f"{window:,} and {self.length:,}",
                "SSSL, the last layer L; S is a quarter of the row in tiles of 128",
            ),
            Derived(
                "parameters",
                f"{counts['total']:,}",
                f"matrices {counts['transformer_matrices']:,}, value tables {counts['value_embeds']:,}, embedding and "
                f"head {counts['wte']:,} each, scalars {counts['scalars']:,}",
            ),
            Derived("FLOPs of a token", f"{self.flops_per_token:.4e}", "6 × (matrices + head) + windowed attention"),
            Derived("tokens", f"{self.horizon:,}", horizon_reason),
            Derived("batch", f"{self.step_tokens:,}", f"{batch_reason}; {self.rows:,} rows of {self.length:,}"),
            Derived("steps", f"{self.steps:,}", f"whole steps: {self.steps * self.step_tokens:,} tokens"),
            Derived("FLOPs", f"{self.total_flops:.4e}", "of the base model"),
            *(
                Derived(f"learning rate, {name}", f"{rates[name]:.6g}", f"{base:g} {why}")
                for name, (base, why) in reasons.items()
            ),
            Derived(
                "weight decay",
                f"{self.weight_decay:.6g}",
                f"{WEIGHT_DECAY:g} × √(batch / 2^19) / {self._share:.4f}, of matrices; falls to 0 by a cosine",
            ),
            Derived(
                "momentum",
                f"{MOMENTUM[0]:g} to {MOMENTUM[1]:g}",
                f"in {MOMENTUM_STEPS} steps, of Muon; falls to {MOMENTUM[2]:g} while the learning rate falls",
            ),
            Derived(
                "schedule",
                f"{WARMUP_STEPS} steps",
                f"warmup; the last {WARMDOWN:.0%} falls linearly to {FINAL_LR:.0%}; no clipping",
            ),
            Derived(
                "data",
                f"{self.shards:,} shards",
                f"of {SHARD_CHARS / 1e6:.0f}M characters, {CHARS_PER_TOKEN:g} a token (both rounded); a third of the "
                "tokens is dropped by cropping",
            ),
        ]


def depth_problems(depth: int, length: int) -> list[str]:
    """What is wrong with a depth or a row length."""
    problems = []
    if not 2 <= depth <= 128:
        problems.append(f"depth: {depth}; expected 2 to 128 layers (published: 12, 20, 24, 26, 32)")
    if length % 128 or length < 256:
        nearest = max(256, round(length / 128) * 128)
        problems.append(
            f"length: {length} is no multiple of 128 from 256 on, in which windows are rounded; nearest {nearest}"
        )
    return problems
