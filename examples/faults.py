"""Faults to put into a run on purpose, so that the guard has something to find."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FaultKind = Literal["none", "lr", "data", "nan"]
LR_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and at which 1-based step it first acts.

    * `"lr"`: from that step on the learning rate is ten times the planned one;
    * `"data"`: from that step on every byte passes through one fixed random permutation of the 256 values;
    * `"nan"`: before that step's forward pass one weight becomes NaN.
    """

    kind: FaultKind = "none"
    step: int = 1

    def lr_factor(self, step: int) -> float:
        """Multiplier of the learning rate of a step."""
        return LR_FACTOR if self.kind == "lr" and step >= self.step else 1.0

    @property
    def shuffled_from(self) -> int | None:
        """First step with permuted bytes, for `Batches`."""
        return self.step if self.kind == "data" else None

    @torch.no_grad()
    def poison(self, weights: Tensor, step: int) -> None:
        """Spoil one of the weights at the step of a `"nan"` fault."""
        if self.kind == "nan" and step == self.step:
            weights.view(-1)[0] = float("nan")
