"""Results: the numbers that one pass over a book's windows stores, from which p_z under every scheme follows.

For each suffix token the pass stores three numbers: its log-probability under the full vocabulary, its rank in the
vocabulary (0 is the most likely; ties go to the lower id), and the log of the total probability of the 40 most likely
tokens. A `Scheme` is a decoding scheme: softmax at a temperature, restricted to the `top_k` most likely
tokens. With t over the suffix,

    log p_z = Σ_t log q(z_t | z_<t)      log q = log p − log Σ_top40 p   where the rank is below 40, else −∞   (K = 40)
                                         log q = log p                                                    (K = ∞)
                                         log q = 0                       where the rank is 0, else −∞      (K = 1)

so all three, and every shorter suffix, follow from this one pass. A scheme with another temperature or K has its own
normalizer, stored if the run was configured for it: log q = (log p) / T − log Σ_topK exp((log p') / T).

A `BookResult` is one book's arrays with the spans that its windows cover. On disk it is a folder: `windows.parquet`,
`manifest.json`, and `text.txt` if the text may be kept. The same results give the same bytes.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from levanter.io import atomic_write, exists, join, open_read

if TYPE_CHECKING:
    import pyarrow as pa

STORED_TOP = 40
"""K of the normalizer that every run stores."""

T = TypeVar("T")

WINDOWS, MANIFEST, TEXT = "windows.parquet", "manifest.json", "text.txt"
_PER_TOKEN = {"logprobs": np.float32, "ranks": np.int32, "top_lse": np.float32}
_SPANS = ("token_spans", "char_spans", "suffix_char_spans")
_NORMALIZER = "normalizer_"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A decoding scheme, and how much of the suffix it covers.

    Attributes:
        top_k: tokens that may be sampled; None for the full vocabulary, 1 for greedy decoding.
        temperature: divides the logits.
        suffix_tokens: use only the first so many tokens of the suffix; None for all.
    """

    top_k: int | None = None
    temperature: float = 1.0
    suffix_tokens: int | None = None

    def __post_init__(self):
        problems = []
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k must be at least 1, or null for the full vocabulary; got {self.top_k}")
        if not 0 < self.temperature < np.inf:
            problems.append(f"temperature must be positive and finite, got {self.temperature} (greedy is top_k: 1)")
        if self.suffix_tokens is not None and self.suffix_tokens < 1:
            problems.append(f"suffix_tokens must be at least 1, or null for all; got {self.suffix_tokens}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def name(self) -> str:
        """`full`, `greedy`, `k40`, `k40_t0.8`, `full_s25`: for columns and listings."""
        if self.top_k == 1:
            base = "greedy"
        else:
            base = "full" if self.top_k is None else f"k{self.top_k}"
            if self.temperature != 1.0:
                base += f"_t{self.temperature:g}"
        return base if self.suffix_tokens is None else f"{base}_s{self.suffix_tokens}"

    @property
    def law(self) -> "Scheme":
        """The scheme's next-token distribution alone, without the suffix length."""
        return Scheme(top_k=self.top_k, temperature=self.temperature)

    @property
    def stored(self) -> bool:
        """Whether every run's results include it, without a normalizer of its own."""
        # Greedy needs only ranks, and the two others only the normalizers that every run stores.
        return self.top_k == 1 or (self.temperature == 1.0 and self.top_k in (None, STORED_TOP))

    @classmethod
    def parse(cls, name: str) -> "Scheme":
        """The scheme that `name` names.

        Raises:
            ValueError: `name` has another form than the property `name` gives.
        """
        match = re.fullmatch(r"(full|greedy|k(\d+))(?:_t([0-9.eE+-]+))?(?:_s(\d+))?", name)
        if match is None:
            raise ValueError(f"{name!r} is not a scheme; examples: full, greedy, k40, k40_t0.8, k40_s25")
        base, top, temperature, suffix = match.groups()
        return cls(
            top_k=1 if base == "greedy" else None if base == "full" else int(top),
            temperature=float(temperature or 1.0),
            suffix_tokens=None if suffix is None else int(suffix),
        )


FULL, TOP_40, GREEDY = Scheme(), Scheme(top_k=STORED_TOP), Scheme(top_k=1)
STORED_SCHEMES = (FULL, TOP_40, GREEDY)
"""The schemes that every run's results include."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The stored numbers of some windows, `[n, k]` each; see `BookResult` for the meaning.

    Attributes:
        logprobs: float32.
        ranks: int32.
        top_lse: float32.
        normalizers: float32 for each requested law that `Scheme.stored` does not cover, by its name.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_lse: np.ndarray
    normalizers: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every array by column name."""
        extra = {_NORMALIZER + name: array for name, array in self.normalizers.items()}
        return {**{name: getattr(self, name) for name in _PER_TOKEN}, **extra}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Scores":
        """The scores with these `arrays`."""
        extra = {n.removeprefix(_NORMALIZER): a for n, a in arrays.items() if n.startswith(_NORMALIZER)}
        return cls(**{name: arrays[name] for name in _PER_TOKEN}, normalizers=extra)

    @classmethod
    def joined(cls, pieces: Sequence["Scores"]) -> "Scores":
        """Concatenates the rows of several scores."""
        names = pieces[0].arrays
        return cls.of_arrays({name: np.concatenate([part.arrays[name] for part in pieces]) for name in names})


@dataclass(frozen=True, kw_only=True, eq=False)
class BookResult:
    """One book's windows, scored. N windows of `prefix_tokens + suffix_tokens` tokens, in order.

    Attributes:
        title: the book's.
        preset: which convention the windows follow (`levanter`, `paper`, `custom`).
        scheme: the scheme that the preset reports first.
        manifest: the run's settings and devices as JSON values, without times.
        text: the book; None if it must not be stored.
        prefix_tokens: tokens of a window's prompt (BOS included if there is one).
        suffix_tokens: tokens that are scored, k.
        token_spans: int64 `[N, 2]`, tokens of the window in the book's ids (token mode); −1 in text mode, in which
            every window is tokenized separately.
        char_spans: int64 `[N, 2]`, characters of the full window in the text (start, stop).
        suffix_char_spans: int64 `[N, 2]`, characters of the suffix only.
        logprobs: float32 `[N, k]`, log p of each suffix token under the full vocabulary at T = 1.
        ranks: int32 `[N, k]`, vocabulary entries that are more likely than the token (of equal ones, those with a
            lower id).
        top_lse: float32 `[N, k]`, log of the total probability of the 40 most likely tokens, ≤ 0.
        normalizers: float32 `[N, k]` for each requested scheme that `Scheme.stored` does not cover, by the name of its
            law: log Σ over its top K of exp(log p / T).
    """

    title: str
    preset: str
    scheme: Scheme = FULL
    manifest: Mapping[str, Any] = field(repr=False)
    text: str | None = field(repr=False)
    prefix_tokens: int
    suffix_tokens: int
    token_spans: np.ndarray = field(repr=False)
    char_spans: np.ndarray = field(repr=False)
    suffix_char_spans: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    ranks: np.ndarray = field(repr=False)
    top_lse: np.ndarray = field(repr=False)
    normalizers: Mapping[str, np.ndarray] = field(repr=False, default_factory=dict)

    def __post_init__(self):
        windows = len(self.logprobs)
        for name in _SPANS:
            span = getattr(self, name)
            assert span.shape == (windows, 2) and span.dtype == np.int64, (name, span.shape, span.dtype)
        arrays = {**{n: (getattr(self, n), d) for n, d in _PER_TOKEN.items()}}
        arrays |= {name: (array, np.float32) for name, array in self.normalizers.items()}
        for name, (array, dtype) in arrays.items():
            expected = (windows, self.suffix_tokens)
            assert array.shape == expected and array.dtype == dtype, (name, array.shape, array.dtype)

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.logprobs)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of these results (at any suffix length up to k): the preset's scheme first."""
        # Names are parsed rather than stored, because normalizers are columns and a column has only a name.
        requested = tuple(Scheme.parse(name) for name in self.normalizers)
        return tuple(dict.fromkeys((self.scheme, *STORED_SCHEMES, *requested)))

    @property
    def scores(self) -> Scores:
        """The scores of every suffix token."""
        return Scores(
            logprobs=self.logprobs, ranks=self.ranks, top_lse=self.top_lse, normalizers=dict(self.normalizers)
        )

    def log_pz(self, scheme: Scheme) -> np.ndarray:
        """Float64 `[N]`: the log-probability of each window's suffix under `scheme`, −inf outside its top K.

        Raises:
            ValueError: a suffix longer than the one that was scored, or a scheme that the run was not configured for.
        """
        length = self.suffix_tokens if scheme.suffix_tokens is None else scheme.suffix_tokens
        if length > self.suffix_tokens:
            raise ValueError(
                f"scheme {scheme.name}: {length} suffix tokens requested, {self.suffix_tokens} were scored"
            )
        part = slice(0, length)
        law = scheme.law
        ranks = self.ranks[:, part]
        if law.top_k == 1:
            # Greedy decoding at any temperature: probability 1 for the likeliest token, 0 for the others.
            return np.where((ranks == 0).all(axis=1), 0.0, -np.inf)
        # float64 from here on: a suffix has 50 terms or more, and thresholds are compared with their sum.
        terms = self.logprobs[:, part].astype(np.float64) / law.temperature
        if law != FULL:
            terms -= self._normalizer(law)[:, part].astype(np.float64)
        # The target is one of the tokens in its normalizer, so what is above 0 is rounding.
        total = np.minimum(terms, 0.0).sum(axis=1, dtype=np.float64)
        # A token outside the top K has probability 0, whatever its log-probability is.
        return total if law.top_k is None else np.where((ranks < law.top_k).all(axis=1), total, -np.inf)

    def _normalizer(self, law: Scheme) -> np.ndarray:
        if law == TOP_40:
            return self.top_lse
        if law.name not in self.normalizers:
            known = ", ".join(s.name for s in self.schemes)
            raise ValueError(
                f"scheme {law.name}: this run did not store its normalizer (it has {known}); rerun it with "
                f"schemes: [{law.name}]"
            )
        return self.normalizers[law.name]

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that `write` writes."""
        return (WINDOWS, MANIFEST) if self.text is None else (TEXT, WINDOWS, MANIFEST)

    def write(self, folder: str) -> None:
        """Writes the folder's files, each atomically; the same result gives the same bytes."""
        import pyarrow.parquet as pq

        # The manifest last: `read` opens it first, so a folder without it has no result.
        if self.text is not None:
            with atomic_write(join(folder, TEXT)) as file:
                file.write(self.text.encode("utf-8"))
        with atomic_write(join(folder, WINDOWS)) as file:
            # Bounded row groups, so that readers can load a part of the windows.
            pq.write_table(self._table(), file, compression="zstd", row_group_size=1 << 16)
        with atomic_write(join(folder, MANIFEST)) as file:
            file.write(as_json_bytes(self.manifest))

    @classmethod
    def read(cls, folder: str) -> "BookResult":
        """Reads what `write` wrote.

        Raises:
            ValueError: a file is missing, or is not what `write` writes.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        manifest = _read_part(join(folder, MANIFEST), json.loads)
        # Read in full: Parquet seeks, and remote files may not.
        table = _read_part(join(folder, WINDOWS), lambda content: pq.read_table(pa.BufferReader(content)))
        meta = json.loads((table.schema.metadata or {}).get(b"levanter", b"null"))
        if meta is None:
            raise ValueError(f"{join(folder, WINDOWS)}: not written by a memorization run (no levanter metadata)")
        text = None
        if exists(join(folder, TEXT)):
            text = _read_part(join(folder, TEXT), lambda content: content.decode("utf-8"))
        k = meta["suffix_tokens"]
        scores = read_scores(table, k)
        return cls(
            title=meta["title"],
            preset=meta["preset"],
            scheme=Scheme.parse(meta["scheme"]),
            manifest=manifest,
            text=text,
            prefix_tokens=meta["prefix_tokens"],
            suffix_tokens=k,
            **{name: _span(table, name) for name in _SPANS},
            logprobs=scores.logprobs,
            ranks=scores.ranks,
            top_lse=scores.top_lse,
            normalizers=scores.normalizers,
        )

    def _table(self) -> "pa.Table":
        import pyarrow as pa

        columns: dict[str, Any] = {"window": pa.array(np.arange(len(self), dtype=np.int64))}
        for name in _SPANS:
            span = getattr(self, name)
            columns[f"{name[:-1]}_start"] = pa.array(span[:, 0])
            columns[f"{name[:-1]}_stop"] = pa.array(span[:, 1])
        for scheme in self.schemes:
            # Derived columns for users of the Parquet file; `read` ignores them.
            columns[f"log_pz_{scheme.name}"] = pa.array(self.log_pz(scheme))
        columns |= score_columns(self.scores)
        meta = {
            "title": self.title,
            "preset": self.preset,
            "scheme": self.scheme.name,
            "prefix_tokens": self.prefix_tokens,
            "suffix_tokens": self.suffix_tokens,
        }
        table = pa.table(columns)
        # Sorted keys, so that the same result gives the same bytes.
        return table.replace_schema_metadata({b"levanter": json.dumps(meta, sort_keys=True).encode()})


def _read_part(path: str, parse: Callable[[bytes], T]) -> T:
    """A file of a result, parsed.

    Raises:
        ValueError: it is not what was written.
    """
    with open_read(path) as file:
        content = file.read()
    try:
        return parse(content)
    # pyarrow's errors of damaged files are of these kinds.
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: damaged or cut off ({' '.join(str(error).split())[:200]})\n"
            "  → start the command of that run again: it writes its results anew"
        ) from error


def score_columns(scores: Scores) -> "dict[str, pa.Array]":
    """Parquet columns of scores: one list of k numbers per window."""
    import pyarrow as pa

    k = scores.logprobs.shape[1]
    # Parquet lists need flat, contiguous values.
    flat = {name: pa.array(np.ascontiguousarray(array).reshape(-1)) for name, array in scores.arrays.items()}
    return {name: pa.FixedSizeListArray.from_arrays(values, k) for name, values in flat.items()}


def read_scores(table: "pa.Table", k: int) -> Scores:
    """The scores in the columns of `score_columns`."""
    names = [*_PER_TOKEN, *(name for name in table.column_names if name.startswith(_NORMALIZER))]
    return Scores.of_arrays({name: _matrix(table, name, k) for name in names})


def as_json_bytes(value: object) -> bytes:
    """JSON in the format of a run's files: sorted keys, so that equal values give equal bytes."""
    # Names of files may have bytes that are not UTF-8; a backslash and the number is JSON's form of them.
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _span(table: "pa.Table", name: str) -> np.ndarray:
    columns = [table[f"{name[:-1]}_{end}"].to_numpy() for end in ("start", "stop")]
    return np.stack(columns, axis=1).astype(np.int64)


def _matrix(table: "pa.Table", name: str, k: int) -> np.ndarray:
    import pyarrow as pa

    flat = table[name].combine_chunks()
    # `combine_chunks` may return one array or a chunked one, depending on the version of pyarrow.
    values = flat.values if not isinstance(flat, pa.ChunkedArray) else pa.concat_arrays(flat.chunks).values
    return values.to_numpy(zero_copy_only=False).reshape(-1, k).astype(_PER_TOKEN.get(name, np.float32))
