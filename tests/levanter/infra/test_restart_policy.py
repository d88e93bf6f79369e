import pytest

from levanter.infra.restart_policy import Outcome, judge

pytestmark = pytest.mark.quick


def of(*codes: int | None) -> list[Outcome]:
    return [Outcome(process=index, code=code) for index, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "kind", "exit_code", "cause"),
    [
        ((0, 0, 0), "done", 0, None),
        # A refusal is nobody's consequence, whatever it pulls down with it.
        ((5, 5, 2, -6), "refused", 2, 2),
        ((3, None, 5), "refused", 3, 0),
        # An error of one; the others miss a peer, or their runtime aborts.
        ((1, 5, 5, -6), "failed", 1, 0),
        ((5, 7, 134), "failed", 7, 1),
        # A host that is gone explains the errors of the others, in whichever order they come.
        ((1, 1, None, 5), "lost", 5, 2),
        ((1, -9, 5, 5), "lost", 5, 1),
        ((1, 5, 137), "lost", 5, 2),
        ((143, 75, 75), "lost", 75, 0),
        ((75, 75, 5), "preempted", 75, 0),
        ((5, 5, 0), "lost", 5, 0),
        # Nobody was killed from outside: a runtime that crashed.
        ((-11, -6), "lost", 5, 0),
        ((130, 130), "interrupted", 130, 0),
    ],
)
def test_the_process_that_was_first_in_cause(codes, kind, exit_code, cause):
    judgement = judge(of(*codes))
    assert (judgement.kind, judgement.exit_code) == (kind, exit_code)
    assert (None if judgement.cause is None else judgement.cause.process) == cause
    assert judgement.again == (kind in ("lost", "preempted"))


def test_an_outcome_says_what_happened():
    assert str(Outcome(process=3, code=2, where="w-3")) == "process 3 on w-3: exit code 2 (bad input or configuration)"
    assert str(Outcome(process=0, code=-9)) == str(Outcome(process=0, code=137)) == "process 0: killed by SIGKILL"
    assert str(Outcome(process=1, code=None, where="10.0.0.7")) == "process 1 on 10.0.0.7: the host is gone"
    assert str(Outcome(process=1, code=42)) == "process 1: exit code 42 (failed)"
