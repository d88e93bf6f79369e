"""Models out of checkpoints of ours: `eval_lm` scores them as their export is scored, `viz_logprobs` shows the same."""

import json
import math
import re
from html.parser import HTMLParser
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from helpers.saved_run import TEXT, write_checkpoint, write_tokenizer

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate import eval_lm, viz_logprobs
from levanter.commands.export import export_lm_to_hf
from levanter.commands.memorize import eval_careless_lm
from levanter.config import load, load_written
from levanter.data import Tokenizer
from levanter.data.incremental_detokenizer import WindowStream
from levanter.eval.logprob_page import ScoredText, logprob_page, pieces, shade
from levanter.memorization.results import BookResult
from levanter.plan.target_from_name import pod_target

LENGTH = 48


@pytest.fixture(scope="module")
def saved(tmp_path_factory, devices):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [TEXT, "a second", TEXT[::-1]]))
    write_checkpoint(folder / "run", write_tokenizer(folder / "tokenizer"))
    words = ["--checkpoint_path", str(folder / "run"), "--output_dir", str(folder / "hf")]
    assert run_entry_point(export_lm_to_hf.ConvertLmConfig, export_lm_to_hf.main, words) == 0
    return folder


def words_of(folder, tmp_path, **more):
    document = {
        "max_eval_length": LENGTH,
        "data": {"components": {"docs": {"source": {"validation_urls": [str(folder / "docs.jsonl")]}}}},
        "trainer": {
            "mp": "f32",
            "tracker": {"type": "noop"},
            "per_device_eval_parallelism": 1,
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
        },
        **more,
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(document))
    return ["--config_path", str(path)]


def evaluate(words, out, *more):
    assert run_entry_point(eval_lm.EvalLmConfig, eval_lm.main, [*words, "--output_path", str(out), *more]) == 0
    return json.loads(out.read_text())


class Page(HTMLParser):
    """The text of every section, its tokens' titles, and everything that could ask for another file."""

    def __init__(self):
        super().__init__()
        self.inside = self.mark = False
        self.texts, self.titles, self.asks = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.asks += [found[name] for name in ("src", "href") if found.get(name, "data:,") != "data:,"]
        if tag == "div" and found.get("class") == "text":
            self.inside = True
            self.texts.append("")
        elif tag == "i":
            self.mark = True
        elif tag == "b" and self.inside:
            self.titles.append(found["title"])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "div"
        self.mark = self.mark and tag != "i"

    def handle_data(self, data):
        if self.inside and not self.mark:
            self.texts[-1] += data


def test_a_checkpoint_of_ours_is_scored_and_shown(saved, tmp_path, capsys):
    words = words_of(saved, tmp_path)
    own = evaluate(words, tmp_path / "own.json", "--checkpoint_path", str(saved / "run"))
    page = tmp_path / "page.html"
    shown = [*words, "--checkpoint_path", str(saved / "run"), "--path", str(page), "--num_docs", "1000"]
    assert run_entry_point(viz_logprobs.VizLmConfig, viz_logprobs.main, shown) == 0
    said = capsys.readouterr().out
    assert f"{saved}/run/step-7 (llama, step 7, float32" in said

    # transformers, over the rows of the stream: neighbours share a token, a document is seen alone.
    model = transformers.AutoModelForCausalLM.from_pretrained(saved / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved / "hf")
    stream, document = [], []
    for n, line in enumerate((saved / "docs.jsonl").read_text().splitlines()):
        ids = [1, *tokenizer.encode(json.loads(line)["text"], add_special_tokens=False), 2]
        stream += ids
        document += [n] * len(ids)
    total, count, rows = 0.0, 0, 0
    for at in range(0, len(stream) - 1, LENGTH - 1):
        rows += 1
        for n in sorted(set(document[at : at + LENGTH])):
            ids = [i for i, d in zip(stream[at : at + LENGTH], document[at : at + LENGTH], strict=True) if d == n]
            if len(ids) < 2:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            count += len(ids) - 1
    measured = own["sets"]["docs"] if "docs" in own.get("sets", {}) else own["sets"][0]
    assert measured["loss"] == pytest.approx(total / count, rel=1e-5)

    parsed = Page()
    parsed.feed(page.read_text(encoding="utf-8"))
    assert len(parsed.texts) == rows and not parsed.asks
    numbers = [re.match(r"(-?\d+\.\d\d) nats, p ", title) for title in parsed.titles]
    assert sum(float(n.group(1)) for n in numbers if n) == pytest.approx(total, rel=1e-3)
    # One row begins with the token that the one before it ended with; so do the texts.
    decoded = [tokenizer.decode(stream[at : at + LENGTH]) for at in range(0, len(stream) - 1, LENGTH - 1)]
    assert parsed.texts == decoded
    assert f"{count:,} tokens, {total / count:.4f} nats per token" in said


