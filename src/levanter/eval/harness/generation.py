"""Texts that a task wants written: lm_eval's keys of generation as values, and who answers them.

`eval` knows no engine. A command passes a `Generator`, which answers prompts of ids with texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from levanter.config.errors import did_you_mean
from levanter.eval.harness.encoding import HarnessError

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of tokens, the first that is there counts: lm_eval's order."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Keys of sampling that the engine has under the same names."""
_KNOWN = ("until", "do_sample", "seed", "n", *_LENGTHS, *SAMPLING)


@dataclass(frozen=True, kw_only=True, eq=False)
class Continuation:
    """A prompt, and how it goes on.

    Attributes:
        tokens: int32, the prompt.
        until: strings before the first of which the text ends.
        max_tokens: of the text.
        sampling: of the engine's parameters; nothing for the likeliest token each time.
        seed: of the noise; None for one that follows from the place in the list.
    """

    tokens: np.ndarray
    until: tuple[str, ...]
    max_tokens: int
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    seed: int | None = None


class Generator(Protocol):
    """What writes texts."""

    def __call__(self, asked: Sequence[Continuation]) -> list[str]:
        """The text behind each prompt, without what ended it."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationKeys:
    """How a request goes on, by lm_eval's keys.

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
        given: Mapping[str, Any], defaults: Mapping[str, Any], more_stops: Sequence[str], name: str
    ) -> "GenerationKeys":
        """Reads the keys of a request.

        Args:
            given: the request's.
            defaults: the run's, for those that it leaves out.
            more_stops: strings that end a text besides.
            name: what to call it in an error.

        Raises:
            HarnessError: lists keys that are not known, and values that cannot be.
        """
        wrong = [
            f"{key}: not a key of generation here{did_you_mean(key, _KNOWN)}" for key in given if key not in _KNOWN
        ]
        keys = {**{key: value for key, value in defaults.items() if value is not None}}
        if any(given.get(key) is not None for key in _LENGTHS):
            keys = {key: value for key, value in keys.items() if key not in _LENGTHS}
        keys |= {key: value for key, value in given.items() if value is not None}
        until = keys.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        length = next((keys[key] for key in _LENGTHS if key in keys), 256)
        if not isinstance(length, int) or length < 1:
            wrong.append(f"max_gen_toks: expected a number of tokens, got {length!r}")
        if not all(isinstance(stop, str) for stop in stops):
            wrong.append(f"until: expected texts, got {until!r}")
        if keys.get("n", 1) != 1:
            wrong.append(
                "n: one text is scored for a document; leave it out, or repeat documents (repeats: in the task)"
            )
        numbers = {key: keys[key] for key in SAMPLING if key in keys}
        for key, value in numbers.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or (key == "top_k" and value != int(value))
            ):
                wrong.append(f"{key}: expected {'an integer' if key == 'top_k' else 'a number'}, got {value!r}")
        sampling = {key: int(value) if key == "top_k" else value for key, value in numbers.items() if not wrong}
        if keys.get("do_sample") is False or not sampling.get("temperature"):
            # Without a temperature the likeliest token is taken, whatever else is said.
            sampling = {key: value for key, value in sampling.items() if key.endswith("penalty")}
        if wrong:
            raise HarnessError("\n".join(f"{name}: generation_kwargs.{each}" for each in wrong))
        found = tuple(dict.fromkeys(stop for stop in [*stops, *more_stops] if stop))
        return GenerationKeys(until=found, max_tokens=length, sampling=sampling, seed=keys.get("seed"))
