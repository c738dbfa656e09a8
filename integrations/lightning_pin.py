"""Keeps the checkpoint to roll back to: Lightning deletes old ones without knowing which was the last good."""

import logging
from collections.abc import Iterable
from typing import Any

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.guard import TrajectoryGuard

__all__ = ["pin_last_good"]

logger = logging.getLogger("trajectory_guard")


def pin_last_good(trainer: Any, guard: TrajectoryGuard) -> None:
    """Refuse to delete the checkpoint that an open event of at least warning is to be rolled back to.

    That is the event's `rollback_step`, or where it names none the newest checkpoint before the onset. Every callback
    deletes through `trainer.strategy.remove_checkpoint`, which is wrapped here for this trainer. A file that was kept
    is forgotten by its callback and stays until it is deleted by hand.

    Args:
        trainer: the Trainer, before its first batch.
        guard: the guard whose events count.
    """
    steps: dict[str, int] = {}
    strategy = trainer.strategy
    save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

    def save_and_note(checkpoint: dict[str, Any], filepath: Any, *args: Any, **keywords: Any) -> Any:
        steps[str(filepath)] = checkpoint["global_step"]
        return save(checkpoint, filepath, *args, **keywords)

    def remove_unless_pinned(filepath: Any) -> None:
        step = steps.get(str(filepath))
        if step is not None and step in {_last_good(event, steps.values()) for event in guard.open_events}:
            logger.warning("%s is kept: it is the checkpoint to roll back to", filepath)
        else:
            remove(filepath)

    strategy.save_checkpoint, strategy.remove_checkpoint = save_and_note, remove_unless_pinned


def _last_good(event: Event, saved: Iterable[int]) -> int | None:
    if event.severity < Severity.WARNING:
        return None
    before = (step for step in saved if step < (event.onset or event.detected))
    return max(before, default=None) if event.rollback_step is None else event.rollback_step
