"""Objects as dataclasses: everything that is wrong is said, with its path."""

import pytest

from levanter.serving.request_parsing import ProtocolError, decode, parse_object
from levanter.serving.request_schema import ChatBody, CompletionBody, DetokenizeBody

pytestmark = pytest.mark.quick

SAY = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("cls", "value", "said"),
    [
        (ChatBody, {"mesages": []}, ["mesages: not a field; did you mean `messages`?", "messages: missing"]),
        (ChatBody, {"messages": [{"role": 1, "content": "a"}]}, ["messages[0].role: expected a string, got 1"]),
        (
            ChatBody,
            {"messages": [{**SAY, "contnet": "b"}], "tools": [{"type": "function", "function": {}}]},
            ["messages[0].contnet: not a field; did you mean `content`?", "tools[0].function.name: missing"],
        ),
        (
            ChatBody,
            {"messages": [SAY], "tool_choice": "requird"},
            ["tool_choice: expected one of 'none', 'auto', 'required' or an object, got 'requird'"],
        ),
        (ChatBody, {"messages": [SAY], "stream": "yes"}, ["stream: expected true or false, got 'yes'"]),
        (ChatBody, {"messages": [SAY], "top_logprobs": True}, ["top_logprobs: expected a whole number, got True"]),
        (ChatBody, {"messages": [SAY], "top_logprobs": 1.5}, ["top_logprobs: expected a whole number, got 1.5"]),
        (CompletionBody, {"prompt": None}, ["prompt: missing"]),
        (CompletionBody, {"prompt": [1, True]}, ["prompt[1]: expected a whole number, got True"]),
        (DetokenizeBody, {"tokens": "abc"}, ["tokens: expected a list (a whole number each), got 'abc'"]),
        (DetokenizeBody, {"tokens": {"a": 1}}, ["tokens: expected a list (a whole number each), got an object"]),
    ],
)
def test_what_is_wrong_is_said_with_its_path(cls, value, said):
    with pytest.raises(ProtocolError) as found:
        decode(cls, value)
    assert list(found.value.problems) == said


def test_objects_become_dataclasses():
    body = decode(CompletionBody, {"prompt": [[1, 2], [3.0]], "stream_options": {"include_usage": True}, "user": None})
    assert body.prompt == ((1, 2), (3,)) and body.stream_options.include_usage and body.user is None
    assert decode(CompletionBody, {"prompt": []}).prompt == ()
    chat = decode(ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}]})
    assert chat.messages[0].content[0].text == "b"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b'{"a": 1, "a": 2}', "a: written twice"),
        (b'{"a": {"b": ["x", "\\udc00"]}}', r"a.b\[1\]: half of a surrogate pair"),
        (b'{"\\ud83d": 1}', "half of a surrogate pair"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"3", "expected an object, got a number"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "a number is longer"),
    ],
    ids=range(8),
)
def test_what_is_no_object_is_refused(body, said):
    with pytest.raises(ProtocolError, match=said) as found:
        parse_object(body)
    str(found.value).encode()
