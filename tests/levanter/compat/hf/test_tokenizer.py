"""FastTokenizer against the tokenizers library and transformers on the same definition; byte counts against bytes."""

import json

import numpy as np
import pytest
from helpers.hf_folder import TEXTS, byte_level_tokenizer, write_folder, write_json
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from levanter.compat.hf.errors import CheckpointError, ConfigMismatchError, CorruptFileError, MissingCheckpointFileError
from levanter.compat.hf.export import tokenizer_documents
from levanter.compat.hf.token_bytes import byte_alphabet
from levanter.compat.hf.tokenizer import FastTokenizer, check_vocabulary
from levanter.compat.open import load_tokenizer
from levanter.data.tokenizer import Tokenizer as Protocol

SAMPLES = [*TEXTS, "", " ", "  leading and trailing  ", "1234 and 🤖🎉 emoji", "\t\r\n", "Ünïcödé ﬁ ½ ١٢٣", "日本 x"]


def metaspace_tokenizer(*, byte_fallback: bool = True) -> Tokenizer:
    """A Llama-2-like tokenizer: `▁` for spaces, bytes as tokens where characters are unknown."""
    built = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    special += [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=special, limit_alphabet=40)
    built.train_from_iterator(TEXTS * 4, trainer)
    definition = json.loads(built.to_str())
    # Byte tokens are part of the vocabulary only: text that spells one out is text.
    definition["added_tokens"] = [t for t in definition["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(definition))


def ours(built: Tokenizer, **roles) -> FastTokenizer:
    return FastTokenizer(json.loads(built.to_str()), name="made", **roles)


@pytest.fixture(scope="module", params=["byte level", "metaspace"])
def built(request) -> Tokenizer:
    return byte_level_tokenizer() if request.param == "byte level" else metaspace_tokenizer()


def test_ids_equal_those_of_transformers(built):
    theirs = PreTrainedTokenizerFast(tokenizer_object=built)
    found = ours(built)
    assert isinstance(found, Protocol)
    assert found.vocab_size == len(theirs) == built.get_vocab_size(with_added_tokens=True)
    batch = found.encode_batch(SAMPLES)
    assert all(ids.dtype == np.int32 for ids in batch)
    assert [ids.tolist() for ids in batch] == theirs(SAMPLES, add_special_tokens=False)["input_ids"]
    for text, ids in zip(SAMPLES, batch, strict=True):
        assert found.encode_with_offsets(text)[0].tolist() == ids.tolist()


def test_byte_level_text_comes_back(built):
    found = ours(built)
    for text, ids in zip(TEXTS, found.encode_batch(TEXTS), strict=True):
        assert found.decode(ids) == text == found.decode(ids.tolist())


def test_spans_cover_the_text_spaces_included():
    found = ours(byte_level_tokenizer())
    for text in SAMPLES:
        ids, spans = found.encode_with_offsets(text)
        assert spans.shape == (len(ids), 2)
        covered = {position for start, stop in spans for position in range(start, stop)}
        assert covered == set(range(len(text)))
        assert (spans[1:, 0] >= spans[:-1, 0]).all()
    # The post-processor in the definition trims spaces off spans; ours keeps them.
    spans = found.encode_with_offsets("the cat")[1].tolist()
    trimmed = byte_level_tokenizer().encode("the cat", add_special_tokens=False).offsets
    assert [3, 4] not in trimmed and any(start == 3 for start, _ in spans) and (3, 4) not in trimmed


def test_tokens_that_share_a_character_share_its_span():
    ids, spans = ours(byte_level_tokenizer()).encode_with_offsets("🤖")
    assert len(ids) > 1
    assert spans.tolist() == [[0, 1]] * len(ids)


def test_byte_lengths_add_up_to_the_utf8_length(built):
    found = ours(built)
    lengths = found.byte_lengths()
    assert lengths.dtype == np.int32 and lengths.shape == (found.vocab_size,)
    prefix = 1 if json.loads(built.to_str())["model"]["byte_fallback"] else 0
    for text, ids in zip(SAMPLES, found.encode_batch(SAMPLES), strict=True):
        expected = len(text.encode()) + (prefix if text else 0)
        assert lengths[ids].sum() == expected, text


def test_byte_lengths_of_single_tokens():
    found = ours(byte_level_tokenizer())
    lengths = found.byte_lengths()
    alphabet = byte_alphabet()
    raw = {i: bytes(alphabet[sign] for sign in found.token(i) or "") for i in range(3, found.vocab_size)}
    assert lengths.tolist() == [0, 0, 0] + [len(raw[i]) for i in range(3, found.vocab_size)]
    assert b"\xe6" in raw.values(), "a token that is part of a character"
    found = ours(metaspace_tokenizer())
    by_token = {found.token(i) or "": int(n) for i, n in enumerate(found.byte_lengths())}
    assert (by_token["<s>"], by_token["<0xE6>"], by_token["▁"]) == (0, 1, 1)
    assert all(n == len(token.replace("▁", " ").encode()) for token, n in by_token.items() if token[0] != "<")


def test_the_alphabet_is_that_of_the_tokenizers_library():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inverse = {byte: sign for sign, byte in byte_alphabet().items()}
    for text in SAMPLES:
        shown = "".join(piece for piece, _ in split.pre_tokenize_str(text))
        assert shown == "".join(inverse[byte] for byte in text.encode())


def test_added_tokens_count_their_text_and_special_ones_nothing():
    built = byte_level_tokenizer()
    built.add_tokens([AddedToken("→→", normalized=False)])
    built.add_special_tokens([AddedToken("<|end|>")])
    found = ours(built)
    ids = found.encode_batch(["a→→<|end|>"])[0]
    assert found.byte_lengths()[ids].tolist() == [1, 6, 0]
    assert found.decode(ids) == "a→→<|end|>"


def test_words_and_their_continuations():
    built = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.decoder = decoders.WordPiece()
    tokenizer = ours(built)
    assert [tokenizer.token_bytes(i) for i in (1, 2)] == [b" a", b"b"]
    counts = tokenizer.byte_counts("ab a", np.array([1, 2, 1]))
    assert counts is not None and counts.tolist() == [1, 1, 2]
    assert tokenizer.byte_counts("ab  a", np.array([1, 2, 1])) is None
    assert "WordPiece" in (tokenizer.lost_text(np.array([1])) or "")


def test_a_unigram_vocabulary():
    built = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("é", -2.0), ("▁", -3.0)], unk_id=0))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    assert ours(built).byte_lengths().tolist() == [5, 2, 2, 1]


