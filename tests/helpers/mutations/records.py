"""Mutations of records: conversations and preferences with senseless values, from every kind of file."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from helpers.mutations.cases import Case, reading_faults

RECORDS = 16
"""Records of a case."""
SECONDS = 8.0


def records(dice: random.Random, here: Path) -> Case:
    """Records of conversations and preferences, encoded without a run."""
    return Case("records", "", (), (0,), judge=partial(judge_records, dice.randrange(2**32)))


def judge_records(seed: int, here: Path) -> list[str]:
    """Encodes drawn records; lists what is wrong."""
    from helpers.hf_folder import write_folder

    from levanter.compat.open import load_tokenizer

    dice, faults = random.Random(seed), list[str]()
    tokenizer = load_tokenizer(str(write_folder(here / "tokenizer")))
    for n in range(RECORDS):
        record = _drawn(dice)
        path = _write(record, here / f"record{n}", dice)
        content = path.read_bytes()
        where = f"seed {seed}, {path.name}: {content!r:.300}"
        faults += reading_faults(partial(_encode, path, dice.choice(_FORMATS), tokenizer), where, seconds=SECONDS)
    return faults


def _drawn(dice: random.Random) -> Any:
    """A record, most of them with senseless values in some places."""
    from helpers.chat_templates import TOOL, drawn_messages
    from helpers.drawn_requests import places, senseless

    messages = drawn_messages(dice)
    keys = {"messages": messages} if dice.random() < 0.5 else {
        "prompt": messages[:-1], "chosen": messages[-1:], "rejected": [{"role": "assistant", "content": "no"}]
    }  # fmt: skip
    record: Any = json.loads(json.dumps({**keys, "tools": [TOOL], "chat_template_kwargs": {"custom": 1}}))
    for _ in range(dice.choice([0, 1, 1, 2])):
        container, key = dice.choice(places(record))
        if dice.random() < 0.2 and isinstance(container, dict):
            container[dice.choice(["weight", "from", "value", "tool_calls", "role", "content", "name"])] = senseless(
                dice
            )
        else:
            container[key] = senseless(dice)
        if not places(record):
            break
    return record


def _write(record: Any, stem: Path, dice: random.Random) -> Path:
    """Writes a record to a file of a drawn kind; JSON lines where a table cannot hold it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = dice.choice(["jsonl", "jsonl", "json", "parquet", "arrow"])
    if kind in ("parquet", "arrow"):
        try:
            table = pa.Table.from_pylist([record])
            path = stem.with_suffix(f".{kind}")
            if kind == "parquet":
                pq.write_table(table, path)
            else:
                with pa.ipc.new_stream(path, table.schema) as writer:
                    writer.write_table(table)
            return path
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            kind = "jsonl"
    path = stem.with_suffix(f".{kind}")
    text = json.dumps([record] if kind == "json" else record, ensure_ascii=dice.random() < 0.7)
    path.write_bytes(text.encode("utf-8", "surrogatepass") + b"\n")
    return path


_FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"mask_user_turns": False},
    {"turns": "split"},
    {"turns": "last"},
    {"roles": {"human": "user"}, "system_prompt": "system"},
)
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def _encode(path: Path, keys: dict[str, Any], tokenizer: Any) -> None:
    """Reads a file and encodes its records as conversations and as preferences."""
    from levanter.data.conversations import ChatEncoder, chat_template
    from levanter.data.formats import ChatLmDatasetFormat, PreferenceChatLmDatasetFormat
    from levanter.data.preference import PairEncoder
    from levanter.data.readers import read_records

    for record in read_records(str(path)):
        value, _ = record
        if isinstance(value, dict) and "chosen" in value:
            pairs = PreferenceChatLmDatasetFormat(chat_template=_TEMPLATE)
            encoder = PairEncoder(format=pairs, template=chat_template(pairs, tokenizer), tokenizer=tokenizer, eos=2)
            encoder.chars(record)
            encoded = [side for pair in encoder.encode([record]) for side in (pair.chosen, pair.rejected)]
        else:
            chats = ChatLmDatasetFormat(chat_template=_TEMPLATE, **keys)
            chat = ChatEncoder(format=chats, template=chat_template(chats, tokenizer), tokenizer=tokenizer)
            chat.chars(record)
            encoded = chat.encode([record])
        for one in encoded:
            assert ((one.ids >= 0) & (one.ids < tokenizer.vocab_size)).all(), "ids beyond the vocabulary"
            assert one.weights is None or len(one.weights) == len(one.ids), "weights of another length"
