"""The plateau label: an upward change in which the loss stands still while the forecast falls."""

from dataclasses import dataclass

from trajectory_guard.detect.state import PlainState

__all__ = ["Course", "Trend"]

BLOCK = 32
KEPT = 64


@dataclass(slots=True)
class Trend:
    """How loss and forecast moved since an onset, in nats."""

    loss: float
    forecast: float


class Course(PlainState):
    """Block means of loss and forecast over the last 2048 observations."""

    __slots__ = ("count", "forecast", "forecasts", "loss", "losses", "steps")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.forecasts: list[float] = []
        self.loss = 0.0
        self.forecast = 0.0
        self.count = 0

    def add(self, step: int, count: int, loss: float, forecast: float) -> None:
        """Take `count` observations up to `step`, at most a block, by the sums of loss and forecast."""
        self.loss += loss
        self.forecast += forecast
        self.count += count
        if self.count >= BLOCK:
            self.steps.append(step)
            self.losses.append(self.loss / self.count)
            self.forecasts.append(self.forecast / self.count)
            self.loss = self.forecast = 0.0
            self.count = 0
            if len(self.steps) > KEPT:
                del self.steps[0], self.losses[0], self.forecasts[0]

    def trend(self, onset: int) -> Trend | None:
        """Return the movement from the block that holds `onset` to the latest; None below 4 blocks."""
        first = next((i for i, step in enumerate(self.steps) if step >= onset), len(self.steps))
        last = len(self.steps) - 1
        if last - first < 3:
            return None
        return Trend(self.losses[last] - self.losses[first], self.forecasts[last] - self.forecasts[first])

    def plateau(self, onset: int, sigma: float) -> str | None:
        """Return the label when the loss moved less than a third of what the forecast fell, else None."""
        trend = self.trend(onset)
        # Two block means differ by sigma / 4 from noise alone: a fall must be twice that to be told from none.
        if trend is None or trend.forecast > -0.5 * sigma or abs(trend.loss) > -trend.forecast / 3.0:
            return None
        return f"plateau: the loss moved {trend.loss:+.4f} nats while the forecast fell {-trend.forecast:.4f}"
