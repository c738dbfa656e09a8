"""Events that begin and end at one step, and the scene that events are told from."""

from dataclasses import dataclass
from typing import Any

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.detect.noise import NoiseChange
from trajectory_guard.detect.spike import SIGMAS
from trajectory_guard.detect.wording import percent, size_words

__all__ = ["OUTLIER_PAUSE", "Scene", "noise_event", "note", "outlier_event", "pairing_lost_event"]

OUTLIER_PAUSE = 200
"""Observations between two outlier events: healthy logs have one in 100-300 steps, and one tells as much as ten."""


@dataclass(slots=True)
class Scene:
    """One observation as the helpers of a judge see it; all but `step` in nats, `sigma` NaN while unknown."""

    step: int
    loss: float
    forecast: float
    residual: float
    sigma: float


def note(kind: str, step: int, sentence: str, *, severity: Severity = Severity.INFO, **numbers: Any) -> Event:
    """Return an event that begins and ends at one step."""
    return Event(
        kind=kind,
        severity=severity,
        state="closed",
        onset=step,
        detected=step,
        closed=step,
        sentence=sentence,
        **numbers,
    )


def outlier_event(scene: Scene, level: float) -> Event:
    """Return the event of one bad step over the run's own `level` (nats)."""
    excess = scene.residual - level
    known = scene.sigma > 0.0
    return note(
        "outlier",
        scene.step,
        f"one outlier at step {scene.step}: {size_words(excess, scene.forecast, scene.sigma if known else 0.0)}; "
        f"three of five would be a spike; the next {OUTLIER_PAUSE} observations report no other lone one.",
        size_nats=excess,
        size_percent=percent(excess, scene.forecast),
        size_sigma=excess / scene.sigma if known else None,
        statistic=excess / scene.sigma if known else None,
        threshold=SIGMAS,
    )


def noise_event(step: int, ratio: float) -> Event:
    """Return the event of noise that is now `ratio` times what it was."""
    limit = NoiseChange.HIGH if ratio > 1.0 else NoiseChange.LOW
    return note(
        "noise_changed",
        step,
        f"the noise of the loss is {ratio:.2f} times what it was, for {NoiseChange.PATIENCE} observations (limit "
        f"{limit}): has the batch size, the data or the logging changed? Declare it with expect().",
        statistic=ratio,
        threshold=limit,
    )


def pairing_lost_event(step: int, correlation: float) -> Event:
    """Return the event of a reference run that no longer shares this run's noise."""
    return note(
        "pairing_lost",
        step,
        f"residuals no longer correlate with those of the reference run ({correlation:.2f}): the data order differs "
        "from here on; the guard goes on without the reference.",
        statistic=correlation,
    )
