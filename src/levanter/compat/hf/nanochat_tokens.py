"""nanochat's tokenizer: the pattern that cuts text into pieces, the special tokens, and the conversation as text.

Facts from karpathy/nanochat (92d63d4). The pattern is GPT-4's, except that a number is cut into pieces of at most two
digits instead of three, which leaves more of a small vocabulary to words. A conversation is

    <|bos|><|user_start|>…<|user_end|><|assistant_start|>…<|assistant_end|>

A system message becomes the beginning of the first user message, two newlines before the rest. An answer may consist of
parts: text, Python that it runs (between `<|python_start|>` and `<|python_end|>`), and what that printed (between
`<|output_start|>` and `<|output_end|>`), which does not count in the loss.
"""

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"  # a contraction
    r"|[^\r\n\p{L}\p{N}]?+\p{L}+"  # a word, with the sign or space before it
    r"|\p{N}{1,2}"  # digits by two
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*"  # signs, with the space before and the line ends behind them
    r"|\s*[\r\n]|\s+(?!\S)|\s+"  # white space; the space before a word belongs to the word
)
BOS = "<|bos|>"
USER_START, USER_END = "<|user_start|>", "<|user_end|>"
ASSISTANT_START, ASSISTANT_END = "<|assistant_start|>", "<|assistant_end|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
OUTPUT_START, OUTPUT_END = "<|output_start|>", "<|output_end|>"
SPECIAL_TOKENS = (
    BOS, USER_START, USER_END, ASSISTANT_START, ASSISTANT_END, PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END,
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages else none -%}
{%- set has_system = first is not none and first.role == 'system' -%}
{%- set turns = messages[1:] if has_system else messages -%}
{%- if has_system and (not turns or turns[0].role != 'user') -%}
{{- raise_exception('a system message must be followed by a message of the user') -}}
{%- endif -%}
{{- '<|bos|>' -}}
{%- for message in turns -%}
{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{- raise_exception('messages must alternate between user and assistant, the user first; message '
    ~ loop.index ~ ' is of ' ~ message.role) -}}
{%- endif -%}
{%- if message.role == 'user' -%}
{%- if message.content is not string -%}
{{- raise_exception('the content of a user message must be a text') -}}
{%- endif -%}
{{- '<|user_start|>' ~ (first.content ~ '\\n\\n' if loop.first and has_system else '') ~ message.content
    ~ '<|user_end|>' -}}
{%- else -%}
{{- '<|assistant_start|>' -}}
{%- if message.content is string -%}
{%- generation -%}{{- message.content ~ '<|assistant_end|>' -}}{%- endgeneration -%}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{%- generation -%}{{- part.text -}}{%- endgeneration -%}
{%- elif part.type == 'python' -%}
{%- generation -%}{{- '<|python_start|>' ~ part.text ~ '<|python_end|>' -}}{%- endgeneration -%}
{%- elif part.type == 'python_output' -%}
{{- '<|output_start|>' ~ part.text ~ '<|output_end|>' -}}
{%- else -%}
{{- raise_exception('a part of an answer is of type text, python or python_output, not ' ~ part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- generation -%}{{- '<|assistant_end|>' -}}{%- endgeneration -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""
"""A conversation as text. Its marks (`generation`) are the tokens that nanochat trains on: each answer with its end."""
