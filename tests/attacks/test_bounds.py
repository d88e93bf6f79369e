# ruff: noqa: E501 - rows of tables
"""What would take minutes or gigabytes: every reader of what comes from outside has bounds, and says them."""

import gzip
import json
import resource
import struct
import tracemalloc
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table

from levanter.base import input_limits as bounds
from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import OutOfBoundsError, lines_bounded, read_bounded
from levanter.compat.gguf.file import open_gguf
from levanter.compat.hf.errors import CheckpointError
from levanter.config.yaml_nodes import compose, to_plain
from levanter.data.chat import ChatTemplate
from levanter.data.errors import DataError
from levanter.data.formats import TextLmDatasetFormat
from levanter.data.readers import read_documents
from levanter.data.template_sandbox import TookTooLong, time_limit
from levanter.io.paths import expand, expand_braces

BAD = 2
GIB = 1 << 20  # of `ru_maxrss`, which counts KiB


def document(text: str):
    """Words that name a document of this text."""

    def prepared(folder):
        (folder / "a.yaml").write_text(text)
        return ["--config_path", str(folder / "a.yaml")]

    return prepared


def evaluates(name: str, content: bytes, *more: str):
    """Words for an evaluation of a tiny model on a file."""

    def prepared(folder):
        (folder / name).write_bytes(content)
        text = (
            "model: {type: llama, max_seq_len: 64, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, "
        )
        text += "num_kv_heads: 2, vocab_size: 256}\ndata: {tokenizer: passthrough, vocab_size: 256, components: {a: {source: "
        text += "{type: url, validation_urls: ['" + str(folder / name) + "']}, format: {type: text}}}}\n"
        (folder / "a.yaml").write_text(text)
        return ["--config_path", str(folder / "a.yaml"), *more]

    return prepared


def weights(name: str, content: bytes, **config: object):
    """Words for an evaluation of a checkpoint with one file of this content."""

    def prepared(folder):
        (folder / name).write_bytes(content)
        known = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                 "num_hidden_layers": 2, "vocab_size": 64}  # fmt: skip
        if name != "config.json":
            (folder / "config.json").write_text(json.dumps({**known, **config}))
        return ["--hf_checkpoint", str(folder / name if name.endswith(".gguf") else folder)]

    return prepared


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(c)}: &{chr(c)} [{','.join(['*' + chr(c - 1)] * 9)}]\n" for c in range(ord("b"), ord("k"))
)
CLAIMS = b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(40)
TENSOR = (
    b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + struct.pack("<Q", 1)
    + b"w"
    + struct.pack("<IQIQ", 1, 2**60, 0, 0)
    + bytes(64)
)
ARRAY = (
    b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64)
)
ARRAYS = (
    b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + struct.pack("<Q", 1)
    + b"k"
    + struct.pack("<IIQ", 9, 9, 1)
    + struct.pack("<IQ", 9, 1) * 3000
)


def tensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


