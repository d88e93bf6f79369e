"""Parameters of a request: what is read, what is refused, and everything that is wrong at once."""

import json

import pytest

from levanter.inference.requests import NEVER, ParamsError, SamplingParams, merge_stop_ids, parse_params

pytestmark = pytest.mark.quick


def test_defaults_are_openai_s():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.n, params.max_tokens) == (1.0, 1.0, 1, 16)
    assert (params.presence_penalty, params.frequency_penalty, params.logprobs, params.stop) == (0.0, 0.0, None, ())
    assert not params.greedy and not params.counts_tokens and not params.echo


def test_every_field_is_read():
    text = """{"temperature": 0, "top_k": 40.0, "top_p": 0.5, "min_p": 0.1, "seed": 9223372036854775807,
    "logit_bias": {"5": -100, "7": 1.5}, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.25,
    "n": 3, "min_tokens": 2, "max_tokens": null, "ignore_eos": true, "stop": "\\n", "stop_token_ids": [3, 4],
    "logprobs": 20, "echo": true}"""
    # `null` is the default, and not "no limit": what a client does not say, it does not change.
    expected = SamplingParams(
        temperature=0.0,
        top_k=40,
        top_p=0.5,
        min_p=0.1,
        seed=2**63 - 1,
        logit_bias={5: -100.0, 7: 1.5},
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.25,
        n=3,
        min_tokens=2,
        ignore_eos=True,
        stop=("\n",),
        stop_token_ids=(3, 4),
        logprobs=20,
        echo=True,
    )
    assert parse_params(json.loads(text)) == expected
    assert expected.greedy and expected.counts_tokens


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -0.1, "temperature: must not be negative"),
        ("temperature", 1e-9, "temperature: must be 0, which takes the likeliest token, or at least 1e-06"),
        ("temperature", float("nan"), "temperature: must be a finite number"),
        ("temperature", 10**400, "temperature: must be a finite number"),
        ("temperature", True, "temperature: expected a number, got True"),
        ("temperature", "1", "temperature: expected a number, got '1'"),
        ("top_k", -2, "top_k: must not be negative, or -1"),
        ("top_k", 1.5, "top_k: expected a whole number, got 1.5"),
        ("top_p", 0, "top_p: must be above 0 and at most 1"),
        ("top_p", 1.5, "top_p: must be above 0 and at most 1"),
        ("min_p", 2, "min_p: must be from 0 to 1"),
        ("seed", 2**63, "seed: must be from 0 to"),
        ("seed", -1, "seed: must not be negative"),
        ("seed", float("inf"), "seed: expected a whole number"),
        ("n", 0, "n: must be at least 1"),
        ("n", 129, "n: must be from 1 to 128"),
        ("max_tokens", 0, "max_tokens: must be positive, got 0"),
        ("min_tokens", 17, "min_tokens: 17 is more than max_tokens 16"),
        ("logprobs", 21, "logprobs: must be from 0 to 20"),
        ("presence_penalty", 3, "presence_penalty: must be from -2 to 2"),
        ("repetition_penalty", 0, "repetition_penalty: must be at least 0.01"),
        ("echo", 1, "echo: expected true or false"),
        ("stop", ["a", 1], "stop[1]: expected a string, got 1"),
        ("stop", {"a": 1}, "stop: expected a string or a list of strings"),
        ("stop", [""], "stop[0]: an empty string"),
        ("stop", ["a\ud800"], "stop[0]: character 1 is half of a surrogate pair"),
        ("stop", ["x" * 1025], "stop[0]: at most 1024 characters"),
        ("stop", ["x"] * 65, "stop: at most 64 entries, got 65"),
        ("stop_token_ids", [1, "2"], "stop_token_ids[1]: expected an id"),
        ("stop_token_ids", [-1], "stop_token_ids[0]: must not be negative"),
        ("logit_bias", {"x": 1}, "logit_bias['x']: expected an id"),
        ("logit_bias", {"٣": 1}, "expected an id"),
        ("logit_bias", {"5": "a"}, "logit_bias['5']: expected a number"),
        ("logit_bias", {"5": 101}, "logit_bias.5: must be from -100 to 100"),
        ("logit_bias", {"5": 1, "05": 1}, "logit_bias['05']: names id 5 a second time"),
        ("logit_bias", {str(n): 1 for n in range(301)}, "logit_bias: at most 300 entries, got 301"),
        ("temprature", 1, "temprature: not a parameter; did you mean `temperature`?"),
        ("best_of", 4, "best_of: refused; sample `n` choices"),
        ("use_beam_search", True, "use_beam_search: refused"),
        ("num_beams", 4, "num_beams: refused"),
        ("suffix", "…", "suffix: refused; models here continue a text"),
    ],
)
def test_what_is_wrong_is_named(field, value, said):
    with pytest.raises(ParamsError) as caught:
        parse_params({field: value})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(said) or said in caught.value.problems[0]


def test_all_problems_are_listed():
    fields = {"temperature": -1, "top_p": 0, "n": "a", "beta": 1, "suffix": "b", "min_tokens": 99, "stop": [""]}
    with pytest.raises(ParamsError) as caught:
        parse_params(fields)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {
        "temperature", "top_p", "n", "beta", "suffix", "min_tokens", "stop[0]",
    }  # fmt: skip


def test_what_clients_send_without_meaning_anything_is_taken():
    nothing = {"best_of": 1, "suffix": None, "use_beam_search": False, "num_beams": 1, "early_stopping": False}
    assert parse_params(nothing) == SamplingParams()
    assert parse_params({"n": 2, "best_of": 2, "suffix": ""}).n == 2
    with pytest.raises(ParamsError, match="best_of"):
        parse_params({"n": 2, "best_of": 1})
    assert all(name not in SamplingParams.__dataclass_fields__ for name in NEVER)


def test_fields_of_somebody_else():
    assert parse_params({"prompt": 3, "top_k": 1}, ignore=frozenset({"prompt"})).top_k == 1
    with pytest.raises(ParamsError, match="did you mean `prompt`"):
        parse_params({"promt": 3}, ignore=frozenset({"prompt"}))


def test_ids_are_compared_with_the_model():
    params = SamplingParams(logit_bias={3: 1.0, 10: 1.0}, stop_token_ids=(9, 11))
    params.check_ids(12)
    with pytest.raises(ParamsError) as caught:
        params.check_ids(10)
    assert [problem.split(" is not")[0] for problem in caught.value.problems] == [
        "logit_bias: id 10", "stop_token_ids: id 11",
    ]  # fmt: skip


def test_ends_of_a_row():
    assert merge_stop_ids(SamplingParams(stop_token_ids=(5, 2)), (2, 3)) == (2, 3, 5)
    assert merge_stop_ids(SamplingParams(stop_token_ids=(5, 2), ignore_eos=True), (2, 3)) == (5, 2)
    with pytest.raises(ValueError, match="60 ids and the model's own 5 ends of text are more than 64"):
        merge_stop_ids(SamplingParams(stop_token_ids=tuple(range(60))), range(60, 65))
