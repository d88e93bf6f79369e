"""Chat templates in the styles of published ones, and drawn conversations with tools, documents and reasoning."""

import importlib.util
import random
from pathlib import Path
from typing import Any

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATES = {
    "plain": PLAIN + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # Names of tokens that the tokenizer may not have.
    "tokens": "{{ bos_token }}{{ pad_token if pad_token is defined }}{{ unk_token|default('none') }}" + PLAIN,
    "concatenates": "{% set text = eos_token + '!' %}{{ text }}" + PLAIN,
    # As Llama 3.1 does.
    "tools is not none": "{% if not tools is defined %}UNDEFINED{% endif %}{% if tools is not none %}"
    "{{ tools | tojson(indent=4) }}{% endif %}{% if documents %}{{ documents[0].text }}{% endif %}" + PLAIN,
    # As GLM and MiniMax do.
    "tojson": "{% for t in tools or [] %}{{ t | tojson(ensure_ascii=False, sort_keys=true) }}"
    "{{ t.function | tojson(separators=(',', ':')) }}{{ t | tojson(ensure_ascii=true) }}{% endfor %}" + PLAIN,
    "documents": "{% if documents is none %}no documents{% else %}{% for d in documents %}{{ d.title }}: {{ d.text }}"
    "{% endfor %}{% endif %}" + PLAIN,
    # As DeepSeek and gpt-oss do.
    "reasoning": "{% for m in messages %}{{ m.role }}{% if m.reasoning_content is defined %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.thinking }}{{ m.content }}{% endfor %}",
    "null": "{% for m in messages %}{{ m.role }}:{{ m.name is defined }}{{ m.tool_calls is defined }}"
    "{% if 'content' in m %}{{ m.content }}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n > 2 %}"
    "{% break %}{% endif %}{{ ns.n }}{{ m.content }}{% endfor %}{{ dict(a=1)['a'] }}",
    "strips": "{%- for m in messages -%}\n  {{- m['content'] | trim -}}\n  {% endfor %}\n{{ 'x' if custom else 'y' }}",
    "refuses": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN,
    "marks": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
}
NAMED = [
    {"name": "default", "template": TEMPLATES["plain"]},
    {"name": "tool_use", "template": "{{ tools | tojson }}" + TEMPLATES["plain"]},
    {"name": "rag", "template": TEMPLATES["documents"]},
]
TOOL = {"type": "function", "function": {"name": "größe", "description": "<b> & é", "parameters": {"type": "object"}}}
DOCUMENTS = [{"title": "one", "text": "a river"}, {"title": "two", "text": "low stones"}]


def drawn_messages(rng: random.Random) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": "then"}] if rng.random() < 0.6 else []
    answer = rng.choice(
        [
            {"role": "assistant", "content": "the value", "name": None, "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w", "arguments": {"é": 1}}}]},
            {"role": "assistant", "content": "low", rng.choice(["reasoning_content", "thinking", "reasoning"]): "so"},
        ]
    )
    return [*first, {"role": "user", "content": rng.choice(["of a", " 日本語 "])}, answer]


def published_templates() -> dict[str, str]:
    """The templates that trl has, as their authors published them; none without trl."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
