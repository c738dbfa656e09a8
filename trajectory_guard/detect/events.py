"""Event, Severity and Verdict: what a guard says about one step, and about one excursion."""

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

__all__ = ["KINDS", "Event", "Severity", "Stage", "Verdict"]

KINDS = (
    "non_finite",
    "outlier",
    "spike",
    "change_up",
    "change_down",
    "off_forecast",
    "too_good",
    "noise_changed",
    "smoothed_loss",
    "quantised_loss",
    "sparse_log",
    "first_loss",
    "late_start",
    "beyond_horizon",
    "tokens_mismatch",
    "planned_change",
    "rewound",
    "replayed_differs",
    "data_order_differs",
    "pairing_lost",
    "channel",
)
"""Every kind of event, in the words of docs/detection.md; a channel's is `"channel/NAME"`."""


class Severity(enum.IntEnum):
    """How much an event asks for: the higher, the more.

    INFO is worth knowing. WARNING is likely real but carries no guarantee. CERTIFIED passed the test with a proved
    mean time to a false alarm. CRITICAL means the run is being lost, or its losses cannot be true.
    """

    INFO = 1
    WARNING = 2
    CERTIFIED = 3
    CRITICAL = 4


@dataclass(frozen=True, kw_only=True)
class Event:
    """One excursion of a run from its forecast; what is unknown is None.

    Args:
        kind: name of the criterion that fired, e.g. `"change_up"`.
        severity: highest severity reached.
        state: `"open"` while the excursion lasts, else `"closed"`.
        onset: estimated first step of the excursion.
        detected: step at which it was flagged.
        closed: step at which it ended.
        size_nats: loss above (+) or below (-) what was expected, in nats.
        size_percent: the same in percent of the forecast.
        size_sigma: the same in standard deviations of one observation.
        statistic: value of the criterion's statistic when it fired.
        threshold: the limit that the statistic passed.
        rollback_step: suggested step to roll back to.
        sentence: the event in words: which criterion, its number against its threshold, since when.
    """

    kind: str
    severity: Severity
    state: Literal["open", "closed"]
    onset: int | None
    detected: int
    closed: int | None = None
    size_nats: float | None = None
    size_percent: float | None = None
    size_sigma: float | None = None
    statistic: float | None = None
    threshold: float | None = None
    rollback_step: int | None = None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain JSON values; the severity by its lower-case name."""
        return {**asdict(self), "severity": self.severity.name.lower()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Event":
        """Build an event from the mapping that `to_dict` returns.

        Raises:
            ValueError: a field is unknown, missing or of the wrong type, or the severity has no such name.
        """
        names = {f.name for f in fields(cls)}
        if set(content) != names:
            raise ValueError(f"an event has exactly the fields {sorted(names)}, got {sorted(content)}")
        try:
            severity = Severity[str(content["severity"]).upper()]
        except KeyError:
            known = [s.name.lower() for s in Severity]
            raise ValueError(f"event severity must be one of {known}, got {content['severity']!r}") from None
        for name, value in content.items():
            if name != "severity" and not (name in _MAY_BE_NONE and value is None) and not _fits(name, value):
                raise ValueError(f"event field {name!r} cannot be {value!r:.80}")
        return cls(**{**content, "severity": severity})


_STEPS = frozenset({"onset", "detected", "closed", "rollback_step"})
_MAY_BE_NONE = frozenset({f.name for f in fields(Event)} - {"kind", "state", "detected", "sentence"})


def _fits(name: str, value: Any) -> bool:
    if name == "state":
        return value in ("open", "closed")
    if name in ("kind", "sentence"):
        return isinstance(value, str)
    return isinstance(value, int if name in _STEPS else (int, float)) and not isinstance(value, bool)


Stage = Literal["no_forecast", "warm_up", "calibrating", "watching"]
"""What a guard can judge at a step: only non-finite losses, not yet changes, not yet changes, everything."""


@dataclass(slots=True)
class Verdict:
    """What the guard says about one observation.

    Args:
        step: the step judged.
        loss: the loss observed, in nats (NaN and infinities included).
        forecast: the loss expected at this step, in nats; NaN where there is no forecast.
        lower: lower end of the 95 % interval, in nats.
        upper: upper end of the 95 % interval, in nats.
        residual_nats: loss - forecast.
        residual_sigma: residual in standard deviations of one observation; NaN until the noise is known.
        stage: what could be judged.
        statistic: largest change statistic at this step.
        threshold: the threshold that belongs to it.
        events: events that were opened, updated or closed at this step.
    """

    step: int
    loss: float
    forecast: float
    lower: float
    upper: float
    residual_nats: float
    residual_sigma: float
    stage: Stage
    statistic: float
    threshold: float
    events: tuple[Event, ...] = ()

    @property
    def residual_percent(self) -> float:
        """Residual in percent of the forecast."""
        return 100.0 * self.residual_nats / self.forecast

    @property
    def severity(self) -> Severity | None:
        """Highest severity among the events of this step; None when there is none."""
        return max((event.severity for event in self.events), default=None)
