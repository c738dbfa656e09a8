"""From rows as they were written to one run as it counts: restarts, duplicates, numbering, tokens, noise, units."""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import median_filter

from trajectory_guard.plan import RunPlan

__all__ = ["Stitched", "first_loss_unit", "largest_gap", "numbering_offset", "residual_autocorrelation", "stitch"]
__all__ += ["steps_at_tokens", "tokens_per_point"]

MAX_DESCENTS = 0.25
"""Part of rows that step backward from which distinct steps are taken for unsorted rows, not for restarts."""

SMOOTHED_AUTOCORRELATION = 0.3
"""Lag-1 autocorrelation of residuals above which a log is called smoothed: raw logs of shuffled data lie within
-0.03..0.00 (10 public per-step logs), logs of an exponential mean of weight 0.9 at every tenth step 0.24..0.68
(tests/benchmarks/log_checks.py)."""


class Stitched(NamedTuple):
    """Which rows make up the run, and what was left out.

    Args:
        rows: indices into the rows given, ordered by strictly rising step.
        attempt: (n,) number of the attempt that each given row belongs to.
        restarts: (last step before, first step after) of every restart.
        superseded: rows of earlier attempts left out.
        duplicates: rows left out because a later row of the same attempt has the same step.
        resorted: the rows were not in the order of their steps, and no restart explains it.
    """

    rows: NDArray[np.int64]
    attempt: NDArray[np.int64]
    restarts: tuple[tuple[float, float], ...]
    superseded: int
    duplicates: int
    resorted: bool


def stitch(step: ArrayLike, purges: tuple[tuple[int, float], ...] = ()) -> Stitched:
    """Choose the rows that count in a log of a restarted or forked run: the latest attempt wins.

    An attempt begins where the step falls back. From its first step on, everything written earlier is superseded, the
    steps beyond the end of the new attempt too: they were trained with weights that were thrown away. Within an attempt
    the last row of a step counts. Rows of distinct steps that only stand in another order (newest first, two swapped
    by an asynchronous writer) are sorted.

    Args:
        step: (n,) finite step or token count of each row, in the order written.
        purges: (row, step): at this row a logger declared earlier rows of this step and later ones void.

    Example:
        >>> stitch([1, 2, 3, 4, 5, 3, 4]).rows.tolist()
        [0, 1, 5, 6]
        >>> stitch([1, 2, 4, 3, 5]).rows.tolist()
        [0, 1, 3, 2, 4]
    """
    s = np.asarray(step, dtype=np.float64)
    n = s.size
    falls = np.flatnonzero(np.diff(s) < 0) + 1
    if falls.size and not purges and _only_unsorted(s, falls):
        order = np.argsort(s, kind="stable")
        keep = np.append(s[order][1:] != s[order][:-1], True) if n else np.zeros(0, dtype=bool)
        return Stitched(order[keep], np.zeros(n, dtype=np.int64), (), 0, int(n - keep.sum()), True)
    attempt = np.zeros(n, dtype=np.int64)
    attempt[falls] = 1
    attempt = np.cumsum(attempt)
    # Looking back from the end, a row counts while its step lies below every later one.
    later = np.append(np.minimum.accumulate(s[::-1])[::-1][1:], np.inf) if n else s
    for row, at in purges:
        later[:row] = np.minimum(later[:row], at)
    kept = np.flatnonzero(s < later)
    lost = np.flatnonzero(~(s < later))
    following = np.minimum(lost + 1, n - 1)
    twice = (s[following] == s[lost]) & (following != lost)
    restarts = tuple((float(s[row - 1]), float(s[row])) for row in falls)
    return Stitched(kept, attempt, restarts, int(np.sum(~twice)), int(np.sum(twice)), False)


def _only_unsorted(s: NDArray[np.float64], falls: NDArray[np.int64]) -> bool:
    ordered = np.unique(s)
    if ordered.size < s.size:
        return False
    if falls.size > MAX_DESCENTS * s.size:
        return True
    return bool(np.all(s[falls - 1] - s[falls] <= 2.0 * np.median(np.diff(ordered))))


def numbering_offset(step: ArrayLike, *, split: str, tokens_at_zero: float | None = None) -> int:
    """Return 1 for a log that counts steps from 0, else 0; a step of ours counts the update it belongs to.

    A training log counts from 0 when it has a step 0 (unless its tokens say that nothing was consumed then), any log
    when every step is one short of a multiple of the logging interval: 49, 99, 149.

    Args:
        step: (n,) rising steps.
        split: `"train"` or `"validation"`; an evaluation at step 0 is one before the first update.
        tokens_at_zero: tokens logged at step 0, if any.

    Example:
        >>> numbering_offset([49, 99, 149], split="train"), numbering_offset([50, 100, 150], split="train")
        (1, 0)
    """
    s = np.asarray(step, dtype=np.int64)
    if s.size == 0:
        return 0
    if s[0] == 0:
        return int(split == "train" and (tokens_at_zero is None or tokens_at_zero > 0))
    if s.size < 3:
        return 0
    interval = int(np.gcd.reduce(np.diff(s)))
    return int(interval > 1 and (s[0] + 1) % interval == 0)


