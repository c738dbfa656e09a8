"""Which column of a log is the step, the tokens, the learning rate, and the watched loss."""

from collections.abc import Iterable

from trajectory_guard.conventions import Split

__all__ = ["find_lr", "find_metric", "find_step", "find_tokens"]

# Names as the loggers of the day write them, compared without case. The first that a log has is taken: a counter of
# optimizer updates before `_step`, which in W&B counts calls of log().
STEP = (
    "step",
    "global_step",
    "trainer/global_step",
    "train/global_step",
    "train/step",
    "optimizer_step",
    "iteration",
    "iter",
    "iters",
    "update",
    "updates",
    "_step",
)
TOKENS = (
    "tokens",
    "tokens_seen",
    "consumed_tokens",
    "train/tokens",
    "train/tokens_seen",
    "total_tokens",
    "throughput/total_tokens",
    "throughput/tokens",
    "num_tokens",
    "num_input_tokens_seen",
    "train/num_input_tokens_seen",
)
LR = (
    "lr",
    "learning_rate",
    "train/lr",
    "train/learning_rate",
    "optim/learning_rate",
    "optimizer/lr",
    "learning-rate",
    "learning-rate/learning-rate",
)
TRAIN_LOSS = (
    "loss",
    "train_loss",
    "train/loss",
    "training_loss",
    "loss/train",
    "train_loss_step",
    "train/cross_entropy",
    "train/ce_loss",
    "train/crossentropyloss",
    "loss/train/total",
    "lm loss",
    "lm_loss",
    "lm-loss-training/lm loss",
    "global_avg_loss",
    "loss_metrics/global_avg_loss",
)
VALIDATION_LOSS = (
    "val_loss",
    "eval_loss",
    "validation_loss",
    "val/loss",
    "eval/loss",
    "validation/loss",
    "loss/val",
    "loss/eval",
    "loss/validation",
    "lm-loss-validation/lm loss validation",
)


def find_step(names: Iterable[str]) -> str | None:
    """Return the column that counts optimizer updates, or None."""
    return _first(names, STEP)


def find_tokens(names: Iterable[str]) -> str | None:
    """Return the column that counts training tokens consumed, or None."""
    return _first(names, TOKENS)


def find_lr(names: Iterable[str]) -> str | None:
    """Return the column of the learning rate, or None; of several parameter groups the first.

    Example:
        >>> find_lr(["step", "lr-AdamW/pg1", "lr-AdamW/pg2"])
        'lr-AdamW/pg1'
    """
    listed = list(names)
    return _first(listed, LR) or next((name for name in listed if name.lower().startswith("lr-")), None)


def find_metric(names: Iterable[str], metric: str, split: Split, *, split_column: bool = False) -> str | None:
    """Return the column of a metric of one split, or None where the log has no such column.

    The name itself counts before any other spelling. For `"loss"`, the usual names of a training or validation loss
    are tried; a validation loss is never read from a column that does not say so, unless a `split` column does.

    Example:
        >>> find_metric(["step", "loss", "val_loss"], "loss", "validation")
        'val_loss'
    """
    listed = list(names)
    plain = metric.lower() == "loss"
    if not (plain and split == "validation" and not split_column):
        if metric in listed:
            return metric
        found = _first(listed, (metric.lower(),))
        if found is not None:
            return found
    if not plain:
        prefixes = ("train/", "train_") if split == "train" else ("val/", "val_", "eval/", "eval_", "validation/")
        return _first(listed, tuple(prefix + metric.lower() for prefix in prefixes))
    if split == "train" or split_column:
        return _first(listed, TRAIN_LOSS)
    return _first(listed, VALIDATION_LOSS)


def _first(names: Iterable[str], wanted: tuple[str, ...]) -> str | None:
    by_lower: dict[str, str] = {}
    for name in names:
        by_lower.setdefault(name.strip().lower(), name)
    return next((by_lower[name] for name in wanted if name in by_lower), None)
