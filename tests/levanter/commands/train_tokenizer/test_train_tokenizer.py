"""`train_tokenizer`: merges, files, report, refusals. Judges: rustbpe, tiktoken, transformers, brute force."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train_tokenizer import train_tokenizer
from levanter.commands.train_tokenizer.train_tokenizer import TrainTokenizerConfig, main
from levanter.compat.hf.bpe_training import BpeSpecification, train_bpe
from levanter.compat.hf.nanochat_tokens import CHAT_TEMPLATE, PATTERN, SPECIAL_TOKENS
from levanter.compat.hf.token_bytes import byte_alphabet
from levanter.compat.open import load_tokenizer
from levanter.data.documents import python_docs_text

PROSE = (
    "The the then them, they're; thereby 12345 67 890. It's we'll I'VE\n\n  over  and  over\r\n\tÜber naïve 你好 🌍 "
)
TIES = "ab cd ab cd ef ef gh gh aaaa aaa bbbb"


def trained_merges(texts, vocab_size):
    specification = BpeSpecification(
        vocab_size=vocab_size, pattern=PATTERN, special_tokens=SPECIAL_TOKENS, bos=SPECIAL_TOKENS[0]
    )
    definition = train_bpe(iter(texts), specification)
    alphabet = byte_alphabet()
    ids = sorted(definition["model"]["vocab"].items(), key=lambda entry: entry[1])
    assert [number for _, number in ids] == list(range(vocab_size - len(SPECIAL_TOKENS)))
    return [bytes(alphabet[sign] for sign in token) for token, _ in ids]


def brute_force_merges(texts, merges):
    """BPE by definition: count all pairs anew for every merge; ties go to the smaller ids."""
    words = Counter(piece for text in texts for piece in regex.findall(PATTERN, text))
    words = [(list(word.encode()), count) for word, count in words.items()]
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(merges):
        pairs = Counter()
        for ids, count in words:
            for pair in pairwise(ids):
                pairs[pair] += count
        first, second = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
        for ids, _ in words:
            place = 0
            while place < len(ids) - 1:
                if (ids[place], ids[place + 1]) == (first, second):
                    ids[place : place + 2] = [len(tokens)]
                place += 1
        tokens.append(tokens[first] + tokens[second])
    return tokens


@pytest.mark.parametrize("text", [PROSE, TIES, python_docs_text(4000)], ids=["prose", "ties", "docs"])
def test_merges_are_those_of_brute_force(text):
    merges = {PROSE: 25, TIES: 8}.get(text, 150)
    assert trained_merges([text], 265 + merges) == brute_force_merges([text], merges)


@pytest.mark.parametrize(
    ("texts", "size"),
    [
        ([PROSE * 3, TIES], 300),
        ([python_docs_text(150_000)], 2048),
        ([Path(module.__file__).read_text() for module in (json, subprocess, os)], 1500),
    ],
    ids=["small", "docs", "code"],
)
def test_merges_are_those_of_rustbpe(texts, size):
    rustbpe = pytest.importorskip("rustbpe")
    judge = rustbpe.Tokenizer()
    judge.train_from_iterator(iter(texts), size - len(SPECIAL_TOKENS), pattern=PATTERN)
    ranks = sorted(judge.get_mergeable_ranks(), key=lambda entry: entry[1])
    # Ties included: the bytes have the same ids in both.
    assert trained_merges(texts, size) == [bytes(token) for token, _ in ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [python_docs_text()[start : start + 5000] for start in range(0, 60_000, 5000)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def words(folder, name="made", **more):
    components = {"docs": {"source": {"train_urls": [f"{folder}/text.jsonl"]}}}
    keys = {"data.components": json.dumps(components), "vocab_size": 600, "output_path": f"{folder}/{name}", **more}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def run(*arguments):
    return run_entry_point(TrainTokenizerConfig, main, list(arguments))


@pytest.fixture(scope="module")
def made(folder):
    assert run(*words(folder)) == 0
    return folder / "made"


def test_transformers_and_tiktoken_give_the_same_ids(made):
    ours = load_tokenizer(str(made))
    assert (ours.vocab_size, ours.bos_id) == (600, 591)
    assert list(ours.special_tokens) == list(SPECIAL_TOKENS)
    texts = [PROSE, TIES, python_docs_text(3000), "\x00\x1c\x85 \u2028x", ""]
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(made))
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids.tolist()
        assert theirs(text)["input_ids"] == [ours.bos_id, *ids.tolist()]
        assert ours.decode(ids) == text
    tiktoken = pytest.importorskip("tiktoken")
    definition = json.loads((made / "tokenizer.json").read_text())
    alphabet = byte_alphabet()
    ranks = {bytes(alphabet[s] for s in token): rank for token, rank in definition["model"]["vocab"].items()}
    encoding = tiktoken.Encoding(
        "made", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(ours.special_tokens)
    )
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert encoding.encode_ordinary(text) == ids.tolist()
    lengths = json.loads((made / "token_bytes.json").read_text())
    assert lengths == [len(encoding.decode_single_token_bytes(i)) if i < 591 else 0 for i in range(600)]


def rendered(tokenizer, messages):
    """nanochat's rendering by its description: ids, and which of them are trained on."""
    special, ids, mask = tokenizer.special_tokens, [tokenizer.bos_id], [0]

    def add(part, counted):
        part = [special[part]] if part in special else tokenizer.encode_batch([part])[0].tolist()
        ids.extend(part)
        mask.extend([counted] * len(part))

    if messages[0]["role"] == "system":
        merged = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        messages = [{"role": "user", "content": merged}, *messages[2:]]
    for message in messages:
        if message["role"] == "user":
            for part in ("<|user_start|>", message["content"], "<|user_end|>"):
                add(part, 0)
            continue
        add("<|assistant_start|>", 0)
        parts = message["content"]
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            if part["type"] == "text":
                add(part["text"], 1)
            else:
                name, counted = ("output", 0) if part["type"] == "python_output" else ("python", 1)
                for piece in (f"<|{name}_start|>", part["text"], f"<|{name}_end|>"):
                    add(piece, counted)
        add("<|assistant_end|>", 1)
    return ids, mask


