"""Numbers of processes that no run has: refused at once, before memory or a peer is waited for."""

import pytest
from helpers.attacks import Attack, judge, strike_apart, table
from helpers.tiny_runs import make_inputs

BAD = 2


def evaluation(folder):
    return make_inputs(folder).eval_lm(folder / "run")[1:]


def numbers(count: str, number: str) -> dict[str, str]:
    return {"LEVANTER_COORDINATOR": "localhost:1", "LEVANTER_NUM_PROCESSES": count, "LEVANTER_PROCESS_ID": number,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # fmt: skip


PLACES = {
    "many": (numbers("99999999999", "0"), "a run of 99,999,999,999 processes"),
    "nine-of-one": (numbers("1", "9"), "process number 9 of 1"),
    "none": (numbers("0", "0"), "a run of 0 processes"),
    "negative": (numbers("2", "-1"), "process number -1"),
    "digits": (numbers("9" * 5000, "0"), "expected a whole number"),
}
ATTACKS = [
    Attack(name=name, command="eval_lm", words=evaluation, code=BAD, says=(says,)) for name, (_, says) in PLACES.items()
]


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=("nine-of-one",)))
def test_a_number_that_no_run_has(attack, tmp_path):
    """`tests/levanter/distributed/test_initialize.py` has all of them in one process, and two of one number."""
    environment, _ = PLACES[attack.name]
    judge(attack, strike_apart(attack, tmp_path, environment=environment, memory_bytes=32 << 30))
