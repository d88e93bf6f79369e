"""JSON Lines files of requests: one request a line, one response a line, in the same order.

A request has

- one of `prompt`: a text, or a list of token ids; `tokens`: ids too; `messages`: a conversation, each message an object
  with a `role`, for models with a chat template;
- `id`: a string, unique in its file; the line's number by default;
- the parameters of `SamplingParams`, by their names;
- at most one of `json_object` (true), `json_schema` (an object), `regex` and `grammar` (strings), or OpenAI's
  `response_format`: a constraint of its text.

A stop string that is one of the tokenizer's special tokens (`<|im_end|>`) ends the text at that token.

Its response has `id`, `seed`, `prompt_tokens` and `choices`, each with `index`, `text`, `tokens`, `finish_reason`
(`stop` or `length`), and if requested `logprobs` and `top_logprobs`. With `echo` it has `prompt`, the prompt's text,
`prompt_ids`, and with log-probabilities `prompt_logprobs` and `prompt_top_logprobs`, both null at the first token,
which nothing predicts. An invalid line has a response with `id` (null if it has none), `line` and `error`; other lines
are not affected.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from levanter.base.bounded_json import NotAnObjectError, lone_surrogate, parse_json_object
from levanter.base.input_limits import MIB, shown_bytes
from levanter.data.messages import read_message
from levanter.inference.prompts import CONSTRAINT_FIELDS, PromptRequest, parse_constraint
from levanter.inference.requests import ParamsError, parse_params

LINE_BYTES = 32 * MIB
"""Size limit of a line."""
ID_CHARACTERS = 256
"""Largest length of an id."""
_PROMPTS = ("prompt", "tokens", "messages")
_NON_PARAMS = frozenset({"id", *_PROMPTS, *CONSTRAINT_FIELDS})


@dataclass(frozen=True, kw_only=True)
class InvalidLine:
    """A line that is not a valid request.

    Attributes:
        line: its number in the file, from 1.
        id: its id, if that is valid.
        error: all of its problems.
    """

    line: int
    id: str | None
    error: str


def request_lines(
    file: IO[bytes], *, defaults: Mapping[str, object] | None = None
) -> Iterator[PromptRequest | InvalidLine]:
    """The requests of a file, in order; blank lines are skipped, and count in the line numbers.

    Args:
        file: the file, open for reading.
        defaults: values of parameters that a line does not name, as JSON values.
    """
    seen: dict[str, int] = {}
    for number, line in _lines(file):
        if isinstance(line, str):
            yield InvalidLine(line=number, id=None, error=line)
        elif line.strip():
            line_request = _read(number, line, defaults or {})
            if line_request.id is not None and (first := seen.setdefault(line_request.id, number)) != number:
                # The output identifies responses by id, so the second line with an id is refused, and not the first.
                line_request = InvalidLine(
                    line=number, id=line_request.id, error=f"id: {line_request.id!r} is already the id of line {first}"
                )
            yield line_request


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | str]]:
    """The lines by number; a message in place of a line that is too long."""
    number = 0
    # One byte more than the limit: a longer line is recognized without reading all of it into memory.
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) <= LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            # Skips the rest of the line.
            line = file.readline(MIB)
        yield number, f"more than {shown_bytes(LINE_BYTES)}, the limit for a line"


def _read(number: int, line: bytes, defaults: Mapping[str, object]) -> PromptRequest | InvalidLine:
    problems: list[str] = []
    try:
        value = parse_json_object(line.strip(), problems)
    except NotAnObjectError as error:
        return InvalidLine(line=number, id=None, error=str(error))
    id = _id(value.get("id"), number, problems)
    prompt, messages = _prompt(value, problems)
    constraint = parse_constraint(value, problems)
    params = None
    try:
        params = parse_params({**defaults, **value}, ignore=_NON_PARAMS)
    except ParamsError as error:
        problems += error.problems
    if problems or params is None:
        # Several checks may report the same problem; it is listed once.
        return InvalidLine(line=number, id=id, error="\n".join(dict.fromkeys(problems)))
    return PromptRequest(
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
    names = [name for name in _PROMPTS if value.get(name) is not None]
    if len(names) != 1:
        got = f", got {' and '.join(names)}" if names else ""
        problems.append(f"prompt: expected one of `prompt`, `tokens` and `messages`{got}")
        return None, ()
    (name,) = names
    prompt = value[name]
    if name == "messages":
        return None, _messages(prompt, problems)
    if isinstance(prompt, str) and name == "prompt":
        return prompt, ()
    if isinstance(prompt, list) and all(type(one) is int and 0 <= one < 2**31 for one in prompt):
        return tuple(prompt), ()
    problems.append(f"{name}: expected {'a string or ' if name == 'prompt' else ''}a list of token ids")
    return None, ()


def _messages(messages: object, problems: list[str]) -> tuple[Mapping[str, object], ...]:
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        problems.append("messages: expected a list of objects, at least one")
        return ()
    read = tuple(read_message(one, f"messages[{n}].", problems) for n, one in enumerate(messages))
    wrong = [n for n, one in enumerate(read) if not isinstance(one.get("role"), str)]
    problems += [f"messages[{n}]: expected a string as its `role`" for n in wrong[:3]]
    return read
