"""Learning rates by hand."""

import math

import pytest

pytest.importorskip("pydantic")
from megatrain.train.config import ScheduleSettings
from megatrain.train.schedule import lr_factor


def test_warm_up_then_cosine_down_to_the_floor() -> None:
    settings = ScheduleSettings(warmup_steps=4, min_lr=2e-4)
    factors = [lr_factor(settings, step, 12, 2e-3) for step in range(12)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], rel=1e-12)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert factors[4:] == pytest.approx(expected, rel=1e-12)
    assert factors[8] == pytest.approx(0.55, rel=1e-12)
    assert lr_factor(settings, 12, 12, 2e-3) == pytest.approx(0.1, rel=1e-12)


def test_without_warm_up_and_beyond_the_end() -> None:
    settings = ScheduleSettings()
    assert [lr_factor(settings, step, 2, 1.0) for step in range(2)] == pytest.approx([1.0, 0.5])
    # torch's schedulers ask for one step more than is taken.
    assert lr_factor(settings, 2, 2, 1.0) == 0.0


def test_constant() -> None:
    settings = ScheduleSettings(kind="constant", warmup_steps=2)
    assert [lr_factor(settings, step, 4, 1.0) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_warm_up_longer_than_the_run() -> None:
    settings = ScheduleSettings(warmup_steps=8)
    assert [lr_factor(settings, step, 2, 1.0) for step in range(3)] == [0.125, 0.25, 0.375]


def test_linear() -> None:
    settings = ScheduleSettings(kind="linear", warmup_steps=2, min_lr=0.2)
    factors = [lr_factor(settings, step, 6, 1.0) for step in range(6)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4], rel=1e-12)


def test_warm_up_stable_decay() -> None:
    settings = ScheduleSettings(kind="wsd", warmup_share=0.2, decay_share=0.4, min_lr=0.1)
    factors = [lr_factor(settings, step, 10, 1.0) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325], rel=1e-12)
    settings = ScheduleSettings(kind="wsd", decay_share=0)
    assert [lr_factor(settings, step, 3, 1.0) for step in range(3)] == [1.0, 1.0, 1.0]
    settings = ScheduleSettings(kind="wsd", warmup_steps=3, decay_share=1)  # the fall begins behind the rise
    assert [lr_factor(settings, step, 5, 1.0) for step in range(5)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.5])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_no_step_is_wasted(kind: str, steps: int) -> None:
    """A run of one step takes it at the peak; the last step of a longer one still learns, as in Hugging Face's."""
    settings = ScheduleSettings.model_validate({"kind": kind, "decay_share": 1})
    factors = [lr_factor(settings, step, steps, 1.0) for step in range(steps)]
    assert factors[0] == 1.0
    share = 0.5 * (1 - math.cos(math.pi / steps)) if kind == "cosine" else 1 / steps
    assert factors[-1] == pytest.approx(share)
