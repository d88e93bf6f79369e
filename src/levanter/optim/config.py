"""`optimizer:` blocks and the gradient transformations that they configure.

Every optimizer is a chain: clip the gradient's global norm, scale it (the optimizer proper), add weight decay, multiply
by −learning rate. The transformations are optax's where optax has them. States have the parameters' named axes, so the
parameter mapping shards them like the parameters.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import draccus
import jax
import optax

from haliax_ext.mapping import Mappings
from haliax_ext.pytree import PyTree
from levanter.config.validators import (
    Count,
    Decay,
    Epsilon,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Ranged,
)
from levanter.optim.adafactor import scale_by_adafactor, scale_by_parameter_rms
from levanter.optim.groups import GroupConfig, by_group, group_problems, keyed_groups
from levanter.optim.hessian import Hutchinson
from levanter.optim.parameters import decay_mask
from levanter.optim.schedules import Cycle, LrSchedule, Schedule, build_schedule, cycle_ends, divide, schedule_from_name
from levanter.optim.skip_steps import SkipStepConfig, carry_recent
from levanter.optim.transforms import clip_by_global_norm, scale_by_learning_rate
from levanter.optim.update_clipping import ClipUpdateNormConfig, clip_by_recent_norms, clip_rms


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Ranged, draccus.ChoiceRegistry):
    """The fields that all optimizers have.

    Attributes:
        learning_rate: the peak learning rate.
        weight_decay: the fraction of a parameter that is subtracted at each step, times the learning rate.
        min_lr_ratio: the final learning rate, as a fraction of the peak.
        warmup: length of the warmup of the first cycle: a fraction of the cycle (at most 1) or a number of steps.
        decay: length of the decay of each cycle, in the same units; null for the whole cycle after the warmup; a
            shorter decay is preceded by a stable phase.
        rewarmup: length of the warmup of the cycles after the first.
        cycle_length: length of a cycle (a fraction of the run or steps), or a list with the length of each.
        cycles: how many cycles of equal length, or the steps at which they end.
        lr_schedule: the shape of the decay: a name, or `{type: …}` with its settings.
        haps: an old spelling of a list of `cycles`.
        cooldown: not supported; use `decay`.
        weight_decay_modules: a regular expression, or a list of texts, that a parameter's path (`…lm_head.weight`) or
            class path (`Linear.weight`) matches.
        default_weight_decay_mask: whether everything but biases, norms and embeddings decays; null: only where
            `weight_decay_modules` is not set.
        max_grad_norm: the gradient's global norm is clipped at this; null for no limit.
        groups: settings of some parameters, by role or path pattern; null for the same settings for all.
    """

    learning_rate: LearningRate = 6e-4
    weight_decay: NonNegativeFloat = 0.1
    min_lr_ratio: Fraction = 0.1
    warmup: Count | NonNegativeFloat = 0.01
    decay: Count | NonNegativeFloat | None = None
    rewarmup: Count | NonNegativeFloat = 0.0
    cycle_length: PositiveInt | PositiveFloat | list[PositiveInt] | None = None
    cycles: PositiveInt | list[PositiveInt] | None = None
    lr_schedule: LrSchedule | str = "cosine"
    haps: list[PositiveInt] | None = None
    cooldown: NonNegativeFloat | None = None
    weight_decay_modules: list[str] | str | None = None
    default_weight_decay_mask: bool | None = None
    max_grad_norm: PositiveFloat | None = 1.0
    groups: dict[str, GroupConfig] | None = None

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The choice if the block has no `type`: Adam."""
        return "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))

    def _problems(self) -> Iterable[str]:
        if self.cooldown is not None:
            yield f"cooldown: not supported; decay: {self.cooldown} ends the run with a decay of that length"
        if self.haps is not None and (self.cycles is not None or self.cycle_length is not None):
            yield "haps, cycles, cycle_length: these are alternatives; give only one of them"
        # Built once for validation, so that bad names and regular expressions are reported with all other problems.
        for build in (lambda: schedule_from_name(self.lr_schedule), self._decay_mask):
            try:
                build()
            except ValueError as error:
                yield str(error).removeprefix("optimizer.")
        if self.groups is not None:
            yield from group_problems(self.groups, self.for_group, [field.name for field in fields(self)])
            if self.curvature is not None:
                yield "groups: not supported with an estimated curvature, whose mean is that of all parameters"
        yield from self._unsupported()

    def _unsupported(self) -> Iterable[str]:
        return ()

    def _decay_mask(self) -> Callable[[PyTree], PyTree] | None:
        return decay_mask(self.weight_decay_modules, self.default_weight_decay_mask)

    def for_group(self, settings: GroupConfig) -> "OptimizerConfig":
        """This optimizer with the settings of a group; it does not clip, since `build` clips before the groups.

        Raises:
            ValueError: the settings do not fit together.

        >>> adam = AdamConfig(learning_rate=0.5, beta1=0.8).for_group(GroupConfig(learning_rate_multiple=0.5))
        >>> adam.learning_rate, adam.beta1
        (0.25, 0.8)
        """
        return replace(self, groups=None, max_grad_norm=None, **self.group_fields(settings))

    def group_fields(self, settings: GroupConfig) -> dict[str, Any]:
        """The fields that the settings of a group replace."""
        changes = dict(settings.written)
        multiple = changes.pop("learning_rate_multiple", None)
        if multiple is not None:
            changes["learning_rate"] = self.learning_rate * multiple
        # Whoever writes a decay for embeddings means it, though the default mask exempts them.
        if "weight_decay" in changes:
            changes |= {"weight_decay_modules": None, "default_weight_decay_mask": False}
        return changes

    @abstractmethod
    def scaling(self) -> optax.GradientTransformation:
        """The optimizer proper: the transformation between clipping and weight decay."""

    def schedule(self, num_train_steps: int) -> Schedule:
        """The learning rate at each step of a run.

        Raises:
            ValueError: cycles do not fit in the run, or a length is neither a fraction nor a whole number of steps.

        >>> optimizer = AdamConfig(learning_rate=0.5, warmup=4, lr_schedule="constant")
        >>> schedule = optimizer.schedule(100)
        >>> tuple(float(schedule(jax.numpy.int32(step))) for step in (0, 2, 50))
        (0.0, 0.25, 0.5)
        """
        return build_schedule(
            peak=self.learning_rate,
            min_ratio=self.min_lr_ratio,
            shape=schedule_from_name(self.lr_schedule),
            cycles=self._cycles(num_train_steps),
        )

    def adjusted(self, num_train_steps: int) -> tuple[str, ...]:
        """Messages about warmups and decays that do not fit in a run, and their actual lengths.

        >>> AdamConfig(warmup=10, decay=100).adjusted(100)
        ('decay 100 is shortened to 90 steps: the run has 100 steps, of which warmup takes 10',)
        """
        lines = [line for cycle in self._cycles(num_train_steps) for line in cycle.adjusted]
        for key, settings in (self.groups or {}).items():
            group = self.for_group(settings).adjusted(num_train_steps)
            # A group that shares the optimizer's phases has nothing of its own to say.
            lines += [f"groups[{key!r}]: {line}" for line in group if line not in lines]
        return tuple(lines)

    def _cycles(self, num_train_steps: int) -> tuple[Cycle, ...]:
        # `haps` is upstream's older name of a list of ends; giving both is refused above.
        cycles = self.haps if self.cycles is None else self.cycles
        return divide(
            total=num_train_steps,
            warmup=self.warmup,
            decay=self.decay,
            rewarmup=self.rewarmup,
            ends=cycle_ends(num_train_steps, cycle_length=self.cycle_length, cycles=cycles),
        )

    def build(
        self, num_train_steps: int, *, platform: str | None = None, mappings: Mappings | None = None
    ) -> optax.GradientTransformation:
        """The whole transformation, from gradients to updates of the parameters.

        Args:
            num_train_steps: of the run.
            platform: `cpu`, `gpu` or `tpu`; None if unknown. See `clipping`.
            mappings: of the run; `mappings.params` places parameters and statistics. For optimizers that place their
                work on the mesh; passed to a `stages` that has this parameter.

        >>> optimizer = SgdConfig(
        ...     learning_rate=0.5, warmup=0, lr_schedule="constant", weight_decay=0.0, max_grad_norm=None
        ... )
        >>> transformation = optimizer.build(10)
        >>> gradient = weight = jax.numpy.array([3.0, 4.0])
        >>> updates, _ = transformation.update(gradient, transformation.init(weight), weight)
        >>> updates.tolist()
        [-1.5, -2.0]
        """
        if self.groups is None:
            chain = self._scheduled(num_train_steps, platform, mappings)
        else:
            chains = {
                key: self.for_group(settings)._scheduled(num_train_steps, platform, mappings)
                for key, settings in self.groups.items()
            }
            rest = self.for_group(GroupConfig())._scheduled(num_train_steps, platform, mappings)
            # The norm is that of the gradients of all groups, so clipping comes before them.
            chain = [self.clipping_before_groups(platform), *by_group(keyed_groups(chains, rest))]
        if self.outliers is not None:
            # Last in the chain: the train step finds it there, and the paths of the other states stay the same.
            chain.append(carry_recent(self.outliers.rolling_interval_length))
        return _with_optax_promotion(optax.chain(*chain))

    def _scheduled(
        self, num_train_steps: int, platform: str | None, mappings: Mappings | None
    ) -> list[optax.GradientTransformation]:
        """The stages and the learning rate."""
        schedule = self.schedule(num_train_steps)
        # Subclasses outside this project may define `stages` and `build` without `platform`.
        passed = _accepted(self.stages, platform=platform, mappings=mappings, num_train_steps=num_train_steps)
        stages = self.stages(schedule, **passed)
        scaled = scale_by_learning_rate if platform == "cpu" else optax.scale_by_learning_rate
        return [*stages, scaled(schedule)]  # pyright: ignore[reportArgumentType]

    def build_for(
        self, num_train_steps: int, platform: str, mappings: Mappings | None = None
    ) -> optax.GradientTransformation:
        """`build` for a platform; a user's class whose `build` lacks a parameter is called without it."""
        return self.build(num_train_steps, **_accepted(self.build, platform=platform, mappings=mappings))

    def stages(self, schedule: Schedule, *, platform: str | None = None) -> list[optax.GradientTransformation]:
        """The transformations before the learning rate: clipping, the optimizer proper, weight decay.

        Always three, so that the paths of their states, and so checkpoints, do not depend on which are disabled.

        Args:
            schedule: the learning rate, for transformations that depend on it.
            platform: see `clipping`.
        """
        del schedule
        return [self.clipping(platform), self.scaling(), self.decaying(self.weight_decay)]

    def clipping(self, platform: str | None = None) -> optax.GradientTransformation:
        """Clipping of the global norm.

        Args:
            platform: on CPUs, clipping multiplies, see `optim.transforms`; elsewhere it is optax's, with which the
                figures for TPU pods were compiled.
        """
        if self.max_grad_norm is None:
            return optax.identity()
        return (clip_by_global_norm if platform == "cpu" else optax.clip_by_global_norm)(self.max_grad_norm)

    def clipping_before_groups(self, platform: str | None = None) -> optax.GradientTransformation:
        """The clipping of the gradients of all groups together."""
        return self.clipping(platform)

    def decaying(self, weight_decay: float) -> optax.GradientTransformation:
        """Weight decay of the parameters selected by the mask."""
        # optax multiplies this term by the learning rate afterwards, which decouples decay from the gradient (AdamW).
        return optax.add_decayed_weights(weight_decay, self._decay_mask()) if weight_decay > 0 else optax.identity()

    @property
    def outliers(self) -> SkipStepConfig | None:
        """When a step is skipped as an outlier; None for never."""
        return None

    @property
    def curvature(self) -> Hutchinson | None:
        """When the train step estimates the curvature for this optimizer; None for never."""
        return None