def steps_at_tokens(tokens: ArrayLike, plan: RunPlan) -> NDArray[np.float64]:
    """Return the (fractional) step at which the plan has consumed each number of tokens, also past its horizon."""
    d = np.asarray(tokens, dtype=np.float64)
    firsts = np.array([first - 1.0 for first, _ in plan.batch_phases])
    sizes = np.array([size for _, size in plan.batch_phases], dtype=np.float64)
    consumed = plan.tokens(firsts)
    phase = np.clip(np.searchsorted(consumed, d, side="right") - 1, 0, None)
    return firsts[phase] + (d - consumed[phase]) / sizes[phase]


def tokens_per_point(step: NDArray[np.int64], plan: RunPlan, *, window_mean: bool) -> NDArray[np.float64]:
    """Return the tokens that each logged training loss averages: one step's, or all since the log before it."""
    before = np.concatenate(([max(0, 2 * step[0] - step[1]) if step.size > 1 else 0], step[:-1])) if window_mean else 0
    start = before if window_mean else step - 1
    return plan.tokens(step) - plan.tokens(np.minimum(start, step - 1))


def largest_gap(step: ArrayLike) -> tuple[int, int] | None:
    """Return the steps on both sides of the widest hole in a log, or None.

    A hole is wider than 5 times the 90 % quantile of the intervals and than 1 % of the steps logged.

    Example:
        >>> largest_gap([*range(1, 50), *range(200, 300)])
        (49, 200)
    """
    s = np.asarray(step, dtype=np.int64)
    if s.size < 10:
        return None
    width = np.diff(s)
    at = int(np.argmax(width))
    if width[at] > max(5 * np.quantile(width, 0.9), 0.01 * (s[-1] - s[0])):
        return int(s[at]), int(s[at + 1])
    return None


def residual_autocorrelation(loss: ArrayLike) -> float | None:
    r"""Return the lag-1 autocorrelation of a loss around its own smooth course; None for too few points.

    With r = loss - its running quadratic fit, this is \sum r_t r_(t+1) / \sum r_t^2, corrected for the
    filter, which gives white noise a slightly negative value. Raw per-step losses of shuffled data have about 0; a log
    that was smoothed before it was written has much more, and its scatter understates the noise.

    Args:
        loss: (n,) finite losses in logging order; the first tenth, where the loss falls fast, is left out.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> white = 3.0 + 0.01 * rng.standard_normal(2000)
        >>> smoothed = np.convolve(white, np.ones(10) / 10, mode="valid")
        >>> abs(residual_autocorrelation(white)) < 0.1, residual_autocorrelation(smoothed) > 0.6
        (True, True)
    """
    x = np.asarray(loss, dtype=np.float64)
    x = x[x.size // 10 :]
    if x.size < 60:
        return None
    # A short log covers much of the run's course: only a short filter follows it.
    window = 51 if x.size >= 1500 else 15
    half = window // 2
    weights = np.linalg.pinv(np.vander(np.arange(-half, half + 1), 3))[-1]
    # An outlier would pull the fit and correlate its neighbours: clip around a running median first.
    middle = median_filter(x, size=15, mode="nearest")
    scale = 1.4826 * float(np.median(np.abs(x[half:-half] - np.convolve(x, weights, mode="valid"))))
    if scale <= 0:
        return None
    x = np.clip(x, middle - 4 * scale, middle + 4 * scale)
    r = x[half:-half] - np.convolve(x, weights, mode="valid")
    r -= r.mean()
    power = float(np.dot(r, r))
    if power <= 0:
        return None
    response = -weights
    response[half] += 1.0
    return float(np.dot(r[:-1], r[1:]) / power - np.dot(response[:-1], response[1:]) / np.dot(response, response))


def first_loss_unit(first_loss: float, vocab_size: int) -> Literal["nats", "bits", "perplexity"] | None:
    """Name the unit in which an untrained model's loss was logged, or None where none explains it.

    A model that knows nothing has ln V nats, log2 V = 1.4427 ln V bits, and perplexity V. Nats are accepted from 0.9 to
    1.2 ln V (a careless initialisation starts high), bits within 5 % of log2 V, perplexity within a factor 2 of V.

    Example:
        >>> first_loss_unit(5.55, 256), first_loss_unit(8.0, 256), first_loss_unit(251.0, 256)
        ('nats', 'bits', 'perplexity')
    """
    if not (math.isfinite(first_loss) and first_loss > 0 and vocab_size > 1):
        return None
    entropy = math.log(vocab_size)
    if 0.9 <= first_loss / entropy <= 1.2:
        return "nats"
    if abs(first_loss / (entropy / math.log(2.0)) - 1.0) <= 0.05:
        return "bits"
    if 0.5 <= first_loss / vocab_size <= 2.0 and vocab_size > 32:
        return "perplexity"
    return None
