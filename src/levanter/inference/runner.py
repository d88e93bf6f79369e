"""`DeviceRunner`: the cache and the rows on the devices, and the two calls that change them.

Calls are dispatched in order and return at once, with arrays that are still being computed; whoever reads those waits.
So the next call can be on its way before the tokens of the last one are read: what it needs of them is on the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.prefetch import place
from haliax_ext.program import Flat, Input, Jit, Program
from haliax_ext.pytree import PyTree
from levanter.inference.generation import GenerationPrograms
from levanter.inference.sampling_arrays import RowSampling, host_params
from levanter.inference.step_plan import DecodeRow, PrefillPart

Masks: TypeAlias = Mapping[int, np.ndarray]
"""By row: which ids it may sample next, uint32, a bit each, lowest first."""

SampledArrays: TypeAlias = Mapping[str, jax.Array]
"""The arrays of `SampledRows` by path, maybe still being computed."""


class Runner(Protocol):
    """The two calls that move rows on; `DeviceRunner` says what they take and give."""

    @property
    def programs(self) -> GenerationPrograms:
        """What is run."""
        ...

    def prefill(
        self,
        bucket: tuple[int, int],
        parts: Sequence[PrefillPart],
        tables: np.ndarray,
        sampling: Sequence[RowSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Takes parts of prompts."""
        ...

    def decode(
        self,
        rows: Sequence[DecodeRow],
        tables: np.ndarray,
        sampling: Sequence[RowSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Gives rows their next tokens."""
        ...


class DeviceRunner:
    """The rows of one model on one mesh.

    Args:
        programs: what is run.
        mesh: the devices.
        model: the model on them.
        jit: makes a Program callable.
    """

    def __init__(self, programs: GenerationPrograms, mesh: Mesh, model: PyTree, *, jit: Jit = Program.jit):
        self._programs = programs
        self._mesh, self._model, self._jit = mesh, model, jit
        self._flat_model = Flat.of(model)
        # One CPU reads what is on the host where it is, so nothing has to be placed.
        self._on_host = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
        self._calls: dict[str, Callable[..., PyTree]] = {}
        self._open: dict[str, Flat] = {}
        self._before: dict[tuple[str, str], tuple[np.ndarray | Mapping[str, np.ndarray], Flat]] = {}
        self._params: dict[int, tuple[list[RowSampling | None], dict[str, np.ndarray]]] = {}
        cache, state = self._call(programs.start)
        self._cache, self._state = Flat.of(cache), Flat.of(state)

    @property
    def programs(self) -> GenerationPrograms:
        """What is run."""
        return self._programs

    def prefill(
        self,
        bucket: tuple[int, int],
        parts: Sequence[PrefillPart],
        tables: np.ndarray,
        sampling: Sequence[RowSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Takes parts of prompts.

        Args:
            bucket: rows and tokens of the call.
            parts: of different rows.
            tables: `[row, table]`, the pages of all rows, numbered within their shards.
            sampling: how each row is sampled; None for a row that nobody uses.
            masks: of the rows that may not sample any id.

        Returns:
            What was sampled, over the lanes of the call; it means something where a prompt ended.
        """
        rows, length = bucket
        names = ("first", "count", "row", "fresh", "ends", "left", "prompt")
        given: dict[str, np.ndarray] = {name: np.zeros(rows, np.int32) for name in names}
        given["row"][:] = self.programs.cache.rows
        given["tokens"] = np.zeros((rows, length), np.int32)
        given["tables"] = np.zeros((rows, tables.shape[1]), np.int32)
        of_lane: list[RowSampling | None] = [None] * rows
        for part in parts:
            own = of_lane[part.lane] = sampling[part.place]
            assert own is not None, f"{part.id} has no parameters"
            given["tokens"][part.lane, : len(part.tokens)] = part.tokens
            given["tables"][part.lane] = tables[part.place]
            values = (part.start, len(part.tokens), part.place, part.fresh, part.ends, part.left, own.prompt_tokens)
            for name, value in zip(names, values, strict=True):
                given[name][part.lane] = value
        own = {part.lane: masks[part.place] for part in parts if part.place in masks} if masks else {}
        return self._step(self.programs.prefill[bucket], given, self._of_rows(of_lane), own)

    def decode(
        self,
        rows: Sequence[DecodeRow],
        tables: np.ndarray,
        sampling: Sequence[RowSampling | None],
        masks: Masks | None = None,
    ) -> SampledArrays:
        """Gives rows their next tokens.

        Args:
            rows: which.
            tables, sampling, masks: see `prefill`. Rows with a mask get one token.

        Returns:
            What was sampled, over all rows, with an axis `step` in front.
        """
        given: dict[str, np.ndarray] = {"tables": tables, "going": np.zeros(len(sampling), np.int32)}
        given["going"][[row.place for row in rows]] = 1
        given["going"][list(masks or ())] = 2
        return self._step(self.programs.decode, given, self._of_rows(sampling), masks or {})

    def _of_rows(self, sampling: Sequence[RowSampling | None]) -> dict[str, np.ndarray]:
        """`host_params` of rows, made of those of the call before of as many."""
        before = self._params.get(len(sampling))
        if before is None or any(a is not b for a, b in zip(before[0], sampling, strict=True)):
            before = self._params[len(sampling)] = (list(sampling), host_params(sampling, before=before))
        return before[1]

    def _step(
        self, program: Program, given: Mapping[str, np.ndarray], params: Mapping[str, np.ndarray], masks: Masks
    ) -> SampledArrays:
        named: dict[str, np.ndarray | Mapping[str, np.ndarray]] = {"params": params, **given}
        values = [
            self._masks(program, one, masks) if one.name == "masks" else self._placed(program, one, named[one.name])
            for one in program.inputs[3:]
        ]
        found = self._call(program, self._flat_model, self._cache, self._state, *values)
        self._cache, self._state, drawn = found.part("0"), found.part("1"), found.part("2").arrays
        if not self._on_host:
            for array in drawn.values():
                array.copy_to_host_async()
        return drawn

    def _placed(self, program: Program, wanted: Input, value: np.ndarray | Mapping[str, np.ndarray]) -> Flat:
        """An input on the devices; what is the same as in the call before is there already. Placing takes longer than
        looking: there are more than a dozen small arrays in a call, and from step to step few of them change."""
        if self._on_host:
            return Flat(dict(value) if isinstance(value, Mapping) else {"": value})
        key = (program.name, wanted.name)
        before = self._before.get(key)
        if before is None or not _same(before[0], value):
            before = self._before[key] = (value, Flat.of(place(wanted, value, self._mesh)))
        return before[1]

    def _masks(self, program: Program, wanted: Input, masks: Masks) -> Flat:
        """The masks of a call's rows. Where nobody has one they are on the devices already: they are large."""
        if masks or program.name not in self._open:
            placed = Flat.of(place(wanted, whole_masks(wanted.value.array.shape, masks), self._mesh))
            if masks:
                return placed
            self._open[program.name] = placed
        return self._open[program.name]

    def _call(self, program: Program, *values: PyTree) -> PyTree:
        if program.name not in self._calls:
            self._calls[program.name] = self._jit(program, self._mesh)
        return self._calls[program.name](*values)


def _same(a: np.ndarray | Mapping[str, np.ndarray], b: np.ndarray | Mapping[str, np.ndarray]) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a is b or all(np.array_equal(a[name], b[name]) for name in b)
    return np.array_equal(a, b)  # pyright: ignore[reportArgumentType]


def whole_masks(shape: tuple[int, ...], masks: Masks) -> np.ndarray:
    """Masks of all rows, boolean `[batch, vocab]`: everything where there is none, nothing behind one that is short."""
    every = np.ones(shape, np.bool_)
    for n, mask in masks.items():
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little", count=min(32 * len(mask), shape[1]))
        every[n] = False
        every[n, : len(bits)] = bits
    return every


@dataclass(frozen=True, kw_only=True)
class RowsOnHost:
    """`SampledRows` on the host, by array: each is over rows, behind steps where there are several."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    ok: np.ndarray
    there: np.ndarray
    finite: np.ndarray


def fetched(drawn: SampledArrays) -> RowsOnHost:
    """What was drawn, on this host; waits for it."""
    own = {path: np.asarray(x.addressable_data(0)) for path, x in drawn.items()}
    sampled = {name: own[f"sampled.{name}"] for name in ("tokens", "logprobs", "top_ids", "top_logprobs", "ok")}
    return RowsOnHost(**sampled, there=own["there"], finite=own["finite"])
