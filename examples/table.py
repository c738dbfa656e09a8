"""Forecast against observed loss along a run, as a table made from the run itself."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajectory_guard.forecast import Forecast

WINDOW = 0.02
"""Observed losses are means over this share of training: single steps carry 4 % of noise."""
FROM = 0.10
"""The comparison begins here; before it the loss is a transient."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Window means of a run beside its forecast."""

    table: str
    """The windows and the summary, ready to print."""
    windows: int
    mean_percent: float
    """Mean over windows of |observed / forecast - 1|, in percent."""
    max_percent: float
    """The largest of them."""
    half_width_percent: float
    """The largest 95 % half-width of the forecast over the windows."""


def compare(losses: Sequence[float], forecast: Forecast, *, every: int = 2) -> Comparison:
    """Compare per-step losses of steps 1.. with a forecast, over the windows of which every loss is known.

    Args:
        losses: observed loss in nats of steps 1, 2, ...; NaN, or absent at the end, where the run was not seen.
        forecast: the forecast of the run's plan.
        every: print every so many windows; the summary counts all.
    """
    total = forecast.plan.total_steps
    observed = np.asarray(losses, dtype=np.float64)
    edges = np.round(np.arange(round(FROM / WINDOW), round(1 / WINDOW) + 1) * WINDOW * total).astype(int)
    lines = ["     step  progress  observed  forecast   95 % interval   observed - forecast"]
    errors, widths = [], []
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        if last > len(observed) or not np.isfinite(observed[first:last]).all():
            continue
        steps = np.arange(first + 1, last + 1)
        seen, expected = observed[first:last].mean(), float(np.mean(forecast.loss(steps)))
        lower, upper = (float(np.mean(bound)) for bound in forecast.interval(steps, level=0.95))
        error = 100 * (seen / expected - 1)
        errors.append(abs(error))
        widths.append(50 * (upper - lower) / expected)
        if number % every == every - 1 or last == total:
            progress = f"{last / total:9.0%} {seen:9.4f} {expected:9.4f}   [{lower:.3f}, {upper:.3f}]"
            lines.append(f"{last:9,d} {progress}   {seen - expected:+8.4f} {error:+6.2f} %")
    if not errors:
        text = f"No window of {WINDOW:.0%} after {FROM:.0%} of training was seen whole."
        return Comparison(table=text, windows=0, mean_percent=np.nan, max_percent=np.nan, half_width_percent=np.nan)
    mean, largest, width = float(np.mean(errors)), float(np.max(errors)), float(np.max(widths))
    lines.append(
        f"{len(errors)} windows of {WINDOW:.0%} after {FROM:.0%} of training: mean error {mean:.2f} %, "
        f"largest {largest:.2f} %; 95 % half-width at most {width:.2f} %"
    )
    return Comparison(
        table="\n".join(lines),
        windows=len(errors),
        mean_percent=mean,
        max_percent=largest,
        half_width_percent=width,
    )
