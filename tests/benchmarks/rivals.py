"""Loss rules of other tools, re-stated from their documentation, each as a function from losses to alarm flags."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _windows(loss: Array, length: int) -> tuple[Array, Array]:
    """Mean and sd of the `length` values before each index; NaN where they are fewer or not finite."""
    padded = np.concatenate([np.full(length, np.nan), loss])[:-1]
    view = np.lib.stride_tricks.sliding_window_view(padded, length)
    return view.mean(axis=1), view.std(axis=1, ddof=1)


def lightning_spike(loss: Array) -> NDArray[np.bool_]:
    """lightning.fabric.utilities.spike.SpikeDetection, defaults: not finite, or risen and off by 2 x the mean of 10."""
    mean, _ = _windows(loss, 10)
    rising = np.concatenate([[False], np.diff(loss) > 0])
    return ~np.isfinite(loss) | (rising & (np.abs(loss - mean) >= 2.0 * np.abs(mean)))


def olmo_core(loss: Array) -> NDArray[np.bool_]:
    """olmo_core.optim.SkipStepOptimizer, defaults: over mean + 6 sd of the last 128 losses."""
    mean, sd = _windows(loss, 128)
    return loss > mean + 6.0 * sd


def llm_foundry(loss: Array) -> NDArray[np.bool_]:
    """llmfoundry.callbacks.KillLossSpike, defaults: over 2 x the mean of 100 for 4 steps, or half of 100 over 10."""
    mean, _ = _windows(loss, 100)
    high = loss >= 2.0 * mean
    run = np.convolve(high, np.ones(4), "full")[: len(loss)] >= 4
    many = np.convolve(loss > 10.0, np.ones(100), "full")[: len(loss)] >= 50
    return run | many


def megatron(loss: Array) -> NDArray[np.bool_]:
    """megatron.core.rerun_state_machine with --check-for-spiky-loss: NaN, inf, or 10 x the largest of the first 100."""
    return ~np.isfinite(loss) | ((np.arange(len(loss)) >= 100) & (loss > 10.0 * np.nanmax(np.abs(loss[:100]))))


def wandb_z_score(loss: Array) -> NDArray[np.bool_]:
    """W&B automations, z-score alert with a window of 30 and 3 standard deviations, either side."""
    mean, sd = _windows(loss, 30)
    return np.abs(loss - mean) > 3.0 * sd


RIVALS: dict[str, Callable[[Array], NDArray[np.bool_]]] = {
    "Lightning": lightning_spike,
    "OLMo-core 6s": olmo_core,
    "llm-foundry": llm_foundry,
    "Megatron x10": megatron,
    "W&B z 30/3": wandb_z_score,
}
