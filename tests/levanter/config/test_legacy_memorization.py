"""Documents of the old memorization scripts: one book, several books, and a `base_eval:` beside the books."""

import pytest
from helpers.old_memorization import BOOKS, ONE_BOOK, SHARED

from levanter.commands.memorize.config import resolve_books
from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig
from levanter.config import ConfigError, parse_text, read
from levanter.memorization.results import FULL
from levanter.mesh.config import MeshConfig

pytestmark = pytest.mark.quick


def test_one_book_means_what_it_meant():
    config = parse_text(EvalCarelessLmConfig, ONE_BOOK)
    (book,) = resolve_books(config)
    windowing = book.convention.windowing
    assert windowing.token_mode and windowing.stride_tokens == 5 and not windowing.bos
    assert (windowing.window_tokens, windowing.prefix_tokens) == (100, 50)
    assert book.convention.scheme == FULL and book.batch_size == 1
    assert (book.title, book.folder) == ("A Book", "gs://bucket/books/")
    assert book.names == {"plot_path": "bar_plot.png", "histogram_path": "histogram.png", "pz_data_path": "pz_data.npz"}
    assert config.model is not None and config.model.max_seq_len == 101
    assert dict(config.trainer.mesh.axes)["model"] == 128


def test_several_books_share_what_they_do_not_say():
    config = parse_text(EvalCarelessLmConfig, SHARED + BOOKS)
    one, two = resolve_books(config)
    assert (one.title, two.title) == ("One", "two")
    assert (one.folder, two.folder) == ("gs://bucket/8b/one", "gs://bucket/8b/two")
    assert (one.batch_size, two.batch_size) == (128, 64)
    assert (one.convention.windowing.prefix_tokens, two.convention.windowing.prefix_tokens) == (50, 80)
    assert one.convention.windowing.token_mode and two.convention.windowing.token_mode


def indented(text):
    return "".join(f"  {line}\n" for line in text.strip().splitlines())


def test_a_base_is_lifted_into_the_document(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("base_eval:\n" + indented(SHARED) + BOOKS)
    loaded = read(EvalCarelessLmConfig, paths=[str(path)])
    assert loaded.config == parse_text(EvalCarelessLmConfig, SHARED + BOOKS)
    assert isinstance(loaded.config.trainer.mesh, MeshConfig)
    assert any(change.key == "base_eval" and change.line == 1 for change in loaded.changes)
    # What is inside is translated like any other document's.
    assert any(change.key == "trainer.tensor_parallel_axes" for change in loaded.changes)


def test_a_base_that_contradicts_the_document_is_refused():
    with pytest.raises(ConfigError, match=r"base_eval\.chunk_size.*contradicts"):
        parse_text(EvalCarelessLmConfig, "chunk_size: 90\nbase_eval:\n" + indented(SHARED) + BOOKS)


def test_switches_without_use_are_dropped_and_named(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(SHARED + "use_dataloader: true\ngcp_log: false\nopt_warmup_compile: true\n" + BOOKS)
    loaded = read(EvalCarelessLmConfig, paths=[str(path)])
    ignored = {change.key for change in loaded.changes if change.kind == "ignored"}
    assert {"use_dataloader", "gcp_log", "opt_warmup_compile"} <= ignored


def test_misspelt_keys_get_a_suggestion():
    for wrong, right in (("cursor_inc_token", "cursor_inc_tokens"), ("use_dataloadr", "use_dataloader")):
        with pytest.raises(ConfigError, match=f"{wrong}.*did you mean.*{right}"):
            parse_text(EvalCarelessLmConfig, SHARED + BOOKS + f"{wrong}: 5\n")
    with pytest.raises(ConfigError, match=r"books\.one\.prompt_token.*did you mean.*prompt_tokens"):
        parse_text(EvalCarelessLmConfig, SHARED + "books: {one: {txt_path: a.txt, prompt_token: 3}}\n")
