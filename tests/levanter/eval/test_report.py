"""The result as people and programs read it."""

import json
import math

import pytest

from levanter.eval import EvalResult, Score, SetScore, format_result, result_json, write_result

pytestmark = pytest.mark.quick


def result_of(*nats):
    names = ("paloma/c4", "paloma/wiki", "docs")
    return EvalResult(
        sets=tuple(
            SetScore(name=name, tags=(name,), score=Score(nats=n, tokens=1000, bytes=4000), rows=4, documents=2)
            for name, n in zip(names, nats, strict=False)
        )
    )


def test_one_set():
    assert format_result(result_of(2000.0), {"model": "tiny", "load time": "0.5 s"}, width=80) == "\n".join(
        [
            "┏━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━┓",
            "┃ set       ┃ tokens ┃ bytes ┃   loss ┃ perplexity ┃ bits/byte ┃",
            "┡━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━┩",
            "│ paloma/c4 │  1,000 │ 4,000 │ 2.0000 │      7.389 │    0.7213 │",
            "└───────────┴────────┴───────┴────────┴────────────┴───────────┘",
            "model      tiny",
            "load time  0.5 s",
        ]
    )


def test_averages_and_tags():
    text = format_result(result_of(1000.0, 3000.0, 2000.0))
    lines = [line for line in text.splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == [
        "paloma/c4",
        "paloma/wiki",
        "docs",
        "tag paloma, micro of 2",
        "tag paloma, macro",
        "all, micro",
        "all, macro",
    ]
    assert "3,000" in lines[5] and "2.0000" in lines[5] and "3,000" not in lines[6]


def test_json_is_strict_and_complete(tmp_path):
    result = result_of(1000.0, math.inf)
    write_result(str(tmp_path / "out" / "result.json"), result, {"model": "tiny", "seconds": 1.5})
    read = json.loads((tmp_path / "out" / "result.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert read["sets"]["paloma/c4"] == {
        "loss": 1.0,
        "perplexity": math.e,
        "bits_per_byte": 1000 / (4000 * math.log(2)),
        "tokens": 1000,
        "bytes": 4000,
        "documents": 2,
        "rows": 4,
        "tags": ["paloma/c4"],
    }
    assert read["overall"]["micro"]["loss"] == "Infinity" and read["tags"]["paloma"]["sets"] == [
        "paloma/c4",
        "paloma/wiki",
    ]
    assert read["run"] == {"model": "tiny", "seconds": 1.5}
    assert result_json(result) == result_json(result)
    assert "warning: the loss of paloma/wiki is not finite" in format_result(result)
