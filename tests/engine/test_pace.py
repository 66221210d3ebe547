"""When proposals pay, by times that are given."""

from __future__ import annotations

from engine.pace import LONGEST_REST, REST_ROUNDS, TRIED_ROUNDS, Pace


def tried(pace: Pace, tokens: int, seconds: float) -> int:
    """Steps of rest after as many rounds as one judgement takes."""
    for _ in range(2):
        pace.plain(1.0)
    for _ in range(TRIED_ROUNDS):
        assert not pace.rest
        pace.round(tokens, seconds)
    rest, pace.rest = pace.rest, 0
    return rest


def test_rounds_go_on_while_they_give_more_a_second() -> None:
    assert tried(Pace(1), 2, 1.9) == 0
    assert tried(Pace(1), 2, 2.1) == REST_ROUNDS
    # Of four rows together: six tokens in the time of one and a half plain steps are no gain.
    assert tried(Pace(4), 6, 1.4) == 0
    assert tried(Pace(4), 6, 1.6) == REST_ROUNDS


def test_each_loss_rests_longer_and_a_gain_begins_anew() -> None:
    pace = Pace(1)
    rests = [tried(pace, 1, 2.0) for _ in range(9)]
    assert rests == [min(REST_ROUNDS << n, LONGEST_REST) for n in range(9)]
    assert tried(pace, 3, 1.0) == 0
    while not pace.rest:  # the last rounds count, whatever was before
        pace.round(1, 2.0)
    assert pace.rest == REST_ROUNDS


def test_nothing_is_judged_without_plain_steps() -> None:
    pace = Pace(1)
    for _ in range(3 * TRIED_ROUNDS):
        pace.round(1, 100.0)
    assert not pace.rest
    assert not pace.known
    pace.plain(1.0)
    pace.plain(1.0)
    assert pace.known
