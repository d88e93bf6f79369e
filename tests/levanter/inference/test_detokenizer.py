"""Text that grows by tokens: what is streamed is what decoding gives, and texts end where they are told to."""

import itertools
import json
import random

import pytest
from helpers.drawn_tokenizers import build, drawn_text
from helpers.small_byte_level import END, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data.incremental_detokenizer import REPLACEMENT, WindowStream
from levanter.data.passthrough import PassthroughTokenizer
from levanter.inference.detokenizer import ChoiceText, StopStrings

pytestmark = pytest.mark.quick

TEXT = "Naïve café: 日本語のテキスト, 😀👩‍👩‍👧‍👦🇯🇵 and  two spaces.\n\nAlice: Hi!\tÅ ﬁ \u00a0x"


def byte_fallback(*, strip: bool) -> FastTokenizer:
    """Pieces as SentencePiece writes them; what has no piece is single bytes."""
    pieces = ["<unk>", "▁", "▁▁", "a", "n", "d", "▁and", "é", "日", "�", "l", "i", "c", "e", "A", ":", ".", "\n"]
    vocabulary = {piece: n for n, piece in enumerate(pieces + [f"<0x{byte:02X}>" for byte in range(256)])}
    merges = [("▁", "▁")]
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    built.add_special_tokens([AddedToken(END, special=True)])
    return FastTokenizer(json.loads(built.to_str()), name="pieces")


def metaspace() -> FastTokenizer:
    """The decoder that drops the space that was put before a text."""
    vocabulary = {piece: n for n, piece in enumerate(["<unk>", "▁", "▁a", "a", "▁▁", "b"])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "▁")], unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    built.decoder = decoders.Metaspace(prepend_scheme="always")
    return FastTokenizer(json.loads(built.to_str()), name="metaspace")


TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(strip=False),
    "byte fallback, stripped": byte_fallback(strip=True),
    "metaspace": metaspace(),
    "numbers": PassthroughTokenizer(20),
}


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.finish()]