def _accepted(method: Callable[..., object], **arguments: object) -> dict[str, Any]:
    """Those of the keyword arguments that the method has a parameter for."""
    parameters = inspect.signature(method).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _with_optax_promotion(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same under JAX's standard dtype promotion: optax raises floats to integer powers."""

    def update(updates: PyTree, state: optax.OptState, params: PyTree = None) -> tuple[PyTree, optax.OptState]:
        # The process runs with strict promotion, which catches accidental upcasts in our own code.
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)  # pyright: ignore[reportArgumentType]


@OptimizerConfig.register_subclass("adam")
@dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101).

    Attributes:
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        epsilon: added to the root of the second moment.
        nesterov: whether the first moment uses Nesterov's look-ahead.
        skip_bad_steps: whether steps with an outlying loss or gradient norm are skipped; a number is the length of the
            window of the statistics.
        update_rms_clipping: largest root mean square of one parameter's update, before the learning rate; null for no
            limit.
        clip_update_norm: clips the update's norm if it is far above the recent mean; null for no clipping.
        adamc_weight_decay: whether weight decay is multiplied by the learning rate's fraction of the peak once more
            (AdamC; Defazio, arXiv:2506.02285).
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Epsilon = 1e-8
    nesterov: bool = False
    update_rms_clipping: PositiveFloat | None = None
    clip_update_norm: ClipUpdateNormConfig | None = None
    skip_bad_steps: bool | PositiveInt | SkipStepConfig = False
    adamc_weight_decay: bool = False

    def _unsupported(self) -> Iterable[str]:
        if self.update_rms_clipping is not None and self.update_rms_clipping <= 0:
            yield f"update_rms_clipping: must be positive, or null for no limit, got {self.update_rms_clipping}"
        if self.update_rms_clipping is not None and self.clip_update_norm is not None:
            yield "update_rms_clipping and clip_update_norm: both limit the update; keep one"
        if self.clip_update_norm is not None and self.groups is not None:
            yield "clip_update_norm: not supported with groups; the norm is that of the updates of all parameters"
        if self.adamc_weight_decay and self.learning_rate == 0:
            yield (
                "adamc_weight_decay: weight decay is scaled by the learning rate's fraction of its peak, so "
                "learning_rate must be positive"
            )
        if not isinstance(self.skip_bad_steps, bool | SkipStepConfig) and self.skip_bad_steps < 2:
            yield f"skip_bad_steps: at least 2 steps are remembered, got {self.skip_bad_steps}"

    @property
    def outliers(self) -> SkipStepConfig | None:
        value = self.skip_bad_steps
        if isinstance(value, SkipStepConfig):
            return value
        # Before the case of an integer: `True` is an int as well.
        if isinstance(value, bool):
            return SkipStepConfig() if value else None
        return SkipStepConfig(rolling_interval_length=value)

    def scaling(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, nesterov=self.nesterov)

    def stages(self, schedule: Schedule, *, platform: str | None = None) -> list[optax.GradientTransformation]:
        clip, scale, decay = super().stages(schedule, platform=platform)
        if self.adamc_weight_decay and self.weight_decay > 0:
            # weight_decay · schedule / peak; the learning rate that follows multiplies by the schedule once more.
            part = self.weight_decay / self.learning_rate
            decay = optax.add_decayed_weights(lambda step: part * schedule(step), self._decay_mask())  # pyright: ignore
        # Chained into the third stage: the number of stages, and so the paths of their states, stays the same.
        if self.update_rms_clipping is not None:
            decay = optax.chain(decay, clip_rms(self.update_rms_clipping))
        if self.clip_update_norm is not None:
            decay = optax.chain(decay, clip_by_recent_norms(self.clip_update_norm))
        return [clip, scale, decay]


