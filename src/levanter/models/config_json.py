"""What a model family must know to cross between config.json and our config: a `ConfigJson`.

A *field* is a key of config.json. Each is read through `ConfigJsonReader`, which remembers what was asked for; what
nobody asked for, is not known to be harmless and is not null, is a `FieldFinding` at the end. So a new field that
changes numbers is never passed over in silence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from levanter.config.schema import Annotation, strip
from levanter.config.validators import AnyInt, FiniteFloat, LayerCount, PositiveInt, out_of_range
from levanter.models.architecture import Architecture

C = TypeVar("C", bound=Architecture)

Spelling = Literal["transformers4", "transformers5"]
"""Whose field names a config.json uses."""

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
    """A field that was not understood, or is understood and left out: to be shown to the user."""

    field: str
    value: object
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value!r:.60}: {self.message}"


LAYERS = ("num_hidden_layers", "n_layer")
"""What the number of layers is called."""
_DEFAULT_RANGES: Mapping[Any, Any] = {int: AnyInt, float: FiniteFloat}
"""Of numbers whose own range is looked at when the family's config is made."""


@dataclass
class ConfigJsonReader:
    """A config.json that is being read: values, what was asked for, and what is wrong."""

    document: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    findings: list[FieldFinding] = field(default_factory=list)

    def get(
        self, name: str, kind: Annotation | tuple[Annotation, ...], default: Any = None, *, required: bool = False
    ) -> Any:
        """The value of a field, or `default` where it is absent or null; a wrong type is a problem."""
        self.seen.add(name)
        value = self.document.get(name)
        if value is None:
            if required:
                self.problems.append(f"field {name!r} is missing")
            return default
        return self.check(name, value, kind, default)

    def unless_null(self, name: str, kind: type, absent: Any) -> Any:
        """The value of a field of which null means none, and only its absence means transformers' own default."""
        return self.get(name, kind, None if name in self.document else absent)

    def check(self, name: str, value: object, kind: Annotation | tuple[Annotation, ...], default: Any = None) -> Any:
        """`value` if it is of the kind, and in its range (see `config.ranges`); else a problem and `default`."""
        kinds = tuple(strip(one) for one in (kind if isinstance(kind, tuple) else (kind,)))
        if isinstance(value, int | float) and not isinstance(value, bool) and {int, float} & {*kinds}:
            problem = out_of_range(
                value, _DEFAULT_RANGES.get(kind, kind) if not isinstance(kind, tuple) else FiniteFloat
            )
            if problem is not None:
                self.problems.append(f"field {name!r}: {problem}")
                return default
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits and float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not fits:
            expected = " or ".join(k.__name__ for k in kinds)
            self.problems.append(f"field {name!r} is {value!r:.60}, expected {expected}")
            return default
        return value

    def size(self, name: str, default: int | None = None, *, required: bool = False) -> int:
        """A positive integer field. After a problem it answers 1, so that reading can go on."""
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
        """Turns every field that nobody asked for, and that could matter, into a finding."""
        for name, value in self.document.items():
            if name in self.seen or name in harmless or name.startswith("_") or value is None:
                continue
            self.findings.append(
                FieldFinding(name, value, "not understood and ignored; the results will differ if it matters")
            )


@dataclass(frozen=True, kw_only=True)
class ConfigJson(Generic[C]):
    """One kind of config.json, of one `model_type`, to a family's config and back.

    Attributes:
        model_type: as the file says it.
        transformers_class: the class that transformers builds, for `architectures`.
        read: fields to our config; None after a problem, which is then in the fields.
        write: our config, and for which transformers, to fields.
    """

    model_type: str
    transformers_class: str
    read: Callable[[ConfigJsonReader], C | None]
    write: Callable[[C, Spelling], dict[str, Any]]
