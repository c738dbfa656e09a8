"""Train the target with Lightning Fabric, watched by a guard that loaded the committed fit.

python examples/train_fabric.py                     # healthy: one to four minutes
python examples/train_fabric.py --fault nan         # one weight becomes NaN at half of training
"""

import logging
from typing import Any

from lightning.fabric import Fabric
from options import ACTIONS, Setup, parse
from outcome import tell
from recipe import CLIP, Training
from trajectory_guard.integrations.fabric import GuardConfig, watch_fabric

from trajectory_guard import TrajectoryGuard
from trajectory_guard.sinks.tensorboard import TensorBoardSink


def train(setup: Setup) -> tuple[list[float], TrajectoryGuard]:
    """Train to the last step, or to the guard's flag."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    training = Training(setup.run, corpus=setup.corpus, seed=setup.seed, fault=setup.fault)
    prepared: Any = fabric.setup(training.model, training.optimizer)
    model, optimizer = prepared
    model.mark_forward_method("loss")
    config = GuardConfig(
        setup.fit,
        setup.plan,
        actions=ACTIONS,
        events_path=setup.folder / "events.jsonl",
        report_path=setup.report,
        sinks=[TensorBoardSink(setup.folder)],
        channels=training.model.expert_loads,
    )
    watch = watch_fabric(fabric, config)
    losses = []
    with watch:
        for step in range(1, setup.last_step + 1):
            setup.fault.poison(training.model.head, step)
            loss = model.loss(*training.batches(step))
            optimizer.zero_grad()
            fabric.backward(loss)
            # Without an exception at a NaN, which the guard is there to judge.
            fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()
            training.schedule.step()
            losses.append(loss.item())
            watch.observe(step, loss, tokens=setup.run.tokens_per_step)
            if watch.should_stop:
                break
    return losses, watch.guard


def main() -> None:
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    setup = parse(__doc__ or "")
    tell(setup, *train(setup))


if __name__ == "__main__":
    main()