@OptimizerConfig.register_subclass("adafactor")
@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor as Hugging Face and PyTorch have it: factored second moment, no first moment.

    Attributes:
        decay_rate: at step t the averages' decay is `1 − t^−decay_rate`.
        clip_threshold: largest root mean square of a matrix's update; null for no limit.
        epsilon: added to squared gradients.
        scale_parameter: whether a matrix's update is multiplied by the root mean square of its parameter.
        min_parameter_scale: the least factor of that multiplication.
    """

    decay_rate: Decay = 0.8
    clip_threshold: PositiveFloat | None = 1.0
    epsilon: Epsilon = 1e-30
    scale_parameter: bool = False
    min_parameter_scale: NonNegativeFloat = 1e-3

    def scaling(self) -> optax.GradientTransformation:
        # Hugging Face's `scale_parameter` multiplies after the clipping of the update, so it follows in the chain.
        scale = scale_by_adafactor(decay_rate=self.decay_rate, clip_threshold=self.clip_threshold, epsilon=self.epsilon)
        if not self.scale_parameter:
            return scale
        return optax.chain(scale, scale_by_parameter_rms(minimum=self.min_parameter_scale))


@OptimizerConfig.register_subclass("lion")
@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated first moment.

    Attributes:
        beta1: of the interpolation whose sign is taken.
        beta2: of the moment that is kept.
        epsilon: upstream's key, without effect.
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Epsilon = 1e-8

    def scaling(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.beta1, self.beta2)


@OptimizerConfig.register_subclass("rmsprop")
@dataclass(frozen=True, kw_only=True)
class RmsPropConfig(OptimizerConfig):
    """RMSProp with momentum, both averages bias-corrected.

    Attributes:
        beta1: of the momentum.
        beta2: of the mean square.
        eps: added to the root of the mean square.
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Epsilon = 1e-30

    def scaling(self) -> optax.GradientTransformation:
        # The momentum is a mean of scaled gradients, not of raw ones.
        rms = optax.scale_by_rms(decay=self.beta2, eps=self.eps, eps_in_sqrt=False, bias_correction=True)
        return optax.chain(rms, optax.ema(self.beta1, debias=True))


@OptimizerConfig.register_subclass("sgd")
@dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimizerConfig):
    """Gradient descent with momentum.

    Attributes:
        momentum: the part of the last update that is kept; 0 for none, and no state.
        nesterov: whether the gradient is taken one step ahead.
    """

    momentum: Decay = 0.0
    nesterov: bool = False

    def scaling(self) -> optax.GradientTransformation:
        # Without momentum there is no trace, which would be a copy of the gradients in the state.
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