@pytest.mark.slow
def test_what_a_checkpoint_of_ours_memorized(saved, tmp_path):
    """`eval_careless_lm` of the checkpoint and of its export: the same rows."""
    (tmp_path / "book.txt").write_text(TEXT)
    document = {
        "txt_path": str(tmp_path / "book.txt"),
        "book_title": "A Small Book",
        "chunk_size": 20,
        "prompt_tokens": 12,
        "token_mode": True,
        "eval_batch_size": 8,
        "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "mesh": {"axes": {"data": 4, "model": 2}}},
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    found = []
    for name, words in (("own", ["--checkpoint_path", "run"]), ("hf", ["--hf_checkpoint", "hf"])):
        words = ["--config_path", str(tmp_path / "config.json"), words[0], str(saved / words[1])]
        words += ["--output_base_path", str(tmp_path / name)]
        assert run_entry_point(eval_careless_lm.EvalCarelessLmConfig, eval_careless_lm.main, words) == 0
        (windows,) = (tmp_path / name).rglob("windows.parquet")
        found.append(BookResult.read(str(windows.parent)))
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=1e-5)
    np.testing.assert_array_equal(found[0].ranks, found[1].ranks)


def test_some_rows_of_files_of_hugging_face(saved, tmp_path):
    page = tmp_path / "page.html"
    words = [*words_of(saved, tmp_path), "--checkpoint_path", str(saved / "hf"), "--checkpoint_is_hf", "true"]
    config = load(
        viz_logprobs.VizLmConfig,
        [*words, "--num_docs", "3", "--path", str(page), "--data.tokenizer", str(saved / "tokenizer")],
    )
    plan = viz_logprobs.describe(config, pod_target("v6e-8"))
    assert plan.entry_point == "viz_logprobs" and [program.name for program in plan.programs] == ["score"]
    assert plan.workloads[0].executions == 1
    sequences = plan.work.evaluation.sequences
    assert sequences is not None
    rows = viz_logprobs.chosen_rows(sequences, count=3, seed=0)
    assert len(rows) == 3 and sorted(set(rows.tolist())) == rows.tolist()
    assert viz_logprobs.chosen_rows(sequences, count=3, seed=None).tolist() == [0, 1, 2]
    assert len(viz_logprobs.chosen_rows(sequences, count=10**6, seed=0)) == sequences.row_count


def test_what_is_refused(saved, tmp_path, capsys):
    words = words_of(saved, tmp_path)

    def refused(*more, entry: Any = viz_logprobs, config: Any = viz_logprobs.VizLmConfig):
        assert run_entry_point(config, entry.main, [*words, *more]) == 2
        return capsys.readouterr().err

    both = ("--checkpoint_path", str(saved / "run"), "--hf_checkpoint", str(saved / "hf"))
    assert "give one model" in refused(*both)
    assert "name two models" in refused(*both, entry=eval_lm, config=eval_lm.EvalLmConfig)
    one = ("--checkpoint_path", str(saved / "run"))
    assert "comparison_model_path: not supported yet" in refused(*one, "--comparison_model_path", "x")
    block = ("--model", "{type: llama, num_layers: 3}")
    assert "model.num_layers is 3" in refused(*one, *block, entry=eval_lm, config=eval_lm.EvalLmConfig)
    assert "no complete checkpoint" in refused("--checkpoint_path", str(tmp_path))


