"""What a Llama 2 server for TPU v5e did that must be the same here (sections of prompts, an end looked for every ten
tokens, keys and values on more devices than they have heads)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB
from helpers.processes import TESTS
from helpers.tiny_engine import GAP, TinyEngine, observed

from levanter.inference.requests import Request, SamplingParams

pytestmark = pytest.mark.slow

CONTEXT, NEW = 1100, 40
ONE_SHOT = TinyEngine(rows=2, prefill=((1, 1024),), max_seq_len=CONTEXT)


def requests(*lengths: int, stops: dict[int, tuple[int, ...]] | None = None) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=2)
    return [
        Request(
            id=str(n),
            tokens=tuple(np.random.default_rng(n).integers(0, VOCAB, length).tolist()),
            params=params,
            seed=0,
            stop_ids=(stops or {}).get(n, ()),
        )
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("section", [128, 256, 384, 512])
def test_sections_of_a_prompt_are_the_same_as_the_whole_at_once(section, devices):
    del devices
    given = requests(1024, 700, section, section + 1, 2 * section - 1, 1)
    whole = observed(ONE_SHOT.engine(), given)
    found = observed(TinyEngine(rows=2, prefill=((1, section),), max_seq_len=CONTEXT).engine(), given)
    assert found.texts.keys() == whole.texts.keys() and len(whole.texts) == len(given)
    compared = 0
    for of, text in whole.texts.items():
        # Up to where the last bits of two logits decide, if they do.
        clear = next((n for n, gap in enumerate(whole.gaps[of]) if gap <= GAP), NEW)
        assert found.texts[of][:clear] == text[:clear]
        np.testing.assert_allclose(found.logprobs[of][:clear], whole.logprobs[of][:clear], atol=2e-4, rtol=0)
        compared += clear
    assert compared >= 0.9 * NEW * len(given)


@pytest.mark.parametrize("how", [{"steps": 10}, {"behind": 10}], ids=str)
def test_an_end_that_is_looked_for_every_ten_tokens_is_the_same_as_after_each(how, devices):
    """By the host (`behind`) and by the devices (`steps`)."""
    del devices
    lengths = (9, 30, 3, 14, 22, 5)
    free = observed(TinyEngine(rows=3, behind=0).engine(), requests(*lengths))
    stops = {n: (text[5 + 3 * n],) for n, text in enumerate(free.texts.values())}
    expected = observed(TinyEngine(rows=3, behind=0).engine(), requests(*lengths, stops=stops))
    assert len({len(text) for text in expected.texts.values()}) > 3, "texts must end at different places"
    found = observed(TinyEngine(rows=3, **how).engine(), requests(*lengths, stops=stops))
    assert found.texts == expected.texts
    for of, text in found.texts.items():
        whole = free.texts[of]
        (stop,) = stops[int(of.request)]
        assert text == whole[: whole.index(stop) + 1]


def test_8_heads_of_keys_on_16_devices_are_the_same_as_on_8(tmp_path):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "sixteen_ways.py")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["8"]["gap"] > GAP
    assert found["16"]["texts"] == found["8"]["texts"] and len(found["8"]["texts"]) == 6
    assert (found["8"]["repeated"], found["16"]["repeated"]) == (1, 2)
    # Twice the devices hold twice the bytes.
    assert found["16"]["bytes"] == found["8"]["bytes"]
    assert "each key and value is on 2 devices" in found["16"]["said"]