CONVERSATIONS = [
    [{"role": "user", "content": "What is 2+3?"}, {"role": "assistant", "content": "It is 5."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": " Bye "},
        {"role": "assistant", "content": " So long\n"},
    ],
    [
        {"role": "user", "content": "6 * 7?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see. "},
                {"type": "python", "text": "6*7"},
                {"type": "python_output", "text": "42"},
                {"type": "text", "text": "It is 42."},
            ],
        },
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["plain", "system", "python"])
def test_conversations_are_rendered_as_nanochat_does(made, messages):
    from levanter.data.assistant_mask import MaskedTemplate
    from levanter.data.chat import ChatTemplate

    tokenizer = load_tokenizer(str(made))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    template = ChatTemplate(text=CHAT_TEMPLATE)
    text, _ = template.render(messages, {}, "test")
    ids, mask = rendered(tokenizer, messages)
    assert tokenizer.encode_batch([text])[0].tolist() == ids
    masked = MaskedTemplate(template=template, tokenizer=tokenizer).assistant(messages, {}, "test")
    np.testing.assert_array_equal(masked.ids, ids)
    np.testing.assert_array_equal(masked.counted, np.array(mask, bool))
    prompt, _ = template.render(messages[:-1], {"add_generation_prompt": True}, "test")
    assert text.startswith(prompt) and prompt.endswith("<|assistant_start|>")


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "assistant", "content": "x"}], "message 1 is of assistant"),
        ([{"role": "system", "content": "x"}], "must be followed by a message of the user"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "image"}]}], "not image"),
    ],
)
def test_conversations_of_another_shape_are_refused(messages, problem):
    from levanter.data.chat import ChatTemplate

    with pytest.raises(ValueError, match=problem):
        ChatTemplate(text=CHAT_TEMPLATE).render(messages, {}, "test")


FILES = ("tokenizer.json", "tokenizer_config.json", "token_bytes.json", "report.json")


def test_a_second_run_writes_the_same_bytes(folder, made):
    assert run(*words(folder, "again")) == 0
    same = {name: (made / name).read_bytes() for name in FILES}
    assert sorted(os.listdir(made)) == sorted(FILES)
    for name in FILES:
        assert (folder / "again" / name).read_bytes() == same[name], name


