"""Law: the protocol behind which every law along training stands."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from trajectory_guard.ladder import Ladder
from trajectory_guard.plan import RunPlan

__all__ = ["Law"]


class Law(Protocol):
    """A fitted law: it says the loss of any plan it is valid for, at any progress.

    Attributes:
        name: how files and the command line call it.
        varies: identity fields (of `ladder.RUNG_FIELDS`) in which rungs and plan may differ under this law; in all
            others a difference is judged by the recipe check.
    """

    name: ClassVar[str]
    varies: ClassVar[frozenset[str]]

    @classmethod
    def fit(cls, ladder: Ladder) -> Self:
        """Fit the law to a ladder; deterministic, so that equal ladders give equal parameters.

        Raises:
            TrajectoryGuardError: too few rungs, or rungs that differ in what this law needs to be equal.
        """
        ...

    def first_progress(self, plan: RunPlan) -> float:
        """Return the first progress at which this law says something about `plan`."""
        ...

    def loss(self, plan: RunPlan, progress: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss in nats per token at each progress (m,), all at or after `first_progress(plan)`."""
        ...

    def to_params(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values that `from_params` rebuilds exactly."""
        ...

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Rebuild the law.

        Raises:
            TrajectoryGuardError: a parameter is missing, unknown or out of range.
        """
        ...
