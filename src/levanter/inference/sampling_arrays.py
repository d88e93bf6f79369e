"""`RowParams`: the sampling parameters of all rows as arrays, so that no request ever compiles anything.

They are made on the host (`host_params`) and passed with every call: a few hundred numbers a row. What a request does
not use has the value that changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from levanter.inference.params import MOST_BIASES, MOST_STOP_IDS, SamplingParams

Word = Axis("seed_word", 2)
"""The halves of a 64-bit seed, high first; also those of a key of JAX's threefry."""
Stop = Axis("stop_id", MOST_STOP_IDS)
Bias = Axis("biased_id", MOST_BIASES)
NO_ID = -1
"""Fills up lists of ids."""


class RowParams(eqx.Module):
    """What sampling reads of each row; see `SamplingParams` for what the first seven mean.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 `[batch]`.
        top_k: int32 `[batch]`; 0 or less for all.
        seed: uint32 `[batch, seed_word]`.
        choice: int32 `[batch]`, which of a request's choices the row is.
        first_end: int32 `[batch]`, the first position whose token may end the row.
        stop_ids: int32 `[batch, stop_id]`, the ids that end it, then -1.
        biased_ids: int32 `[batch, biased_id]`, the ids whose logits are changed, then -1.
        biases: float32 `[batch, biased_id]`.
        top_logprobs: int32 `[batch]`, how many likeliest tokens are wanted; -1 for no log-probabilities.
    """

    temperature: NamedArray
    top_k: NamedArray
    top_p: NamedArray
    min_p: NamedArray
    presence: NamedArray
    frequency: NamedArray
    repetition: NamedArray
    seed: NamedArray
    choice: NamedArray
    first_end: NamedArray
    stop_ids: NamedArray
    biased_ids: NamedArray
    biases: NamedArray
    top_logprobs: NamedArray

    @staticmethod
    def of_arrays(arrays: Mapping[str, np.ndarray | jax.Array], Batch: Axis) -> "RowParams":
        """What `host_params` returned, with its axes."""
        return RowParams(**{name: hax.named(arrays[name], (Batch, *extra)) for name, (_, _, extra) in _FIELDS.items()})

    @staticmethod
    def abstract(Batch: Axis) -> "RowParams":
        """The parameters of `Batch` rows without memory, for a Program's input."""
        shapes = {
            name: NamedArray(jax.ShapeDtypeStruct((Batch.size, *(a.size for a in extra)), dtype), (Batch, *extra))  # pyright: ignore[reportArgumentType]
            for name, (dtype, _, extra) in _FIELDS.items()
        }
        return RowParams(**shapes)


_FIELDS: Mapping[str, tuple[type, float, tuple[Axis, ...]]] = {
    "temperature": (np.float32, 0.0, ()),
    "top_k": (np.int32, 0, ()),
    "top_p": (np.float32, 1.0, ()),
    "min_p": (np.float32, 0.0, ()),
    "presence": (np.float32, 0.0, ()),
    "frequency": (np.float32, 0.0, ()),
    "repetition": (np.float32, 1.0, ()),
    "seed": (np.uint32, 0, (Word,)),
    "choice": (np.int32, 0, ()),
    "first_end": (np.int32, 0, ()),
    "stop_ids": (np.int32, NO_ID, (Stop,)),
    "biased_ids": (np.int32, NO_ID, (Bias,)),
    "biases": (np.float32, 0.0, (Bias,)),
    "top_logprobs": (np.int32, -1, ()),
}
"""Of each array: its type, the value of a row that nobody uses, and its axes beside `batch`."""


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """How one row is sampled.

    Attributes:
        params: of its request.
        seed: the request's, or the fresh one it was given.
        choice: which of the request's choices it is.
        prompt_tokens: how many tokens the request's prompt has.
        stop_ids: the ids that end it: the model's own (unless they are ignored) and the request's.
    """

    params: SamplingParams
    seed: int
    choice: int
    prompt_tokens: int
    stop_ids: tuple[int, ...]


def host_params(
    rows: Sequence[RowSampling | None],
    *,
    before: tuple[Sequence[RowSampling | None], Mapping[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of `RowParams` by name, for rows in the order of `batch`; None where nobody is.

    Args:
        rows: how each is sampled.
        before: as many others and what this gave for them: only those that are others now are gone through again. The
            arrays are new ones all the same, since a call may still be reading those.
    """
    if before is None:
        known: Sequence[RowSampling | None] = [None] * len(rows)
        arrays = {
            name: np.full((len(rows), *(axis.size for axis in extra)), value, dtype)
            for name, (dtype, value, extra) in _FIELDS.items()
        }
    else:
        known, arrays = before[0], {name: array.copy() for name, array in before[1].items()}
    for n, (row, old) in enumerate(zip(rows, known, strict=True)):
        if row is old:
            continue
        if old is not None:
            for name, (_, value, _) in _FIELDS.items():
                arrays[name][n] = value
        if row is not None:
            _fill(arrays, n, row)
    return arrays


def _fill(arrays: Mapping[str, np.ndarray], n: int, row: RowSampling) -> None:
    params = row.params
    arrays["temperature"][n] = params.temperature
    arrays["top_k"][n] = params.top_k
    arrays["top_p"][n] = params.top_p
    arrays["min_p"][n] = params.min_p
    arrays["presence"][n] = params.presence_penalty
    arrays["frequency"][n] = params.frequency_penalty
    arrays["repetition"][n] = params.repetition_penalty
    arrays["seed"][n] = row.seed >> 32, row.seed & 0xFFFFFFFF
    arrays["choice"][n] = row.choice
    arrays["first_end"][n] = row.prompt_tokens + params.min_tokens
    arrays["stop_ids"][n, : len(row.stop_ids)] = row.stop_ids
    arrays["biased_ids"][n, : len(params.logit_bias)] = list(params.logit_bias)
    arrays["biases"][n, : len(params.logit_bias)] = list(params.logit_bias.values())
    arrays["top_logprobs"][n] = -1 if params.logprobs is None else params.logprobs