DEEP = "[" * 3000 + "]" * 3000
ATTACKS = [
    Attack(name="laughs", command="eval_lm", words=document(LAUGHS), code=BAD, says=("a.yaml", "more than 200,000 values")),
    Attack(name="merge-keys", command="train_lm", code=BAD, says=("more than 200,000 values",),
           words=document("a0: &a0 {x: 1, y: [" + "1," * 900 + "]}\n"
                          + "".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}\n" for i in range(1, 30)))),
    Attack(name="deep-document", command="eval_lm", words=document("a: " + DEEP), code=BAD, says=("more than 64 deep",)),
    Attack(name="deep-by-aliases", command="eval_lm", code=BAD, says=("more than 64 deep",),
           words=document("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 100)))),
    Attack(name="unknown-keys", command="eval_lm", code=BAD, says=("problems in the configuration", "(100 are shown)"),
           words=document("".join(f"hf_checkpoint{i}: 1\n" for i in range(50_000))), seconds=40),
    Attack(name="long-key", command="eval_lm", code=BAD, says=("unknown key",), words=document("? " + "k" * 1_000_000 + "\n: 1\n"), seconds=40),
    Attack(name="large-document", command="eval_lm", code=BAD, says=("a.yaml: more than 4 MiB, the limit",),
           words=document("# " + "x" * 5_000_000)),
    Attack(name="endless-document", command="eval_lm", code=BAD, says=("/dev/zero: more than 4 MiB",),
           words=["--config_path", "/dev/zero"]),
    Attack(name="many-includes", command="eval_lm", code=BAD, says=("more than 256 files",),
           words=lambda folder: ["--config_path", str(includes(folder))]),
    Attack(name="long-rows", command="eval_lm", words=evaluates("a.txt", b"1 2", "--max_eval_length", "1" + "0" * 20),
           code=BAD, says=("command line: max_eval_length: must be from 1 to 2147483647",)),
    Attack(name="endless-braces", command="eval_lm", code=BAD, says=("{0..99999999999}", "more than 200,000 files"),
           words=evaluates("a{0..99999999999}.txt", b"1")),
    Attack(name="deep-braces", command="eval_lm", code=BAD, says=("nested more than 32 deep",),
           words=evaluates("{" * 99 + "}" * 99, b"1")),
    Attack(name="deep-jsonl", command="eval_lm", words=evaluates("a.jsonl", b'{"text": "1", "x": ' + DEEP.encode() + b"}\n"),
           code=BAD, says=("a.jsonl:1: ", "more than 256 deep")),
    Attack(name="deep-json", command="eval_lm", words=evaluates("a.json", DEEP.encode()), code=BAD, says=("more than 256 deep",)),
    Attack(name="long-number", command="eval_lm", words=evaluates("a.jsonl", b'{"text": ' + b"9" * 9999 + b"}\n"), code=BAD,
           says=("a.jsonl:1: a number is longer",)),
    Attack(name="gguf-counts", command="eval_lm", words=weights("a.gguf", CLAIMS), code=BAD, says=("claims 1,152,921,",)),
    Attack(name="gguf-tensor", command="eval_lm", words=weights("a.gguf", TENSOR), code=BAD, says=("more than a file of this",)),
    Attack(name="gguf-array", command="eval_lm", words=weights("a.gguf", ARRAY), code=BAD, says=("values of an array",)),
    Attack(name="gguf-arrays", command="eval_lm", words=weights("a.gguf", ARRAYS), code=BAD, says=("more than 4 deep",)),
    Attack(name="safetensors-length", command="eval_lm", words=weights("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
           code=BAD, says=("claims to be 1152921504606846976 bytes",)),
    Attack(name="safetensors-shape", command="eval_lm", code=BAD, says=("model.safetensors", "bytes"),
           words=weights("model.safetensors", tensors(
               b'{"a":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}'))),
    Attack(name="safetensors-deep", command="eval_lm", words=weights("model.safetensors", tensors(DEEP.encode())), code=BAD,
           says=("more than 256 deep",)),
    Attack(name="config-json-deep", command="eval_lm", words=weights("config.json", b'{"model_type": ' + DEEP.encode() + b"}"),
           code=BAD, says=("config.json", "more than 256 deep")),
    Attack(name="config-json-number", command="eval_lm", words=weights("config.json", b'{"hidden_size": ' + b"9" * 9999 + b"}"),
           code=BAD, says=("config.json", "a number is longer")),
    Attack(name="config-json-huge", command="eval_lm", words=weights("model.safetensors", tensors(b"{}"), hidden_size=10**30),
           code=BAD, says=("hidden_size", "must be from 1 to 2147483647")),
]  # fmt: skip


def includes(folder):
    """Files that each include the next one twice: 2³⁰ readings."""
    for i in range(30):
        (folder / f"{i}.yaml").write_text(f"a: !include {i + 1}.yaml\nb: !include {i + 1}.yaml\n")
    (folder / "30.yaml").write_text("x: 1\n")
    return folder / "0.yaml"


@pytest.mark.parametrize(
    "attack", table(ATTACKS, in_make_test=["laughs", "deep-document", "endless-braces", "gguf-counts", "deep-jsonl"])
)
def test_it_is_refused_before_it_costs_anything(attack, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    judge(attack, strike(attack, tmp_path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB


TEMPLATES = [
    ("{{ 'a' * 10**12 }}", "characters"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}", "characters"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}", "characters"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
     "{% set ns.x = t %}{% endfor %}", "characters"),
    ("{% set ns = namespace(x=[1, 2]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "items"),
    ("{{ [0] * 10**9 }}", "items"),
    ("{{ 10 ** (10 ** 10) }}", "bits"),
    ("{{ 'a' | center(10**10) }}", "limit for a template"),
    ("{{ 'a'.ljust(10**10) }}", "limit for a template"),
    ("{{ '{:>9999999999}'.format(1) }}", "width"),
    ("{{ '%9999999999d' % 1 }}", "width"),
    ("{{ 'aaaa'.replace('a', 'b' * 9999999) }}", "characters"),
    ("{% set l = ['x' * 9999999] * 99999 %}{{ l | join }}", "characters"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "endlessly"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
    ("{% for m in messages %}{{ lipsum(n=99999) }}{% endfor %}", "undefined"),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deep"),
    ("{% if 1 %}" * 200 + "{% endif %}" * 200, "nested too deep"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), TEMPLATES)
def test_templates_neither_multiply_nor_run_for_ever(text: str, says: str, monkeypatch):
    # What is refused for its size is refused for that on a slow machine too.
    monkeypatch.setattr("levanter.data.template_sandbox.TEMPLATE_SECONDS", 1.0 if says == "more than 1 s" else 100.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(text=text, tokens={"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(DataError, match=says):
        template.render([{"role": "user", "content": "x"}], {}, "a.jsonl:1")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB


def test_ordinary_templates_are_what_they_were():
    text = (
        "{{ bos_token }}{% for m in messages %}{{ loop.index ~ ': ' ~ m.role | upper + '\\n' }}{{ m['content'] | trim }}"
        "{{ '-' * 3 }}{{ '%s/%d' % ('a', 2) }}{{ 'x,y'.split(',') | join('+') }}{{ {'k': 1} | tojson }}"
        "{{ 'aXbX'.replace('X', 'yy') }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ '{}|{:>3}'.format(1, 2) }}\n{% endfor %}"
    )
    rendered, spans = ChatTemplate(text=text, tokens={"bos_token": "<s>", "eos_token": ""}).render(
        [{"role": "user", "content": " hi "}], {}, "a"
    )
    assert rendered == '<s>1: USER\nhi---a/2x+y{"k": 1}ayybyy[1, 2]10241|  2\n' and spans == []


def test_what_is_within_the_bounds_is_read():
    assert parse_json("[" * 250 + "]" * 250) and parse_json('{"a": "' + "[" * 999 + '"}') == {"a": "[" * 999}
    with open(__file__, "rb") as file:
        assert b"".join(lines_bounded(file, where="a")) == Path(__file__).read_bytes()
    problems = []
    node = compose("a: " + "[" * 60 + "]" * 60, "x", problems, lambda *_: None)
    assert node is not None and not problems and to_plain(node)
    assert len(list(expand_braces("{0..199999}"))) == 200_000
    with pytest.raises(OutOfBoundsError, match="200,000"):
        expand("{0..9999}{0..9999}")


def test_reading_stops_at_the_bound(monkeypatch, tmp_path):
    with open("/dev/zero", "rb") as endless, pytest.raises(OutOfBoundsError, match="x: more than 2 MiB"):
        read_bounded(endless, 2 << 20, where="x")
    monkeypatch.setattr(bounds, "RECORD_BYTES", 1 << 20)
    with open("/dev/zero", "rb") as endless, pytest.raises(OutOfBoundsError, match="x:1: a line has more than 1 MiB"):
        next(lines_bounded(endless, where="x"))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_compressed_bomb_is_not_held(ending: str, tmp_path, monkeypatch):
    import zstandard

    monkeypatch.setattr("levanter.data.readers.RECORD_BYTES", 16 << 20)
    monkeypatch.setattr(bounds, "RECORD_BYTES", 16 << 20)
    path = tmp_path / f"a.txt.{ending}"
    if ending == "gz":
        path.write_bytes(gzip.compress(bytes(64 << 20)))
    else:
        path.write_bytes(zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28)))
        assert path.stat().st_size < 1 << 17
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for documents in ("file", "line"):
        with pytest.raises(DataError, match="more than 16 MiB"):
            list(read_documents(str(path), TextLmDatasetFormat(txt_documents=documents)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB


@pytest.mark.parametrize("content", [CLAIMS, TENSOR, ARRAY, ARRAYS, CLAIMS[:20], b"GGUF"])
def test_nothing_is_allocated_for_what_a_header_claims(content: bytes, tmp_path):
    (tmp_path / "a.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="damaged or truncated"):
            open_gguf(tmp_path / "a.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def endless():
    with time_limit(0.2):
        while True:
            pass


def test_a_time_limit_ends_python_code_and_nothing_after_it():
    with pytest.raises(TookTooLong):
        endless()
    with time_limit(60):
        assert sum(range(1000)) == 499500
    for _ in range(1000):  # nothing is raised late
        sum(range(1000))