def test_truncation_and_padding_of_the_definition_are_off():
    built = byte_level_tokenizer()
    whole = built.encode("the cat sat on the mat").ids
    built.enable_truncation(max_length=2)
    built.enable_padding(length=50)
    assert ours(built).encode_batch(["the cat sat on the mat"])[0].tolist() == whole


def test_the_hash_follows_the_definition_and_the_roles():
    one = ours(byte_level_tokenizer(), eos_id=2)
    assert one.hash == ours(byte_level_tokenizer(), eos_id=2).hash
    assert len(one.hash) == 64 and int(one.hash, 16)
    changed = byte_level_tokenizer()
    changed.add_tokens(["new"])
    assert len({one.hash, ours(changed, eos_id=2).hash, ours(byte_level_tokenizer(), eos_id=1).hash}) == 3


def test_loading_from_a_folder_with_its_special_tokens(tmp_path):
    write_folder(tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert (found.bos_id, found.eos_id, found.pad_id) == (1, 2, 0)
    assert found.name == str(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    found = load_tokenizer(str(tmp_path))
    assert (found.bos_id, found.eos_id, found.pad_id) == (None, None, None), "config.json names no special tokens"
    assert found.end_ids == (2,), "but it names ids that end a text"
    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "tokenizer.json").rename(alone / "tokenizer.json")
    assert load_tokenizer(str(alone / "tokenizer.json")).encode_batch(["the cat"])[0].tolist()
    with pytest.raises(MissingCheckpointFileError) as caught:
        load_tokenizer(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: there is no tokenizer (tokenizer.json); it has alone/tokenizer.json, config.json, "
        "model.safetensors"
    )


def test_the_chat_template_and_every_end_of_a_text(tmp_path):
    """A file wins over a key, of several templates the default one counts; ends are what any file says, eos first."""
    folder = write_folder(tmp_path / "model")
    assert load_tokenizer(str(folder)).chat_template is None and load_tokenizer(str(folder)).end_ids == (2,)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for given, found in (("one", "one"), (named, "d"), (named[:1], None), ([], None), (3, None)):
        write_json(folder / "tokenizer_config.json", {**settings, "chat_template": given})
        assert load_tokenizer(str(folder)).chat_template == found
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": named})
    assert load_tokenizer(str(folder)).chat_templates == {"tool_use": "t", "default": "d"}
    write_json(folder / "generation_config.json", {"eos_token_id": [5, 2, 5, 10**9, True, "x"]})
    (folder / "chat_template.jinja").write_text("file")
    found = load_tokenizer(str(folder))
    assert (found.chat_template, found.end_ids) == ("file", (2, 5))
    assert found.special_tokens == {"<pad>": 0, "<s>": 1, "</s>": 2}
    write_json(folder / "generation_config.json", {"eos_token_id": None})
    assert load_tokenizer(str(folder)).end_ids == (2,)


@pytest.mark.parametrize("rules", ["definition", "settings", "neither"])
def test_what_is_written_does_what_was_read(tmp_path, rules: str):
    """BOS before a text, whichever file says so, and the template: for whoever follows a tokenizer's own rules."""
    folder, written = write_folder(tmp_path / "read"), tmp_path / "written"
    written.mkdir()
    if rules == "definition":
        built = Tokenizer.from_file(str(folder / "tokenizer.json"))
        built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        built.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "{{ messages[0]['content'] }}", "tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"eos_token": "</s>", **({"add_bos_token": True} if rules == "settings" else {})}
    write_json(folder / "tokenizer_config.json", settings)
    read = load_tokenizer(str(folder))
    # Beside a tokenizer.json transformers 5 passes over `add_bos_token`.
    assert isinstance(read, FastTokenizer) and read.adds_bos == (rules == "definition")
    for name, document in tokenizer_documents(read).items():
        write_json(written / name, document)
    again = load_tokenizer(str(written))
    assert isinstance(again, FastTokenizer) and again.hash == read.hash
    assert (again.adds_bos, again.chat_template) == (read.adds_bos, read.chat_template)
    one, other = (PreTrainedTokenizerFast.from_pretrained(each) for each in (folder, written))
    assert other.chat_template == one.chat_template is not None
    for text in SAMPLES:
        assert other(text)["input_ids"] == one(text)["input_ids"]


def test_an_older_kind_of_tokenizer_goes_through_transformers(tmp_path):
    definition = json.loads(byte_level_tokenizer().to_str())
    write_json(tmp_path / "vocab.json", definition["model"]["vocab"])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in definition["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    write_json(tmp_path / "tokenizer_config.json", settings)
    found = load_tokenizer(str(tmp_path))
    assert (found.bos_id, found.eos_id) == (1, 2)
    plain = byte_level_tokenizer()
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2 keeps digits together
    assert found.encode_batch(["the café 12"])[0].tolist() == plain.encode("the café 12").ids


def test_tokenizer_files_that_cannot_be_read(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json: it is not UTF-8 JSON"):
        load_tokenizer(str(tmp_path))
    write_json(tmp_path / "tokenizer.json", {"a": 1})
    with pytest.raises(CorruptFileError, match=r"it is not a tokenizer\.json: it has no model"):
        load_tokenizer(str(tmp_path))
    write_json(tmp_path / "tokenizer.json", {"model": {"type": "Nonsense"}})
    with pytest.raises(CorruptFileError, match=r"it is not a tokenizer\.json \("):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"transformers cannot make one from the older files"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_is_larger_than_the_vocabulary():
    found = ours(byte_level_tokenizer())
    n = found.vocab_size
    check_vocabulary(found, n, where="config.json")
    check_vocabulary(found, n + 64, where="config.json")
    with pytest.raises(ConfigMismatchError) as caught:
        check_vocabulary(found, n - 2, where="m/config.json")
    assert str(caught.value) == (
        f"m/config.json: tokenizer made has {n} ids, the model's vocabulary {n - 2}: ids {n - 2} to {n - 1} have no "
        "embeddings\n  → use the tokenizer that belongs to the model"
    )
    with pytest.raises(ConfigMismatchError, match=f"special token ids eos {n} are outside its {n} ids"):
        ours(byte_level_tokenizer(), eos_id=n)


def test_a_post_processor_with_a_token_that_it_does_not_define():
    """The library panics there, which no `except Exception` sees."""
    document = json.loads(byte_level_tokenizer().to_str())
    template = [{"SpecialToken": {"id": "<t>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": template, "pair": template,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    with pytest.raises(CorruptFileError):
        FastTokenizer(document, name="x")
