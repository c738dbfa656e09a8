"""LossIntake: from a framework's losses, micro-batch by micro-batch and rank by rank, to one observation a step.

This is the first room that knows torch. It makes the loss of the conventions out of what a loop has: the token-weighted
mean over the micro-batches of one optimizer step, over all ranks with one all-reduce, read from the device without
making it wait.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from trajectory_guard.detect.events import Verdict
from trajectory_guard.errors import MissingExtraError, TrajectoryGuardError

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

if TYPE_CHECKING:
    from trajectory_guard.guard import TrajectoryGuard

__all__ = ["ChannelSource", "LossIntake"]

logger = logging.getLogger(__name__)

Scalar = float | Tensor

ChannelSource = Callable[[], Mapping[str, Scalar]] | None
"""Gives other scalars of the step just ended, by name; None where there are none to watch."""


@dataclass(slots=True)
class _Observation:
    """One closed window on its way to the guard: [sum of loss x weight, sum of weights, ranks, *channels]."""

    step: int
    values: Tensor | list[float]
    channels: tuple[str, ...]
    counted: bool
    copied: "torch.cuda.Event | None" = None

    def read(self) -> list[float]:
        if isinstance(self.values, Tensor):
            if self.copied is not None:
                self.copied.synchronize()
            self.values = self.values.tolist()
        return self.values


class LossIntake:
    """Feeds a guard one loss per optimizer step, from tensors on any device.

    The loss of a step is sum(loss_i x tokens_i) / sum(tokens_i) over its micro-batches i, on all ranks when
    `average_ranks` is set. Without token counts every micro-batch weighs the same. A micro-batch of 0 tokens adds
    nothing (its mean is 0 / 0), and a step of 0 tokens is not observed.

    **Lag.** A loss on the CPU is judged at once. A loss on an accelerator is copied asynchronously (on CUDA into
    pinned memory) and judged `lag` steps later, so that no step waits for the device: `Verdict.step` is the step
    judged. The lag is a fixed number of steps, never "when it happens to be ready", so that every rank judges the same
    step at the same moment and a stop is decided everywhere at once. `drain` judges what is left.

    Args:
        guard: the guard that judges; the intake's own `step` is the last one ended, 0 before the first.
        lag: steps between a device loss and its verdict, at least 1.
        average_ranks: average over all ranks of the default process group, where there is one, with one all-reduce of a
            handful of numbers per `end_step`. Every rank must then call `end_step` for the same steps. Leave it off
            when the loss is already the mean over ranks.
        channels: called at the end of every step for other scalars, by name, the same on every rank. If it fails, it is
            reported once and asked no more; with `average_ranks` the error is raised: the other ranks wait for numbers.

    Raises:
        TrajectoryGuardError: a lag below 1.

    Example:
        >>> import torch
        >>> from trajectory_guard.forecast import Forecast
        >>> from trajectory_guard.guard import TrajectoryGuard
        >>> from trajectory_guard.lr_schedule import LRSchedule
        >>> from trajectory_guard.plan import RunPlan
        >>> plan = RunPlan(total_steps=10, tokens_per_step=8, active_params=9, schedule=LRSchedule(shape="constant"))
        >>> forecast = Forecast(plan, progress=[0.0, 1.0], loss=[3.0, 2.0], half_widths={0.8: 0.01, 0.95: 0.02})
        >>> with LossIntake(TrajectoryGuard(forecast)) as watch:
        ...     verdict = watch.observe(1, torch.tensor(2.95))
        >>> verdict.step, round(verdict.loss, 2), round(verdict.forecast, 2)
        (1, 2.95, 2.9)
    """

    def __init__(
        self, guard: "TrajectoryGuard", *, lag: int = 2, average_ranks: bool = False, channels: ChannelSource = None
    ) -> None:
        if not isinstance(lag, int) or lag < 1:
            raise TrajectoryGuardError(f"lag must be an integer of at least 1 (steps), got {lag!r}")
        self.guard = guard
        self.lag = lag
        self.average_ranks = average_ranks
        self._channels = channels
        self.step: int = 0
        self._pending: deque[_Observation] = deque()
        self._ring: list[Tensor | None] = [None] * (lag + 1)
        self._copies = 0
        self._off = False
        self._open_window()

    @property
    def should_stop(self) -> bool:
        """True when the guard asks for the run to stop; the same on every rank."""
        return self.guard.should_stop

    def observe(
        self,
        step: int,
        loss: Scalar,
        *,
        tokens: Scalar | None = None,
        channels: Mapping[str, Scalar] | None = None,
    ) -> Verdict | None:
        """Take the loss of a whole optimizer step: `add` and `end_step` in one call, for loops without accumulation.

        Args:
            step: 1-based optimizer step.
            loss: scalar on any device, in nats per token.
            tokens: predicted tokens that this loss averages.
            channels: other scalars to watch, by name.

        Returns:
            The newest verdict: of this step for a loss on the CPU, of `lag` steps ago for one on a device; None when
            there is none yet.
        """
        self.add(loss, tokens=tokens)
        verdicts = self.end_step(step, channels=channels)
        return verdicts[-1] if verdicts else None

    def add(self, loss: Scalar, *, tokens: Scalar | None = None) -> None:
        """Add one micro-batch to the step in progress; the tensor is read or copied, never kept.

        Args:
            loss: mean loss of the micro-batch in nats per token, *not* divided by the accumulation.
            tokens: predicted tokens in that mean; on all micro-batches of a step or on none.

        Raises:
            TrajectoryGuardError: the loss is not a scalar, tokens are negative, or only some micro-batches have tokens.
        """
        value = _scalar("loss", loss)
        weight = 1.0 if tokens is None else _scalar("tokens", tokens)
        if isinstance(weight, float) and not 0 <= weight < math.inf:
            raise TrajectoryGuardError(f"tokens must be a count of at least 0, got {tokens!r}")
        if self._micro_batches and self._counted != (tokens is not None):
            raise TrajectoryGuardError("some micro-batches of this step came with tokens and some without; give all")
        self._counted = tokens is not None
        self._micro_batches += 1
        if isinstance(value, float) and isinstance(weight, float):
            term: Scalar = value * weight if weight > 0 else 0.0
        else:
            device = next(v.device for v in (value, weight) if isinstance(v, Tensor))
            on_device = _on(device, weight)
            # The mean over no tokens is NaN, and NaN x 0 is NaN too: leave it out.
            term = torch.where(on_device > 0, _on(device, value) * on_device, 0.0)
        self._sum = self._sum + term
        self._weight = self._weight + weight

    def end_step(self, step: int | None = None, *, channels: Mapping[str, Scalar] | None = None) -> tuple[Verdict, ...]:
        """Close the step in progress after its optimizer update.

        Args:
            step: 1-based optimizer step; by default the one after the last.
            channels: other scalars to watch, by name; averaged over ranks with the loss, so every rank gives the same.

        Returns:
            The verdicts that became due, oldest first: none, one, or after a resume several.
        """
        total, weight, counted = self._sum, self._weight, self._counted
        self._open_window()
        self.step = step = self.step + 1 if step is None else step
        if self._off:
            return ()
        if self._channels:
            channels = {**self._read_channels(), **(channels or {})}
        queued = channels or self.average_ranks or self._pending
        if not queued and isinstance(total, float) and isinstance(weight, float):
            return self._observe(step, total, weight, counted, None)  # The usual case, without the queue.
        channels = channels or {}
        values: list[Scalar] = [total, weight, 1.0, *(_scalar(n, v) for n, v in channels.items())]
        if self.average_ranks and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            reduced = self._over_ranks(values)
            if reduced is None:
                return ()
            self._enqueue(step, reduced, tuple(channels), counted)
        else:
            self._enqueue(step, _vector(values), tuple(channels), counted)
        return self._judge_due()

    def _read_channels(self) -> Mapping[str, Scalar]:
        try:
            return self._channels() if self._channels else {}
        except Exception as error:
            if self.average_ranks:
                raise
            self._channels = None
            logger.error("the function that gives the channels failed; they are watched no more", exc_info=error)
            return {}

    def drain(self) -> tuple[Verdict, ...]:
        """Judge every step that is still on its way; call it at the end of a run and on an exception."""
        return self._judge(len(self._pending))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain Python: the guard's, the step in progress, and the losses not yet judged.

        It waits for the device and judges nothing, so that ranks stay together whichever of them saves.
        """
        window = None
        if self._micro_batches:
            window = [float(self._sum), float(self._weight), self._counted, self._micro_batches]
        pending = [[p.step, list(p.read()), list(p.channels), p.counted] for p in self._pending]
        return {"guard": self.guard.state_dict(), "step": self.step, "window": window, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, from any framework's run; a guard's own state is taken as well."""
        if "guard" not in state:
            self.guard.load_state_dict(state)
            self.step = self.guard.last_step
            return
        self.guard.load_state_dict(state["guard"])
        self.step = state["step"]
        self._open_window()
        if state["window"] is not None:
            self._sum, self._weight, self._counted, self._micro_batches = state["window"]
        self._pending = deque(
            _Observation(step, list(values), tuple(names), counted) for step, values, names, counted in state["pending"]
        )

    def close(self) -> None:
        """Judge what is on its way and close the guard with its sinks; leaving the context does the same."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.drain()
        except Exception as second:
            if error is None:
                raise
            logger.error("the losses of the last steps could not be judged", exc_info=second)
        finally:
            self.guard.close()

    def _open_window(self) -> None:
        self._sum: Scalar = 0.0
        self._weight: Scalar = 0.0
        self._micro_batches = 0
        self._counted = False

    def _over_ranks(self, values: list[Scalar]) -> Tensor | list[float] | None:
        """Sum over ranks; a failure switches the intake off and leaves it to the framework to report its lost peer."""
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        if device.type == "cpu" and dist.get_backend() == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        vector = torch.stack([_on(device, value) for value in values])
        try:
            dist.all_reduce(vector)
        except RuntimeError as error:
            self._off = True
            logger.error("the loss could not be averaged over ranks; the guard is switched off", exc_info=error)
            return None
        return vector.tolist() if device.type == "cpu" else vector

    def _enqueue(self, step: int, values: Tensor | list[float], names: tuple[str, ...], counted: bool) -> None:
        copied = None
        if isinstance(values, Tensor) and values.is_cuda:
            slot = self._copies % len(self._ring)
            self._copies += 1
            host = self._ring[slot]
            if host is None or host.shape != values.shape:
                host = self._ring[slot] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            values = host
        self._pending.append(_Observation(step, values, names, counted, copied))

    def _judge_due(self) -> tuple[Verdict, ...]:
        due = max(0, len(self._pending) - self.lag)
        while due < len(self._pending) and isinstance(self._pending[due].values, list):
            due += 1
        return self._judge(due)

    def _judge(self, count: int) -> tuple[Verdict, ...]:
        verdicts: tuple[Verdict, ...] = ()
        for _ in range(count):
            observation = self._pending.popleft()
            total, weight, ranks, *rest = observation.read()
            channels = {name: value / ranks for name, value in zip(observation.channels, rest, strict=True)}
            verdicts += self._observe(observation.step, total, weight, observation.counted, channels or None)
        return verdicts

    def _observe(self, step: int, total: float, weight: float, counted: bool, channels: Any) -> tuple[Verdict, ...]:
        if weight == 0:
            return ()
        tokens = round(weight) if counted and math.isfinite(weight) else None
        return (self.guard.observe(step, total / weight, tokens=tokens, channels=channels),)


def _scalar(name: str, value: Any) -> Scalar:
    """A float for what the CPU holds, else a detached 0-d tensor on its device, DTensors made whole."""
    if type(value) is Tensor and value.dim() == 0 and _on_host(value):
        return float(value.item())  # The usual case, without the checks below.
    if not isinstance(value, Tensor):
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            return float(value)
        except (TypeError, ValueError) as error:
            raise TrajectoryGuardError(f"{name} must be a number or a scalar tensor, got {value!r}") from error
    local: Any = value.detach()
    if hasattr(local, "full_tensor"):  # A DTensor; a collective runs only where its parts differ.
        local = local.full_tensor()
    if local.numel() != 1:
        raise TrajectoryGuardError(
            f"{name} must be a scalar, got a tensor of shape {tuple(local.shape)}; give its mean"
        )
    return float(local) if _on_host(local) else local.reshape(())


def _on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def _on(device: torch.device, value: Scalar) -> Tensor:
    """The value as a new 0-d tensor on the device, in float64 where there is one; never waits for the device."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype, copy=True)
    return torch.full((), value, dtype=dtype, device=device)


def _vector(values: list[Scalar]) -> Tensor | list[float]:
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    if device is None:
        return [float(value) for value in values]
    return torch.stack([_on(device, value) for value in values])
