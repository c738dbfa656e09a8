"""PlannedChange: a change of the run that moves its loss or its noise on purpose, and is therefore declared."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from trajectory_guard.errors import TrajectoryGuardError

__all__ = ["ChangeKind", "PlannedChange"]

ChangeKind = Literal["data", "batch_size", "lr", "loss_definition", "restart"]
"""What changes. `"batch_size"` also has the noise learnt anew; after `"loss_definition"` the shift that is found counts
as part of the forecast."""


@dataclass(frozen=True, kw_only=True)
class PlannedChange:
    """A declared change: from its step on the guard learns the run's level anew and reports the shift.

    Args:
        step: first optimizer step under the new conditions.
        reason: what changes, in words; events repeat it.
        kind: `"data"`, `"batch_size"`, `"lr"`, `"loss_definition"` or `"restart"`.

    Raises:
        TrajectoryGuardError: the step is no positive integer, the reason is empty, or the kind is unknown.

    Example:
        >>> PlannedChange(step=5000, reason="data phase 2", kind="data").to_dict()
        {'step': 5000, 'reason': 'data phase 2', 'kind': 'data'}
    """

    step: int
    reason: str
    kind: ChangeKind = "data"

    def __post_init__(self) -> None:
        if not isinstance(self.step, int) or isinstance(self.step, bool) or self.step < 1:
            raise TrajectoryGuardError(f"the step of a planned change must be a positive integer, got {self.step!r}")
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise TrajectoryGuardError(f"a planned change needs its reason in words, got {self.reason!r}")
        if self.kind not in get_args(ChangeKind):
            raise TrajectoryGuardError(f"kind of change must be one of {get_args(ChangeKind)}, got {self.kind!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "PlannedChange":
        """Build a change from the mapping that `to_dict` returns.

        Raises:
            TrajectoryGuardError: a field is unknown, missing or out of range.
        """
        names = [f.name for f in fields(cls)]
        if not isinstance(content, Mapping) or not {"step", "reason"} <= set(content) <= set(names):
            raise TrajectoryGuardError(f"a planned change has the fields {names}, got {content!r:.80}")
        return cls(**content)
