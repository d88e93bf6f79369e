"""`ConfigJson`: reads a family's config from config.json and writes it back, without ignoring unknown fields silently.

A *field* is a key of config.json. A family reads fields through `ConfigJsonReader`, which records which ones were read.
A field that was not read, is not known to be harmless and is not null becomes a `FieldFinding`. So a new field that
changes results is never ignored silently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from levanter.config.schema import Annotation, strip
from levanter.config.validators import AnyInt, FiniteFloat, LayerCount, PositiveInt, out_of_range
from levanter.models.architecture import Architecture

C = TypeVar("C", bound=Architecture)

Spelling = Literal["transformers4", "transformers5"]
"""The version of transformers whose field names a config.json uses."""

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder keys_to_ignore_at_inference label2id length_penalty max_length min_length
    model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
    """.split()  # noqa: SIM905
)
"""Fields of any model that name files or control generation or the library, and do not affect log-probabilities."""


@dataclass(frozen=True)
class FieldFinding:
    """A field that was not understood, or was understood and left out; shown to the user."""

    field: str
    value: object
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value!r:.60}: {self.message}"


LAYERS = ("num_hidden_layers", "n_layer")
"""The fields that hold the number of layers; `size` allows them 0."""
_DEFAULT_RANGES: Mapping[Any, Any] = {int: AnyInt, float: FiniteFloat}
"""Ranges of plain numbers here; the family's config class checks narrower ones."""


@dataclass
class ConfigJsonReader:
    """A config.json while it is read: its values, the fields read so far, and the problems found."""

    document: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    findings: list[FieldFinding] = field(default_factory=list)

    def get(
        self, name: str, kind: Annotation | tuple[Annotation, ...], default: Any = None, *, required: bool = False
    ) -> Any:
        """The value of a field, or `default` where it is absent or null; a wrong type is a problem."""
        # Marked even if absent: families ask for optional fields, and `forbid_foreign` must know that they did.
        self.seen.add(name)
        value = self.document.get(name)
        if value is None:
            if required:
                self.problems.append(f"field {name!r} is missing")
            return default
        return self.check(name, value, kind, default)

    def unless_null(self, name: str, kind: type, absent: Any) -> Any:
        """The value of a field where null means none, and only absence means transformers' own default."""
        return self.get(name, kind, None if name in self.document else absent)

    def check(self, name: str, value: object, kind: Annotation | tuple[Annotation, ...], default: Any = None) -> Any:
        """`value` if it is of the kind, and in its range (see `config.ranges`); else a problem and `default`."""
        # Ranged numbers are `Annotated[int, …]`; `strip` gives the plain type for isinstance.
        kinds = tuple(strip(one) for one in (kind if isinstance(kind, tuple) else (kind,)))
        if isinstance(value, int | float) and not isinstance(value, bool) and {int, float} & {*kinds}:
            problem = out_of_range(
                value, _DEFAULT_RANGES.get(kind, kind) if not isinstance(kind, tuple) else FiniteFloat
            )
            if problem is not None:
                self.problems.append(f"field {name!r}: {problem}")
                return default
        # bool is a subclass of int in Python: `true` must not pass for a size of 1.
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        # JSON has one kind of number, and transformers writes 10000 for a float rope_theta.
        if not fits and float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not fits:
            expected = " or ".join(k.__name__ for k in kinds)
            self.problems.append(f"field {name!r} is {value!r:.60}, expected {expected}")
            return default
        return value

    def size(self, name: str, default: int | None = None, *, required: bool = False) -> int:
        """A positive integer field. After a problem it returns 1, so that reading can continue."""
        before = len(self.problems)
        value = self.get(name, LayerCount if name in LAYERS else PositiveInt, default, required=required)
        return 1 if value is None or len(self.problems) > before else value

    def forbid(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """A field that may only have one of `allowed` values (or be absent or null)."""
        self.seen.add(name)
        value = self.document.get(name)
        if value is not None and value not in allowed:
            self.problems.append(f"field {name!r} is {value!r:.60}: {why}")

    def note(self, name: str, harmless: Sequence[Any], message: str) -> None:
        """A field that is understood, and left out: a finding unless it has one of the `harmless` values."""
        self.seen.add(name)
        value = self.document.get(name)
        if value is not None and value not in harmless:
            self.findings.append(FieldFinding(name, value, message))

    def leftovers(self, harmless: frozenset[str]) -> None:
        """Turns every field that was not read, and that could matter, into a finding."""
        for name, value in self.document.items():
            if name in self.seen or name in harmless or name.startswith("_") or value is None:
                continue
            self.findings.append(
                FieldFinding(name, value, "not understood and ignored; the results will differ if it matters")
            )


@dataclass(frozen=True, kw_only=True)
class ConfigJson(Generic[C]):
    """Converts one kind of config.json, that of one `model_type`, to a family's config and back.

    Attributes:
        model_type: as in the file.
        transformers_class: the class that transformers builds, for `architectures`.
        read: converts fields to our config; returns None after a problem, which it adds to the fields.
        write: converts our config to fields in the spelling of a version of transformers.
    """

    model_type: str
    transformers_class: str
    read: Callable[[ConfigJsonReader], C | None]
    write: Callable[[C, Spelling], dict[str, Any]]
