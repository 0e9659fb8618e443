"""The statistics of a trial: what it concludes from times that are noisy, drifting and of several shapes."""

import random

import pytest

from autofuse.clock import Sample
from autofuse.trial import LEAST_NOISE, STEPS, Trial


def measure(gain, *, noise=0.02, drift=0.0, worth=0.0, seed=0, shape=lambda r: 64, exponent=1.0, spikes=0.0):
    """A whole trial, as the tuner makes it, of a change that saves ``gain`` of a step of 1 s."""
    r, trial, turn, now = random.Random(seed), Trial(worth), 0, 0
    while trial.verdict() is None and not trial.exhausted:
        for _ in range(2):
            size = shape(r)
            seconds = (size / 64) ** exponent * (1 - gain * trial.arm(turn)) * (1 + drift * now)
            seconds *= r.lognormvariate(0, noise) * (3 if r.random() < spikes else 1)
            trial.add(Sample(seconds, None, size, ("key", size)), turn)
            now += 1
            if trial.verdict() is not None:
                break
        turn += 1
    return trial


@pytest.mark.parametrize("gain", [0.6, 0.3, 0.15])
def test_a_large_gain_is_clear_after_few_steps(gain):
    trials = [measure(gain, seed=seed) for seed in range(50)]
    assert all(trial.verdict() for trial in trials)
    assert sorted(len(trial.samples) for trial in trials)[25] <= 8
    inside = sum(trial.estimate().low <= gain <= trial.estimate().high for trial in trials)
    assert inside >= 44  # a 95% interval, looked at repeatedly


def test_what_brings_nothing_is_hardly_ever_kept():
    trials = [measure(0.0, noise=noise, seed=seed) for noise in (0.01, 0.05, 0.2) for seed in range(100)]
    assert sum(bool(trial.verdict()) for trial in trials) <= 0.05 * len(trials)


def test_what_is_slower_is_never_kept_and_soon_dropped():
    trials = [measure(-0.2, noise=0.05, seed=seed) for seed in range(50)]
    assert not any(trial.verdict() for trial in trials)
    assert sorted(len(trial.samples) for trial in trials)[25] <= 12


def test_a_noisier_machine_is_measured_for_longer():
    quiet, noisy = ([measure(0.2, noise=noise, seed=s) for s in range(30)] for noise in (0.01, 0.1))
    assert sum(len(t.samples) for t in noisy) > 2 * sum(len(t.samples) for t in quiet)
    assert all(len(t.samples) <= 2 * STEPS + 4 for t in noisy)


def test_a_machine_that_gets_slower_misleads_nobody():
    trials = [measure(0.0, drift=0.02, seed=seed) for seed in range(50)]
    assert sum(bool(trial.verdict()) for trial in trials) <= 3
    assert all(measure(0.3, drift=0.02, seed=seed).verdict() for seed in range(20))


def test_single_spikes_do_not_decide():
    trials = [measure(0.25, noise=0.03, spikes=0.05, seed=seed) for seed in range(50)]
    assert sum(bool(trial.verdict()) for trial in trials) >= 45


@pytest.mark.parametrize("exponent", [1.0, 1.5])
def test_shapes_are_never_mixed_up(exponent):
    """Two shapes, one four times the other: only steps of the same shape are compared."""
    for seed in range(20):
        shape = lambda r: r.choice([32, 128])  # noqa: E731
        assert measure(0.25, shape=shape, exponent=exponent, seed=seed).verdict()
        assert not measure(-0.1, shape=shape, exponent=exponent, seed=seed).verdict()


def test_shapes_that_never_repeat_are_compared_by_the_token():
    shape = lambda r: r.randrange(1000, 4000)  # noqa: E731
    trials = [measure(0.3, shape=shape, seed=seed) for seed in range(30)]
    assert sum(bool(t.verdict()) for t in trials) >= 28
    assert abs(trials[0].estimate().gain - 0.3) < 0.1


def test_a_batch_that_is_smaller_is_not_a_faster_step():
    trial = Trial()
    for turn in range(2):
        for _ in range(5):
            size = (128, 32)[trial.arm(turn)]
            trial.add(Sample(size / 64, None, size, ("key", size)), turn)
    assert abs(trial.estimate().gain) < 1e-9 and not trial.verdict()


def test_a_change_that_costs_accuracy_must_be_worth_it():
    assert not any(measure(0.05, worth=0.13, seed=s).verdict() for s in range(20))
    assert all(measure(0.3, worth=0.13, seed=s).verdict() for s in range(20))


def test_two_steps_that_happen_to_agree_prove_little():
    trial = Trial()
    for turn in (0, 1):
        for _ in range(2):
            trial.add(Sample(1.0 - 0.02 * turn, None, 64, ()), turn)
    found = trial.estimate()
    assert found.low < 0 < found.gain and found.high - found.low > 4 * LEAST_NOISE
    assert trial.verdict() is None


def test_nothing_is_known_of_too_few_steps():
    trial = Trial()
    assert trial.verdict() is None and trial.estimate().gain == 0
    trial.add(Sample(1.0, None, 64, ()), 0)
    assert trial.verdict() is None and "never settled" in trial.why_not()


def test_short_steps_get_more_of_them():
    short, long = Trial(), Trial()
    for turn in range(2):
        for number in range(STEPS):
            short.add(Sample(0.001 + number * 1e-5, None, 1, ()), turn)
            long.add(Sample(1.0 + number * 1e-2, None, 1, ()), turn)
    assert long.exhausted and not short.exhausted
