import pytest

from jaxlm.monitor.clock import Clock


class Hand:
    """A clock that a test moves."""

    def __init__(self):
        self.at = 100.0

    def __call__(self):
        return self.at


@pytest.fixture
def hand():
    return Hand()


def clock(hand, peak=1e6, start=0):
    return Clock(
        start=start,
        steps=100,
        flops_per_step=5e4,
        flops_per_step_full=6e4,
        peak_flops=peak,
        now=hand,
    )


def test_a_reading_is_the_mean_step_since_the_last_one(hand):
    it = clock(hand)
    for _ in range(4):
        hand.at += 0.5
        it.add(tokens=30, data_wait_seconds=0.1)
    first = it.read(4)
    assert first["step_seconds"] == pytest.approx(0.5)
    assert first["tokens_per_second"] == pytest.approx(60)
    assert first["data_wait_seconds"] == pytest.approx(0.1)
    hand.at += 2
    it.add(tokens=10, data_wait_seconds=0.0)
    second = it.read(5)
    assert second["step_seconds"] == pytest.approx(2)
    assert second["tokens_per_second"] == pytest.approx(5)
    assert second["data_wait_seconds"] == 0


def test_training_begins_with_the_dispatch_or_the_end_of_the_step_before(hand):
    it = clock(hand)
    hand.at += 5  # a rollout is drawn for 4 of these
    it.add(tokens=1, data_wait_seconds=4, begun_at=104.0)
    hand.at += 2
    it.add(tokens=1, data_wait_seconds=0, begun_at=104.5)  # while the first one was computed
    assert it.read(2)["train_seconds"] == pytest.approx((1 + 2) / 2)


def test_utilisation_is_model_flops_over_the_peak_by_both_conventions(hand):
    it = clock(hand)
    hand.at += 0.2
    it.add(tokens=1, data_wait_seconds=0)
    reading = it.read(1)
    assert reading["flops_per_second"] == pytest.approx(2.5e5)
    assert reading["mfu"] == pytest.approx(0.25)
    assert reading["mfu_full_attention"] == pytest.approx(0.30)


def test_utilisation_of_a_device_of_unknown_peak_is_none(hand):
    it = clock(hand, peak=None)
    hand.at += 1
    it.add(tokens=1, data_wait_seconds=0)
    reading = it.read(1)
    assert reading["mfu"] is None
    assert reading["mfu_full_attention"] is None
    assert reading["flops_per_second"] == pytest.approx(5e4)


def test_evaluations_slow_no_step_but_count_in_the_time_left(hand):
    it = clock(hand, start=40)
    for _ in range(5):
        hand.at += 1
        it.add(tokens=1, data_wait_seconds=0)
    with it.pause("eval"):
        hand.at += 10
    for _ in range(5):
        hand.at += 1
        it.add(tokens=1, data_wait_seconds=0)
    reading = it.read(50)
    assert reading["step_seconds"] == pytest.approx(1)
    assert reading["pause_seconds"] == reading["pause_seconds/eval"] == pytest.approx(10)
    assert reading["goodput"] == pytest.approx(0.5)
    assert reading["elapsed_seconds"] == pytest.approx(20)
    assert reading["left_seconds"] == pytest.approx(100)


def test_a_pause_after_the_last_step_belongs_to_the_next_interval(hand):
    it = clock(hand)
    hand.at += 1
    it.add(tokens=1, data_wait_seconds=0)
    with it.pause("save"):
        hand.at += 5
    first = it.read(1)
    assert (first["step_seconds"], first["pause_seconds"]) == (pytest.approx(1), 0)
    assert first["elapsed_seconds"] == pytest.approx(1)
    hand.at += 1
    it.add(tokens=1, data_wait_seconds=0)
    second = it.read(2)
    assert second["step_seconds"] == pytest.approx(1)
    assert second["pause_seconds/save"] == pytest.approx(5)
    assert second["elapsed_seconds"] == pytest.approx(7)


def test_a_step_is_complete_when_it_is_said_to_be_and_not_when_it_is_counted(hand):
    it = clock(hand)
    it.add(tokens=6, data_wait_seconds=0, completed_at=hand.at + 2)
    hand.at += 50
    reading = it.read(1)
    assert reading["step_seconds"] == pytest.approx(2)
    assert reading["tokens_per_second"] == pytest.approx(3)


def test_a_failed_evaluation_ends_its_pause(hand):
    it = clock(hand)
    with pytest.raises(ValueError, match="lost"), it.pause("eval"):
        hand.at += 5
        raise ValueError("lost")
    hand.at += 1
    it.add(tokens=1, data_wait_seconds=0)
    assert it.read(1)["step_seconds"] == pytest.approx(1)


def test_a_reading_before_any_step_knows_nothing(hand):
    reading = clock(hand).read(0)
    assert reading["step_seconds"] is None
    assert reading["tokens_per_second"] is None
    assert reading["left_seconds"] is None
