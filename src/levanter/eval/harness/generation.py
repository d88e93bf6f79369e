"""Requests for generated text: lm_eval's generation keys as values, and the interface of the engine that answers them.

`eval` does not import an engine. A command passes a `Generator`, which returns texts for prompts of token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from levanter.config.errors import did_you_mean
from levanter.eval.harness.encoding import HarnessError

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Keys for the number of tokens; the first one that is set counts, which is lm_eval's order."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling keys that the engine has under the same names."""
_KNOWN = ("until", "do_sample", "seed", "n", *_LENGTHS, *SAMPLING)


@dataclass(frozen=True, kw_only=True, eq=False)
class Continuation:
    """A prompt and how its continuation is generated.

    Attributes:
        tokens: int32, the prompt.
        until: stop strings; the text ends before the first of them.
        max_tokens: maximum number of generated tokens.
        sampling: the engine's sampling parameters; empty for greedy decoding.
        seed: seed of the sampling noise; None for one derived from the index in the list.
    """

    tokens: np.ndarray
    until: tuple[str, ...]
    max_tokens: int
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    seed: int | None = None


class Generator(Protocol):
    """Generates texts."""

    def __call__(self, prompts: Sequence[Continuation]) -> list[str]:
        """The generated text for each prompt, without the stop string."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationKeys:
    """The validated generation keys of a request.

    Attributes:
        until: see `Continuation`.
        max_tokens: see `Continuation`.
        sampling: see `Continuation`.
        seed: see `Continuation`.
    """

    until: tuple[str, ...]
    max_tokens: int
    sampling: Mapping[str, float]
    seed: int | None

    @staticmethod
    def of(
        request: Mapping[str, Any], defaults: Mapping[str, Any], more_stops: Sequence[str], name: str
    ) -> "GenerationKeys":
        """Validates the keys of a request.

        Args:
            request: the request's keys.
            defaults: the run's keys, for those that the request does not set.
            more_stops: further stop strings.
            name: name of the request in errors.

        Raises:
            HarnessError: lists unknown keys and invalid values.
        """
        errors = [
            f"{key}: not a key of generation here{did_you_mean(key, _KNOWN)}" for key in request if key not in _KNOWN
        ]
        keys = {**{key: value for key, value in defaults.items() if value is not None}}
        # A length of the task replaces that of the run, whatever the two are called.
        if any(request.get(key) is not None for key in _LENGTHS):
            keys = {key: value for key, value in keys.items() if key not in _LENGTHS}
        keys |= {key: value for key, value in request.items() if value is not None}
        until = keys.get("until") or []
        # lm_eval accepts a single string.
        stops = [until] if isinstance(until, str) else list(until)
        length = next((keys[key] for key in _LENGTHS if key in keys), 256)
        if not isinstance(length, int) or length < 1:
            errors.append(f"max_gen_toks: expected a number of tokens, got {length!r}")
        if not all(isinstance(stop, str) for stop in stops):
            errors.append(f"until: expected texts, got {until!r}")
        if keys.get("n", 1) != 1:
            errors.append(
                "n: one text per document is evaluated; remove the key, or repeat documents (repeats: in the task)"
            )
        numbers = {key: keys[key] for key in SAMPLING if key in keys}
        for key, value in numbers.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or (key == "top_k" and value != int(value))
            ):
                errors.append(f"{key}: expected {'an integer' if key == 'top_k' else 'a number'}, got {value!r}")
        # After an error the values may not be numbers; all errors are raised together below.
        sampling = {key: int(value) if key == "top_k" else value for key, value in numbers.items() if not errors}
        if keys.get("do_sample") is False or not sampling.get("temperature"):
            # Decoding is greedy at temperature 0, where the other sampling keys have no effect; penalties still have
            # one.
            sampling = {key: value for key, value in sampling.items() if key.endswith("penalty")}
        if errors:
            raise HarnessError("\n".join(f"{name}: generation_kwargs.{error}" for error in errors))
        # An empty stop string would end every text at its beginning.
        all_stops = tuple(dict.fromkeys(stop for stop in [*stops, *more_stops] if stop))
        return GenerationKeys(until=all_stops, max_tokens=length, sampling=sampling, seed=keys.get("seed"))
