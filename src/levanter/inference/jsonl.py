"""Requests as lines of JSON: one object a line, one answer a line, in the same order.

A request has

- one of `prompt`: a text, or a list of token ids; `tokens`: ids too; `messages`: a conversation, each message an object
  with a `role`, for models with a chat template;
- `id`: a string, unique in its file; the line's number by default;
- the parameters of `SamplingParams`, by their names;
- at most one of `json_object` (true), `json_schema` (an object), `regex` and `grammar` (strings), or OpenAI's
  `response_format`: what its text has to conform to.

A stop string that is one of the tokenizer's special tokens (`<|im_end|>`) ends the text at that token: texts have none.

Its answer has `id`, `seed`, `prompt_tokens` and `choices`, each with `index`, `text`, `tokens`, `finish_reason`
(`stop` or `length`), and where they were asked for `logprobs` and `top_logprobs`. With `echo` it has `prompt`, the
prompt's text, `prompt_ids`, and where log-probabilities are asked for `prompt_logprobs` and `prompt_top_logprobs`, both
null at the first token, which nothing predicts. A line that is no request has an answer with `id` (null if it has
none), `line` and `error`; it concerns no other line.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from levanter.base.input_limits import MIB, shown_bytes
from levanter.inference import response_format
from levanter.inference.params import ParamsError, SamplingParams, lone_surrogate, params_of, stop_ids_of
from levanter.inference.requests import ConstraintSpec, Request
from levanter.inference.strict_json import NotAnObjectError, object_in

LINE_BYTES = 32 * MIB
"""Of a request."""
ID_CHARACTERS = 256
"""Of an id."""
_PROMPTS = ("prompt", "tokens", "messages")
_BESIDE = frozenset({"id", *_PROMPTS, *response_format.FIELDS})


@dataclass(frozen=True, kw_only=True)
class AskedLine:
    """A line that is a request, as it is written.

    Attributes:
        line: its number in the file, from 1.
        id: its own, or that number.
        prompt: a text or ids; None where there are messages.
        messages: a conversation.
        template: what the chat template knows beside it, such as `tools`.
        params: how it is sampled.
        constraint: what its text conforms to.
    """

    line: int
    id: str
    prompt: str | tuple[int, ...] | None
    messages: tuple[Mapping[str, object], ...] = ()
    template: Mapping[str, object] = field(default_factory=dict[str, object])
    params: SamplingParams
    constraint: ConstraintSpec | None = None


@dataclass(frozen=True, kw_only=True)
class BrokenLine:
    """A line that is no request.

    Attributes:
        line: its number in the file, from 1.
        id: its own, if it has a usable one.
        error: everything that is wrong with it.
    """

    line: int
    id: str | None
    error: str


def request_lines(file: IO[bytes], *, defaults: Mapping[str, object] | None = None) -> Iterator[AskedLine | BrokenLine]:
    """The requests of a file, in order; lines of spaces are no lines.

    Args:
        file: open for reading.
        defaults: parameters that a line does not name, as JSON values.
    """
    seen: dict[str, int] = {}
    for number, line in _lines(file):
        if isinstance(line, str):
            yield BrokenLine(line=number, id=None, error=line)
        elif line.strip():
            found = _read(number, line, defaults or {})
            if found.id is not None and (first := seen.setdefault(found.id, number)) != number:
                found = BrokenLine(line=number, id=found.id, error=f"id: {found.id!r} is also that of line {first}")
            yield found


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | str]]:
    """The lines by number; in the place of one that is too long what is wrong with it."""
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) <= LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MIB)
        yield number, f"more than {shown_bytes(LINE_BYTES)}, the limit for a line"


def _read(number: int, line: bytes, defaults: Mapping[str, object]) -> AskedLine | BrokenLine:
    problems: list[str] = []
    try:
        value = object_in(line.strip(), problems)
    except NotAnObjectError as error:
        return BrokenLine(line=number, id=None, error=str(error))
    id = _id(value.get("id"), number, problems)
    prompt, messages = _prompt(value, problems)
    constraint = response_format.constraint_of(value, problems)
    params = None
    try:
        params = params_of({**defaults, **value}, beside=_BESIDE)
    except ParamsError as error:
        problems += error.problems
    if problems or params is None:
        return BrokenLine(line=number, id=id, error="\n".join(dict.fromkeys(problems)))
    return AskedLine(
        line=number,
        id=id or str(number),
        prompt=prompt,
        messages=messages,
        params=params,
        constraint=constraint,
    )


def _id(value: object, number: int, problems: list[str]) -> str | None:
    if value is None:
        return str(number)
    if not isinstance(value, str) or not value or len(value) > ID_CHARACTERS or lone_surrogate(value) is not None:
        problems.append(f"id: expected a string of 1 to {ID_CHARACTERS} characters")
        return None
    return value


def _prompt(
    value: Mapping[str, object], problems: list[str]
) -> tuple[str | tuple[int, ...] | None, tuple[Mapping[str, object], ...]]:
    given = [name for name in _PROMPTS if value.get(name) is not None]
    if len(given) != 1:
        said = f", got {' and '.join(given)}" if given else ""
        problems.append(f"prompt: expected one of `prompt`, `tokens` and `messages`{said}")
        return None, ()
    (name,) = given
    prompt = value[name]
    if name == "messages":
        return None, _messages(prompt, problems)
    if isinstance(prompt, str) and name == "prompt":
        return prompt, ()
    if isinstance(prompt, list) and all(type(one) is int and 0 <= one < 2**31 for one in prompt):
        return tuple(prompt), ()
    problems.append(f"{name}: expected {'a string or ' if name == 'prompt' else ''}a list of token ids")
    return None, ()


def _messages(given: object, problems: list[str]) -> tuple[Mapping[str, object], ...]:
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        problems.append("messages: expected a list of objects, at least one")
        return ()
    wrong = [n for n, one in enumerate(given) if not isinstance(one.get("role"), str)]
    problems += [f"messages[{n}]: expected a string as its `role`" for n in wrong[:3]]
    return tuple(given)


def request_of(
    asked: AskedLine,
    *,
    encode: Callable[[str], Sequence[int]],
    chat: Callable[[Sequence[Mapping[str, object]]], Sequence[int]] | None,
    vocab_size: int,
    model_ends: Sequence[int],
    seed: int,
    special_tokens: Mapping[str, int] | None = None,
) -> Request:
    """A line as a request to the engine.

    Args:
        asked: the line.
        encode: from a text to its ids, with what a text begins with (BOS).
        chat: from a conversation to its ids, which have their own beginning; None for a model without a template.
        vocab_size: ids of the model.
        model_ends: the model's own ends of text.
        seed: of the run; a request without one gets its own, from this and its id.
        special_tokens: ids of the tokens that no text is made of, which a stop string may name.

    Raises:
        ValueError: lists what is wrong with it for this model.
    """
    problems: list[str] = []
    if asked.prompt is None:
        if chat is None:
            raise ValueError("messages: this model has no chat template; write the text as `prompt`")
        tokens = tuple(int(i) for i in chat(asked.messages))
    elif isinstance(asked.prompt, str):
        tokens = tuple(int(i) for i in encode(asked.prompt)) if asked.prompt else ()
    else:
        tokens = asked.prompt
    if not tokens:
        problems.append("prompt: empty; a text needs at least one token to begin with")
    wrong = [f"prompt[{n}]: id {i}" for n, i in enumerate(tokens) if not 0 <= i < vocab_size]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        problems.append(f"{wrong[0]} is not one of the model's {vocab_size} ids (0 to {vocab_size - 1}){more}")
    stop_ids: tuple[int, ...] = ()
    try:
        asked.params.check_ids(vocab_size)
        stop_ids = stop_ids_of(asked.params, model_ends, special_tokens=special_tokens or {})
    except ValueError as error:
        problems.append(str(error))
    if asked.constraint is not None:
        problems += _against_constraint(asked.params)
    if problems:
        raise ValueError("\n".join(problems))
    own = asked.params.seed
    return Request(
        id=asked.id,
        tokens=tokens,
        params=asked.params,
        seed=seed_of(seed, asked.id) if own is None else own,
        stop_ids=stop_ids,
        constraint=asked.constraint,
    )


def _against_constraint(params: SamplingParams) -> list[str]:
    """What cannot be asked of a text that conforms to something: where it ends, says what it conforms to."""
    problems = []
    if params.ignore_eos:
        problems.append("ignore_eos: a text that conforms to something ends where it is complete")
    if params.min_tokens:
        problems.append("min_tokens: a text that conforms to something may be complete before that")
    return problems


def seed_of(seed: int, id: str) -> int:
    """The seed of a request that names none: the same in every run of the same file, whatever was done before."""
    digest = hashlib.blake2b(f"{seed} {id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