def test_a_failed_write_leaves_no_folder(folder, made, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_tokenizer.FastTokenizer, "byte_lengths", fail)
    assert run(*words(folder, "failed")) == 2
    assert not (folder / "failed").exists()
    monkeypatch.undo()
    assert run(*words(folder, "failed")) == 0
    assert (folder / "failed" / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    # It exists now, and is replaced only on request.
    assert run(*words(folder, "failed")) == 2
    assert "it exists already" in capsys.readouterr().err
    assert run(*words(folder, "failed", overwrite="true")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("line", ["reading text", "merges from"])
def test_a_killed_run_leaves_no_folder(folder, made, line):
    """Killed while it reads, and while it measures; the next run takes the folder over and writes the same bytes."""
    name = f"killed-{len(line)}"
    command = [sys.executable, "-u", "-m", "levanter.main.train_tokenizer", *words(folder, name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert any(line in output for output in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / name).exists()
    assert run(*words(folder, name)) == 0
    for file in FILES:
        assert (folder / name / file).read_bytes() == (made / file).read_bytes()


def test_the_report_compares_with_another_tokenizer(folder, made, capsys):
    small = words(folder, "small", vocab_size=300, compare=made)
    assert run(*small) == 0
    report = json.loads((folder / "small" / "report.json").read_text())
    rows = {row["kind"]: row for row in report["compression"]}
    assert {"English", "code", "numbers", "Korean", "docs (trained on)"} <= rows.keys()
    ours, theirs = load_tokenizer(str(folder / "small")), load_tokenizer(str(made))
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    row = rows["docs (trained on)"]
    assert row["bytes"] == sum(len(text.encode()) for text in texts)
    assert row["tokens"] == sum(map(len, ours.encode_batch(texts)))
    assert row["compared_tokens"] == sum(map(len, theirs.encode_batch(texts)))
    assert row["bytes_per_token"] == pytest.approx(row["bytes"] / row["tokens"], abs=1e-4)
    assert "difference" in capsys.readouterr().out


def test_limits_are_shared_by_the_sets(folder, capsys):
    for name, count in (("long", 40), ("short", 2)):
        (folder / f"{name}.jsonl").write_text((json.dumps({"text": f"{name} words, " * 100}) + "\n") * count)
    sets = {name: {"source": {"train_urls": [f"{folder}/{name}.jsonl"]}} for name in ("short", "long")}
    limits = {"max_chars": 20_000, "max_document_chars": 500, "vocab_size": 270, "data.components": json.dumps(sets)}
    assert run(*words(folder, "limited", **limits)) == 0
    report = json.loads((folder / "limited" / "report.json").read_text())
    # Two short documents of 500 characters, then every long one, because the short set left its share.
    assert (report["characters"], report["documents"], report["documents_cut"]) == (20_000, 40, 40)
    assert "longer documents were cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"vocab_size": 264}, "at least 265"),
        ({"vocab_size": 100_000}, "set vocab_size to at most"),
        ({"vocab_size": 1 << 23}, "the largest"),
        ({"vocab_siz": 300}, "vocab_size"),
        ({"compare": "no/such/folder.json"}, "no/such/folder.json"),
        ({"data.components": "{}"}, "no data set"),
        ({"data.components": '{a: {source: {train_urls: ["FOLDER/txt.jsonl"]}}}'}, "text.jsonl"),
        ({"data.components": '{a: {source: {train_urls: ["FOLDER/empty.jsonl"]}}}'}, "the training text is empty"),
        ({"data.components": '{a: {source: {train_urls: ["FOLDER/text.jsonl"]}, format: {type: chat}}}'}, "chat"),
        ({"data.components": '{a: {source: {train_urls: ["FOLDER/bad.jsonl"]}}}'}, "bad.jsonl:1: not JSON"),
        ({"output_path": "FOLDER/text.jsonl"}, "exists already"),
    ],
)
def test_bad_input(folder, more, problem, capsys):
    (folder / "empty.jsonl").write_text('{"text": ""}\n')
    (folder / "bad.jsonl").write_text("not JSON\n")
    more = {
        key: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value for key, value in more.items()
    }
    assert run(*words(folder, "bad", **more)) == 2
    assert problem in capsys.readouterr().err
    assert not (folder / "bad").exists()
