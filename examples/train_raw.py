"""Train the target in a plain loop, watched by a guard that loaded the committed fit.

python examples/train_raw.py                        # healthy: one to four minutes
python examples/train_raw.py --fault data           # bytes permuted from half of training on
"""

from options import ACTIONS, Setup, parse
from outcome import tell
from recipe import Training

from trajectory_guard import TrajectoryGuard, load_fit
from trajectory_guard.sinks.console import ConsoleSink
from trajectory_guard.sinks.jsonl import JsonlSink
from trajectory_guard.sinks.tensorboard import TensorBoardSink


def train(setup: Setup) -> tuple[list[float], TrajectoryGuard]:
    """Train to the last step, or to the guard's flag."""
    forecast = load_fit(setup.fit).forecast(setup.plan)
    sinks = [ConsoleSink(), TensorBoardSink(setup.folder), JsonlSink(setup.folder / "events.jsonl")]
    training = Training(setup.run, corpus=setup.corpus, seed=setup.seed, fault=setup.fault)
    losses = []
    with TrajectoryGuard(forecast, actions=ACTIONS, sinks=sinks, log_every_n_steps=50) as guard:
        for step in range(1, setup.last_step + 1):
            loss = training.step(step)
            losses.append(loss.item())
            loads = training.model.expert_loads()
            guard.observe(step, losses[-1], tokens=setup.run.tokens_per_step, channels=loads)
            if guard.should_stop:
                break
    return losses, guard


def main() -> None:
    setup = parse(__doc__ or "")
    tell(setup, *train(setup))


if __name__ == "__main__":
    main()
