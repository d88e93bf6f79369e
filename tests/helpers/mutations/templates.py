# ruff: noqa: E501 - rows of tables
"""Mutations of chat templates: pieces removed, doubled and moved, and constructs without end.

A template writes a text or is refused, within its time. Where transformers writes a text with a template that only
lost or doubled pieces, so does ours, and the same one.
"""

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

from helpers.mutations.cases import Case, reading_faults

TEMPLATES = 12
"""Templates of a case."""
SECONDS = 12.0
HOSTILE = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}a{% endfor %}", "{{ 'a' * 10**9 }}", "{{ ('a' * 9999) * 9999 }}", "{{ 9**9**9 }}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "{{ '%1000000000d' % 1 }}", "{{ '{:>999999999}'.format(1) }}",
    "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ cycler.__init__.__globals__ }}",
    "{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}", "{% include 'x' %}", "{% import 'os' as x %}",
    "{% extends 'x' %}", "{{ self }}", "{{ namespace(a=1).a.b.c }}", "{{ x | attr('__class__') }}", "{{ 1/0 }}",
    "{{ [1,2,3] | batch(10**9, 0) | list }}", "{{ 'a' | center(10**9) }}", "{{ 'ab' | replace('', 'a' * 99999) }}",
    "{{ range(10**9) | list | length }}", "{{ '\\ud800' }}", "{{ '\ufdd0' }}", "{% set x = [1] %}{% for i in range(40) %}"
    "{% set x = x + x %}{% endfor %}", "{{ dict(a=1).items() | list | tojson(indent=10**9) }}", "{{" * 500, "{% if %}" * 300,
    "(" * 3000, "{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "{{ strftime_now('%' * 9999) }}", "{{ joiner()() }}",
    "{% generation %}{% generation %}x{% endgeneration %}", "{% generation %}", "{{ raise_exception(messages) }}",
)  # fmt: skip
"""What no template needs: loops and texts without end, Python's internals, other files, broken syntax."""


def templates(dice: random.Random, here: Path) -> Case:
    """Chat templates, rendered without a run."""
    return Case("templates", "", (), (0,), judge=partial(judge_templates, dice.randrange(2**32)))


def judge_templates(seed: int, here: Path) -> list[str]:
    """Renders drawn templates; lists what is wrong."""
    from helpers.chat_templates import DOCUMENTS, TOOL, drawn_messages, published_templates
    from helpers.chat_templates import TEMPLATES as SOUND

    dice, faults = random.Random(seed), list[str]()
    sources = {**SOUND, **published_templates()}
    judge = _judge_tokenizer()
    for _ in range(TEMPLATES):
        name = dice.choice(sorted(sources))
        text, is_hostile = mutated(dice, sources[name])
        messages = drawn_messages(dice)
        variables = {"tools": dice.choice([None, [TOOL]]), "documents": dice.choice([None, DOCUMENTS])}
        where = f"seed {seed}, {name}: {text!r:.300}"
        written: list[str] = []
        faults += reading_faults(
            partial(_render, text, messages, variables, judge.special_tokens_map, written), where, seconds=SECONDS
        )
        if is_hostile or any(message.get("tool_calls") for message in messages):
            continue
        try:
            expected = judge.apply_chat_template(messages, chat_template=text, tokenize=False, **variables)
        except Exception:  # noqa: BLE001 - whatever a damaged template does
            continue
        if [expected] != written:
            faults.append(f"{where}: transformers writes {expected!r:.200}, ours {written!r:.200}")
    return faults


_PIECES = re.compile(r"({%.*?%}|{{.*?}})", re.DOTALL)


def mutated(dice: random.Random, text: str) -> tuple[str, bool]:
    """A template with some pieces removed, doubled or exchanged; and whether a hostile one was put in."""
    pieces, is_hostile = _PIECES.split(text), dice.random() < 0.5
    for _ in range(dice.choice([0, 1, 2])):
        at, other = dice.randrange(len(pieces)), dice.randrange(len(pieces))
        how = dice.choice(["remove", "double", "exchange"])
        if how == "remove" and len(pieces) > 1:
            del pieces[at]
        elif how == "double":
            pieces.insert(at, pieces[at])
        else:
            pieces[at], pieces[other] = pieces[other], pieces[at]
    if is_hostile:
        pieces.insert(dice.randrange(len(pieces) + 1), dice.choice(HOSTILE))
    return "".join(pieces), is_hostile


def _judge_tokenizer() -> Any:
    from helpers.hf_folder import byte_level_tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), bos_token="<s>", eos_token="</s>")


def _render(text: str, messages: Any, variables: dict[str, Any], tokens: Any, written: list[str]) -> None:
    from levanter.data.chat import ChatTemplate

    template = ChatTemplate(text=text, tokens=dict(tokens))
    template.check()
    rendered, spans = template.render(messages, {k: v for k, v in variables.items() if v is not None}, "here")
    assert all(0 <= start <= stop <= len(rendered) for start, stop in spans), "spans outside of the text"
    written.append(rendered)
