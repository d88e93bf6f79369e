"""Which calls for prompts there are."""

import pytest

from levanter.inference.config import CHUNK, InferenceConfig

pytestmark = pytest.mark.quick

AUTO = InferenceConfig()


def calls(rows: int, *, platform: str = "cpu", length: int = 2048, config: InferenceConfig = AUTO):
    return config.prefill_calls(rows, length, platform=platform)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (2, ((2, 8), (1, 16))),
        (8, ((2, 8), (1, 16))),
        (12, ((2, 8), (1, 16))),
        (16, ((4, 8), (2, 16), (1, 32))),
        (32, ((4, 16), (2, 32), (1, 64))),
        (64, ((4, 32), (2, 64), (1, 128))),
    ],
)
def test_on_cpus_a_call_has_about_two_tokens_for_each_row_that_waits_for_it(rows, expected):
    assert calls(rows) == expected


def test_no_call_on_cpus_has_more_tokens_than_the_longest():
    for rows in range(2, 200):
        *shorter, (one, longest) = calls(rows)
        assert one == 1 and longest <= max(16, 2 * rows), f"{rows} rows: {calls(rows)}"
        assert all(prompts * tokens <= longest for prompts, tokens in shorter), f"{rows} rows: {calls(rows)}"
        # With what makes the cache, gives rows their next tokens and scores prompts there are twelve Programs at most.
        assert len(shorter) + 1 + 4 <= 12, f"{rows} rows: {calls(rows)}"


def test_where_nobody_decodes_beside_it_a_call_is_long():
    assert calls(1) == ((1, 32), (1, 128), (1, CHUNK))


@pytest.mark.parametrize(("platform", "together"), [("tpu", (1, 1, 1)), ("gpu", (8, 4, 1))])
def test_on_accelerators_a_call_is_as_long_as_it_was(platform, together):
    assert calls(44, platform=platform) == tuple(zip(together, (32, 128, 512), strict=True))


def test_what_is_written_holds():
    written = InferenceConfig(prefill_chunk=256)
    assert calls(8, config=written) == ((8, 32), (2, 128), (1, 256))
    assert calls(8, platform="tpu", config=written) == ((1, 32), (1, 128), (1, 256))


def test_a_call_is_no_longer_than_a_row():
    assert calls(32, length=20) == ((2, 10), (1, 20))
    assert calls(8, length=20, platform="tpu") == ((1, 20),)
    assert calls(8, length=5) == ((1, 5),)