def test_pieces_join_the_parts_of_a_character():
    table = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"\xf0", 4: b"\x9f", 5: b"\x8e\x89", 6: b"\n"}

    class Table:
        def byte_lengths(self):
            return np.array([len(table[i]) for i in range(len(table))])

        def stream(self, *, special):
            return WindowStream(lambda ids: b"".join(table[i] for i in ids).decode("utf-8", errors="replace"))

    tokenizer = cast(Tokenizer, Table())
    assert list(pieces([0, 1, 2, 0, 3, 4, 5, 6], tokenizer)) == [
        (0, 1, "a"),
        (1, 3, "é"),
        (3, 4, "a"),
        (4, 7, "🎉"),
        (7, 8, "\n"),
    ]
    # What never becomes a character is shown as such.
    assert [text for *_, text in pieces([0, 1], tokenizer)] == ["a", "\N{REPLACEMENT CHARACTER}"]
    logprobs = np.log([np.nan, 0.5, 0.25, 1.0, 0.1, 0.1, 0.1, 1e-9]).astype(np.float32)
    text = ScoredText(name="<set>", place="row 1", ids=np.array([0, 1, 2, 0, 3, 4, 5, 6]), logprobs=logprobs)
    page = logprob_page([text], tokenizer, title="a & b", facts={"model": "<m>"})
    assert '<b class="s2" title="2.08 nats, p 12.5 %, 2 tokens">é</b>' in page
    assert '<b class="s8" title="6.91 nats, p 0.1 %, 3 tokens">🎉</b>' in page
    assert '<b title="not scored">a</b>' in page and '<b class="s10" title="20.72 nats, p 1.0e-09">' in page
    assert "a &amp; b" in page and "&lt;set&gt;" in page and "&lt;m&gt;" in page


def test_shades():
    assert [shade(-x) for x in (0.0, 0.79, 0.81, 7.9, 8.1, 100.0, math.inf)] == [0, 0, 1, 9, 10, 10, 10]


def test_rows_are_as_long_as_the_model_is_meant_for(saved, tmp_path):
    """Where nobody says how long; longer ones are noted, and refused where positions end."""
    target, path = pod_target("v6e-8"), tmp_path / "config.yaml"

    def planned(module, kind, *, max_eval_length=None, **more):
        length = {} if max_eval_length is None else {"max_eval_length": max_eval_length}
        words_of(saved, tmp_path, **more)
        document = {k: v for k, v in json.loads(path.read_text()).items() if k != "max_eval_length"}
        path.write_text(json.dumps({**document, **length}))
        loaded = load_written(kind, ["--config_path", str(path)])
        return module.describe(loaded.config, target, written=loaded.written)

    sizes = {"hidden_dim": 32, "intermediate_dim": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    model = {"type": "gpt2", "max_seq_len": 64, "vocab_size": 96, **sizes}
    plan = planned(eval_lm, eval_lm.EvalLmConfig, model=model)
    assert plan.work.config.max_eval_length == 64
    (check,) = [
        c for c in planned(eval_lm, eval_lm.EvalLmConfig, model=model, max_eval_length=65).checks if c.name == "rows"
    ]
    assert check.status == "error" and "→ max_eval_length: 64" in check.message
    run = str(saved / "run")
    meant_for = eval_lm.describe(eval_lm.EvalLmConfig(checkpoint_path=run), target).work.pretrained.config.max_seq_len
    for module, kind in ((eval_lm, eval_lm.EvalLmConfig), (viz_logprobs, viz_logprobs.VizLmConfig)):
        work = planned(module, kind, checkpoint_path=run).work
        evaluated = work if module is eval_lm else work.evaluation
        assert evaluated.config.max_eval_length == meant_for
        plan = planned(module, kind, checkpoint_path=run, max_eval_length=meant_for + 1)
        (check,) = [c for c in plan.checks if c.name == "rows"]
        assert check.status == "note" and str(meant_for) in check.message
