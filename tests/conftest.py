"""Fixtures shared by all tests."""

import os

# Before numpy and torch are imported: the arrays here are tiny, and threads that wait for each other cost more than
# they bring, most of all where other processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from trajectory_guard.channel import ChannelSeries
from trajectory_guard.curve import LossCurve
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan
from trajectory_guard.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public ladders and logs; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TRAJECTORY_GUARD_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"public data not found at {folder}; set TRAJECTORY_GUARD_DATA to its folder")
    return folder


def synthetic_loss(params: float, progress: np.ndarray) -> np.ndarray:
    """A made-up truth in nats for runs of 160 tokens per parameter: floor, size, data and learning-rate terms."""
    size = params / 1e4
    return 1.6 + 0.7 * size**-0.3 + 1.1 * size**-0.25 * (progress - 0.5 * progress**2) ** -0.25 + 0.05 * (1 - progress)


@pytest.fixture(scope="session")
def synthetic_rung() -> Callable[..., Rung]:
    """Factory of rungs with the loss of `synthetic_loss` and multiplicative noise, one log per seed."""

    def build(
        params: float = 2e4, *, noise: float = 0.0, seeds: Sequence[int] = (0,), steps: int = 1000, until: float = 1.0
    ) -> Rung:
        plan = RunPlan(
            total_steps=steps,
            tokens_per_step=round(160 * params / steps),
            active_params=params,
            schedule=LRSchedule(shape="linear", warmup=0.02),
            recipe=Recipe(tokenizer="byte", vocab_size=256),
        )
        step = np.arange(1, round(until * steps) + 1)
        truth = synthetic_loss(params, plan.progress(step))
        curves = []
        for seed in seeds:
            factor = np.exp(noise * np.random.default_rng([seed, round(params)]).standard_normal(len(step)))
            curves.append(LossCurve(step=step, tokens=plan.tokens(step), loss=truth * factor))
        return Rung(name=f"n{params:.0f}", plan=plan, curves=tuple(curves))

    return build


def synthetic_channels(params: float, progress: np.ndarray) -> dict[str, np.ndarray]:
    """A made-up truth: a gradient norm that triples late in training, and a bias that changes its sign."""
    size = params / 1e4
    rise = 1.0 / (1.0 + np.exp(-(progress - 0.6) / 0.03))
    return {"grad_norm": size**-0.2 * 3.0**rise, "router/bias": 0.5 - progress**0.5 + 0.05 * np.log(size)}


@pytest.fixture(scope="session")
def channel_truth() -> Callable[[float, np.ndarray], dict[str, np.ndarray]]:
    """What `channel_rung` adds its noise to, by size and progress."""
    return synthetic_channels


@pytest.fixture(scope="session")
def channel_rung(synthetic_rung: Callable[..., Rung]) -> Callable[..., Rung]:
    """Factory of rungs that also carry `synthetic_channels`, at a noise of `spread`."""

    def build(params: float = 2e4, *, spread: float = 0.15, **more: object) -> Rung:
        rung = synthetic_rung(params, noise=0.03, **more)
        channels: dict[str, list[ChannelSeries]] = {"grad_norm": [], "router/bias": []}
        for seed, curve in enumerate(rung.curves):
            noise = spread * np.random.default_rng([seed, round(params), 1]).standard_normal((2, len(curve)))
            truth = synthetic_channels(params, rung.plan.progress(curve.step))
            for name, value in (
                ("grad_norm", truth["grad_norm"] * np.exp(noise[0])),
                ("router/bias", truth["router/bias"] + noise[1]),
            ):
                channels[name].append(ChannelSeries(step=curve.step, value=value))
        series = {name: tuple(found) for name, found in channels.items()}
        return Rung(name=rung.name, plan=rung.plan, curves=rung.curves, channels=series)

    return build


@pytest.fixture(scope="session")
def channel_ladder(channel_rung: Callable[..., Rung]) -> Ladder:
    """The sizes of `synthetic_ladder`, with channels."""
    return Ladder(rungs=tuple(channel_rung(n) for n in (1e4, 1.6e4, 2.5e4, 4e4)))


@pytest.fixture(scope="session")
def synthetic_ladder(synthetic_rung: Callable[..., Rung]) -> Ladder:
    """Four rungs of 10,000 to 40,000 parameters with 5 % noise per step."""
    return Ladder(rungs=tuple(synthetic_rung(n, noise=0.05, seeds=(0, 1)) for n in (1e4, 1.6e4, 2.5e4, 4e4)))
