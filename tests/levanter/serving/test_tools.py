"""Calls of tools in texts that were written freely."""

import pytest

from levanter.serving.chat import ToolCall, ToolRules
from levanter.serving.request_schema import Function, Tool

pytestmark = pytest.mark.quick

LOOK = Tool(type="function", function=Function(name="look"))
RULES = ToolRules(mode="auto", tools=(LOOK,))
CALL = ToolCall(name="look", arguments='{"at": "日本"}')


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "look", "arguments": {"at": "日本"}}', (CALL,)),
        (' {"name": "look", "parameters": {"at": "日本"}}\n', (CALL,)),
        (
            '[{"name": "look", "arguments": {"at": "日本"}}, {"name": "look", "arguments": {"at": "日本"}}]',
            (CALL, CALL),
        ),
        ('<tool_call>\n{"name": "look", "arguments": {"at": "日本"}}\n</tool_call>\n', (CALL,)),
        ('<tool_call>{"name": "look", "arguments": {"at": "日本"}}</tool_call>' * 2, (CALL, CALL)),
        ('{"name": "look", "arguments": {}}', (ToolCall(name="look", arguments="{}"),)),
        ('{"name": "leave", "arguments": {}}', ()),
        ('{"name": "look", "arguments": "x"}', ()),
        ('{"name": ["look"], "arguments": {}}', ()),
        ('{"name": "look"', ()),
        ('I call {"name": "look", "arguments": {}}', ()),
        ('<tool_call>{"name": "look", "arguments": {}}</tool_call> and so on', ()),
        ("[]", ()),
        ("", ()),
        ("[" * 100_000, ()),
    ],
)
def test_a_text_that_is_calls_as_a_whole(text, calls):
    assert RULES.calls_in(text) == calls


@pytest.mark.parametrize(
    ("beginning", "may"),
    [("", True), (" \n", True), ("<tool", True), ("<tool_call>{", True), ("{", True), ("The", False), ("<b>", False)],
)
def test_what_may_still_become_a_call_is_held_back(beginning, may):
    assert RULES.may_be_call(beginning) == may
    assert not ToolRules().may_be_call(beginning)