def decoded(tokenizer, ids):
    """All at once, without special tokens."""
    special = [i for i in ids if isinstance(tokenizer, FastTokenizer) and tokenizer.token(i) == END]
    return tokenizer.decode([i for i in ids if i not in special])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_what_is_streamed_is_what_decoding_gives(name, data):
    """For any ids at all: half characters, wrong bytes, spaces at the beginning, special tokens in between."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(streamed(tokenizer, ids)) == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@given(text=st.text(st.sampled_from("a日é😀 \n\ufffd👩‍👧"), max_size=20))
def test_streams_of_texts(name, text):
    tokenizer = TOKENIZERS[name]
    if name == "byte fallback":
        text = text.replace(" ", "▁")  # there is no normalizer
    (ids,) = tokenizer.encode_batch([text])
    assert "".join(streamed(tokenizer, ids.tolist())) == text.replace("▁", " ")


def test_no_half_character_is_given():
    tokenizer = TOKENIZERS["byte level"]
    (ids,) = tokenizer.encode_batch([TEXT])
    pieces = streamed(tokenizer, ids.tolist())
    assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces)
    # "😀" is four bytes, in three tokens: nothing, nothing, all of it.
    (ids,) = tokenizer.encode_batch(["😀!"])
    assert streamed(tokenizer, ids.tolist()) == ["", "", "😀", "!", ""]


def test_a_text_that_ends_in_half_a_character():
    tokenizer = TOKENIZERS["byte level"]
    (ids,) = tokenizer.encode_batch(["a😀"])
    assert streamed(tokenizer, ids.tolist()[:-1]) == ["a", "", "", "\ufffd"]


def test_a_wrong_byte_takes_back_nothing_that_was_given():
    """A run of bytes is given when it ends: a wrong byte at its end would make all of it unreadable."""
    tokenizer = TOKENIZERS["byte fallback"]
    byte = {b: tokenizer._tokenizer.token_to_id(f"<0x{b:02X}>") for b in "語".encode()}
    ids = [byte[b] for b in "語".encode()]
    a = tokenizer._tokenizer.token_to_id("a")
    assert streamed(tokenizer, [*ids, a]) == ["", "", "", "語a", ""]
    assert streamed(tokenizer, ids) == ["", "", "", "語"]
    assert "".join(streamed(tokenizer, [*ids, ids[0], a])) == tokenizer.decode([*ids, ids[0], a]) == "����a"


def test_special_tokens_are_no_text():
    tokenizer = TOKENIZERS["byte level"]
    special = tokenizer._tokenizer.token_to_id(END)
    (ids,) = tokenizer.encode_batch(["😀"])
    assert "".join(streamed(tokenizer, [special, ids[0], special, *ids[1:], special])) == "😀"
    assert tokenizer.decode([special]) == END


def test_a_decoder_that_changes_its_mind_is_not_followed():
    """What was given stays given, and the rest is given where the text begins as it did."""
    texts = {(1,): "a", (1, 2): "b", (1, 2, 3): "abc"}
    stream = WindowStream(lambda ids: texts.get(tuple(ids), "a"))
    assert [stream.push(1), stream.push(2), stream.push(3)] == ["a", "", "bc"]


def words(*pieces):
    """A stream of ready-made pieces, by their index."""

    class Pieces:
        def push(self, id):
            return pieces[id]

        def finish(self):
            return ""

    return Pieces()


def text_of(pieces, *, limit=99, **more):
    """What is given for each piece, and how the text ends."""
    text = ChoiceText(words(*pieces), **({"stops": (), "stop_ids": (), "limit": limit} | more))
    given = [text.push(n) for n in range(len(pieces))]
    last = next((one for one in given if one.reason is not None), None)
    return [one.text for one in given], last


class TestStopStrings:
    def test_text_before_a_stop_in_the_same_token_is_given(self):
        """llama.cpp #9867: with `stop: ["\\n"]` and a token `?\\n` the question mark was lost when streaming."""
        given, last = text_of([" the", " planet", " Mars", "?\n", "Alice"], stops=["\n"])
        assert given == [" the", " planet", " Mars", "?", ""] and (last.reason, last.matched) == ("stop", "\n")

    def test_text_that_turns_out_to_be_no_stop_is_given_once(self):
        """llama.cpp #10914: with `stop: ["\\n", "Alice:"]` the token ` Alice` was given a second time with the next."""
        given, last = text_of([" Alice", "!", " Bob"], stops=["\n", "Alice:"])
        assert given == [" ", "Alice!", " Bob"] and last is None

    def test_a_stop_of_several_tokens_is_found(self):
        """llama.cpp #11538: with `stop: ["O P Q"]` the alphabet went on."""
        letters = ["L", " M", " N", " O", " P", " Q", " R", " S"]
        given, last = text_of(letters, stops=["x", "O P Q"])
        assert "".join(given) == "L M N " and last.matched == "O P Q"

    def test_a_stop_that_begins_again_in_its_beginning(self):
        given, last = text_of(["a", "a", "b", "a", "a", "a", "b", "c", "d"], stops=["aabc"])
        assert "".join(given) == "aaba" and last.matched == "aabc"

    def test_the_first_that_is_complete_counts_and_then_the_longest(self):
        assert text_of(["xabcd"], stops=["abcd", "bc"])[1].matched == "bc"
        assert text_of(["x", "a", "b", "c", "d"], stops=["abcd", "bc"])[1].matched == "bc"
        given, last = text_of(["xabc"], stops=["c", "bc", "abc"])
        assert given == ["x"] and last.matched == "abc"

    def test_what_was_held_back_is_given_at_the_end(self):
        given, last = text_of(["a", "bc", "de"], stops=["def"], limit=3)
        assert given == ["a", "bc", "de"] and (last.reason, last.matched) == ("length", None)
        text = ChoiceText(words("ab"), stops=["abc"], stop_ids=(), limit=9)
        assert text.push(0).text == "" and text.cancel().text == "ab" and text.reason == "cancelled"
        assert text.cancel().text == ""

    def test_a_stop_in_what_half_a_character_becomes(self):
        tokenizer = TOKENIZERS["byte level"]
        (ids,) = tokenizer.encode_batch(["a😀"])
        text = ChoiceText(tokenizer.stream(), stops=["\ufffd"], stop_ids=(), limit=3)
        pieces = [text.push(int(i)) for i in ids[:3]]
        assert [one.text for one in pieces] == ["a", "", ""] and pieces[-1].matched == "\ufffd"

    @settings(max_examples=300)
    @given(
        text=st.text("abc", max_size=25),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
        cuts=st.lists(st.integers(0, 25), max_size=6),
    )
    def test_how_text_comes_in_pieces_does_not_matter(self, text, stops, cuts):
        """The same is given and found; it is what looking at every prefix of the whole text finds."""
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        found, given, places = None, "", StopStrings(stops)
        for begin, end in itertools.pairwise(edges):
            piece, found = places.push(text[begin:end])
            given += piece
            # What is given is never taken back: no stop begins in it.
            assert not any(given.find(stop) >= 0 for stop in stops)
            if found is not None:
                break
        else:
            given += places.finish()
        for end in range(len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                longest = max(complete, key=len)
                assert (given, found) == (text[: end - len(longest)], longest)
                return
        assert (given, found) == (text, None)


class TestEnds:
    def test_a_stop_id_ends_without_its_text(self):
        given, last = text_of(["a", "b", "</s>", "c"], stop_ids=[2])
        assert given == ["a", "b", "", ""] and (last.reason, last.matched) == ("stop", 2)

    def test_what_a_device_makes_behind_the_end_is_dropped(self):
        text = ChoiceText(words("a", "b", "c"), stops=["b"], stop_ids=(), limit=9)
        assert [text.push(n).text for n in range(3)] == ["a", "", ""]
        assert (text.tokens, text.reason) == (2, "stop")

    def test_a_stop_at_the_last_token_is_a_stop(self):
        assert text_of(["a", "b"], stops=["b"], limit=2)[1].reason == "stop"
        assert text_of(["a", "b"], stop_ids=[1], limit=2)[1].reason == "stop"
        assert text_of(["a", "b"], limit=2)[1].reason == "length"

    def test_nothing_ends_before_min_tokens(self):
        """Stop strings are looked for behind the text of the first tokens, and not across its end."""
        given, last = text_of(["x", "x", "x", "y"], stops=["x"], min_tokens=2)
        assert given == ["x", "x", "", ""] and last.matched == "x"
        given, last = text_of(["a", "b", "c"], stops=["ab"], min_tokens=1)
        assert given == ["a", "b", "c"] and last is None
        given, last = text_of(["a", "b", "c"], stop_ids=[1], min_tokens=2)
        assert given == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece bytes", "unigram"])
def test_a_prompt_and_the_text_that_continues_it_are_the_text_of_all_ids(kind: str):
    """Wherever the ids are cut: within a character, before a space, in a run of bytes, at a special token."""
    tokenizer = FastTokenizer(json.loads(build(kind).to_str()), name="drawn", bos_id=0, eos_id=1)
    rng = random.Random(51)
    compared = 0
    for _ in range(60):
        (ids,) = tokenizer.encode_batch([drawn_text(rng)])
        ids = [0, *(i for i in ids.tolist() if i > 3)]
        for cut in range(2, len(ids)):
            prompt, stream = tokenizer.decode(ids[:cut]).rstrip(REPLACEMENT), tokenizer.stream(ids[:cut])
            text = "".join(map(stream.push, ids[cut:])) + stream.finish()
            assert prompt + text == tokenizer.decode(ids), (ids, cut)
            compared += 1
    assert compared > 300
