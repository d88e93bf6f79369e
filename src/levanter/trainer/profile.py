"""Profiles some steps with JAX's profiler, into the folder of the run's logs.

A profile starts and ends between two steps, when the devices are idle, so that it contains whole steps only. The result
is a folder for `xprof` and TensorBoard. A Perfetto trace is created only on request: creating it takes longer than the
steps that it shows.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from levanter.trainer.config_blocks import ProfileOptionsConfig, ProfilerConfig
from levanter.trainer.train_state import TrainState

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Profile:
    """Profiles steps `start` to `stop`: a pause of the loop, and a context that ends a running profile.

    Attributes:
        config: the steps, and options of the profiler.
        folder: where the profile is written.
        done: called with the folder once it is written.
    """

    config: ProfilerConfig
    folder: Path
    done: Callable[[Path], object] = lambda _: None
    _running: bool = field(default=False, init=False)

    @property
    def start(self) -> int:
        """The first profiled step."""
        return self.config.start_step

    @property
    def stop(self) -> int:
        """The step after the last profiled one."""
        return self.config.start_step + self.config.num_steps

    def begin(self, first: int) -> None:
        """Starts the profile if it includes the loop's first step, which no pause precedes."""
        if self.start <= first < self.stop:
            self._start(first)

    def due(self, taken: int) -> bool:
        """Whether the profile starts or ends after `taken` steps."""
        # `>=`: a resumed or shortened run may not pass the exact step.
        return taken == self.start or (self._running and taken >= self.stop)

    def __call__(self, taken: int, state: TrainState) -> None:
        """Starts or ends the profile."""
        # Dispatch is asynchronous: without waiting, the profile would contain earlier steps and miss its last ones.
        jax.block_until_ready(state)
        if self._running:
            self._end()
        else:
            self._start(taken)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._end()

    @property
    def _records(self) -> bool:
        return self.config.process_index in (None, jax.process_index())

    def _start(self, step: int) -> None:
        # Every process counts the steps alike, whether it records them or not, so that all of them pause together.
        self._running = True
        if not self._records:
            return
        logger.info("profiling steps %d to %d", step, self.stop - 1)
        jax.profiler.start_trace(
            str(self.folder),
            create_perfetto_link=self.config.perfetto_link,
            create_perfetto_trace=self.config.create_perfetto_trace,
            profiler_options=options(self.config.profile_options),
        )

    def _end(self) -> None:
        # First, so that a failure to write is not followed by a second attempt in `__exit__`.
        self._running = False
        if not self._records:
            return
        jax.profiler.stop_trace()
        logger.info("profile: %s", self.folder)
        self.done(self.folder)


def options(config: ProfileOptionsConfig) -> jax.profiler.ProfileOptions:
    """The options as JAX takes them; options that the config does not set keep JAX's defaults."""
    profile_options = jax.profiler.ProfileOptions()
    for name in ("host_tracer_level", "python_tracer_level", "device_tracer_level", "include_dataset_ops"):
        value = getattr(config, name)
        if value is not None:
            setattr(profile_options, name, value)
    profile_options.enable_hlo_proto = config.enable_hlo_proto
    if config.advanced_configuration:
        profile_options.advanced_configuration = dict(config.advanced_configuration)
    return profile_options
