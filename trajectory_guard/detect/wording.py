"""The words of an event: the criterion that fired, its number against its threshold, since when, what to do."""

import math

from trajectory_guard.detect.excursion import Excursion

__all__ = ["level_sentence", "percent", "recovery_sentence", "size_words"]

CRITERIA = {
    "mid": "mid CUSUM of clipped residuals {0:.1f} >= {1:.1f}",
    "slow": "slow CUSUM of clipped residuals {0:.1f} >= {1:.1f}",
    "paired": "CUSUM of residuals paired with the reference run {0:.1f} >= {1:.1f}",
    "certified_paired": "certified change evidence paired with the reference run {0:.2g} >= {1:.0e}",
    "certified": "certified change evidence {0:.2g} >= {1:.0e}",
    "off_forecast": "certified evidence outside the forecast's 95 % interval {0:.2g} >= {1:.0e}",
    "spike": "{0:.0f} >= {1:.0f} outliers (> 5 sigma and > 2 %) among the last 5 observations",
    "runaway": "runaway rule {0:.3g} > {1:.3g}",
    "too_good": "loss over forecast {0:.3g} < {1:.3g}",
}


def percent(size: float, forecast: float) -> float | None:
    """Return `size` in percent of the forecast; None where there is no forecast."""
    return 100.0 * size / forecast if forecast > 0.0 else None


def size_words(size: float, forecast: float, sigma: float) -> str:
    """Say a size in nats, percent and sigmas."""
    words = f"{size:+.4f} nats"
    if forecast > 0.0:
        words += f" ({100.0 * size / forecast:+.2f} %"
        words += f", {size / sigma:+.1f} sigma)" if sigma > 0.0 else ")"
    return words


def level_sentence(
    excursion: Excursion,
    size: float,
    forecast: float,
    sigma: float,
    *,
    rollback: int | None,
    notes: tuple[str, ...] = (),
) -> str:
    """Return the sentence of an open excursion after a criterion has fired."""
    against = "the forecast" if excursion.origin == 0.0 else "the run's own level"
    what = {
        "change_up": "the loss has risen above its course",
        "change_down": "the loss has fallen below its course",
        "off_forecast": f"the loss lies {'above' if excursion.sign > 0 else 'below'} the forecast",
        "spike": "the loss spikes",
        "too_good": "the loss is too good to be true",
    }.get(excursion.kind, excursion.kind)
    fired = CRITERIA[excursion.criteria[-1]].format(excursion.statistic, excursion.threshold)
    slow = excursion.detected - excursion.onset > 100
    since = f"since {'at least ' if slow else ''}about step {excursion.onset}"
    text = f"{what} {since}: {size_words(size, forecast, sigma)} against {against}; {fired}"
    for note in notes:
        text += f"; {note}"
    if excursion.sign > 0:
        text += f"; roll back to step {rollback}" if rollback is not None else "; no checkpoint known before the onset"
    return text + "."


def recovery_sentence(excursion: Excursion, forecast: float, sigma: float) -> str:
    """Return the sentence of an excursion that has ended."""
    end = excursion.last_step - excursion.calm
    width = max(1, end - excursion.onset + 1)
    sigmas = f", {excursion.peak / sigma:+.1f} sigma" if sigma > 0.0 else ""
    height = f"{excursion.peak:+.4f} nats{sigmas}"
    share = percent(excursion.peak, forecast)
    if share is not None and math.isfinite(share):
        height = f"{excursion.peak:+.4f} nats ({share:+.2f} %{sigmas})"
    return (
        f"{excursion.kind} of step {excursion.onset} is over: height {height}, width {width} steps, "
        f"area {excursion.area:+.3g} nats x steps, recovered {max(0, end - excursion.detected)} steps after the flag."
    )
