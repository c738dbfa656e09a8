"""What a channel's course is worth: gradient norms of the labelled faults with and without one, and made-up bends.

    python tests/benchmarks/channels.py     # ten seconds; the first table needs the public data

Of the labelled runs the three healthy ones (two seeds, and another data order) stand for the rungs of a ladder; the
course of each run is that of healthy_s1, and of healthy_s0 for healthy_s1 itself.
"""

import math

import numpy as np
from detection_data import fault_logs

from trajectory_guard.channel import ChannelCourse, ChannelSeries
from trajectory_guard.curve import LossCurve
from trajectory_guard.detect.channels import ChannelWatch
from trajectory_guard.detect.events import Event
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.laws.channel import fit_channel
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

WARMED_UP = 101
"""First step judged of the labelled runs: their learning rate rises for 100 steps."""


def opened(values: np.ndarray, course: np.ndarray | None, error: float, first: int = 1) -> list[Event]:
    """Events that a watch of `values` opens, the course given or not."""
    watch, events = ChannelWatch(), []
    for step, value in enumerate(values.tolist(), 1):
        if step >= first:
            expected = math.nan if course is None else float(course[step - 1])
            events += [e for e in watch.update("x", step, value, expected, error) or () if e.state == "open"]
    return events


def told(events: list[Event]) -> str:
    return "; ".join(f"{e.severity.name.lower()} at {e.detected} ({e.size_percent or 0:+.0f} %)" for e in events) or "-"


def faults() -> None:
    """Print what is said of the gradient norm of each labelled run."""
    logs = {name: log.channels["grad_norm"] for name, (_, log) in fault_logs().items()}
    rungs = []
    for number, name in enumerate(("healthy_s0", "healthy_s1", "healthy_s2_d2")):
        steps = np.arange(1, len(logs[name]) + 1)
        schedule = LRSchedule(shape="constant")
        # Sizes that hardly differ: no trend over them is looked for.
        plan = RunPlan(total_steps=len(steps), tokens_per_step=4096, active_params=1e6 + number, schedule=schedule)
        curve = LossCurve(step=steps, tokens=plan.tokens(steps), loss=np.ones(len(steps)))
        series = ChannelSeries(step=steps, value=logs[name])  # type: ignore[arg-type]
        rungs.append(Rung(name=name, plan=plan, curves=(curve,), channels={"x": (series,)}))
    law = fit_channel(Ladder(rungs=tuple(rungs)), "x")
    print(f"error of the course, one run left out: {100 * law.error:.1f} %")
    print(f"{'run':15s} {'own level':60s} against the course")
    for name, values in logs.items():
        points = law.points[name != "healthy_s1"]
        course = ChannelCourse(progress=points.progress, value=points.value)  # type: ignore[arg-type]
        expected = course.at(np.arange(1, len(values) + 1) / len(steps))
        own, guided = opened(values, None, math.nan, WARMED_UP), opened(values, expected, law.error, WARMED_UP)
        print(f"{name:15s} {told(own):60s} {told(guided)}", flush=True)


def bends(runs: int = 20) -> None:
    """Print false events of runs that triple, and delays of a step of x 1.6, the course off by a wave of 5 % rms."""
    print("steps, noise, rise: false events a run, runs of which the step is seen, median delay of those; own | course")
    for steps in (2000, 10_000):
        at = np.arange(1, steps + 1) / steps
        for noise in (0.1, 0.2, 0.35):
            for name, rise in (("slow", at), ("within 5 %", 1.0 / (1.0 + np.exp(-(at - 0.6) / 0.01)))):
                false, delays = [0, 0], [[], []]
                for seed in range(runs):
                    rng = np.random.default_rng(seed)
                    grain = noise * rng.standard_t(4, steps) / math.sqrt(2.0)
                    course = 3.0**rise * np.exp(0.05 * math.sqrt(2.0) * np.sin(2 * math.pi * (1.5 * at + rng.random())))
                    healthy = 3.0**rise * np.exp(grain)
                    start = int(0.4 * steps)
                    faulty = healthy * np.where(np.arange(steps) >= start, 1.6, 1.0)
                    for way, given in enumerate((None, course)):
                        false[way] += len(opened(healthy, given, 0.05))
                        seen = [e.detected - start for e in opened(faulty, given, 0.05) if 0 < e.detected - start < 300]
                        delays[way] += seen[:1]
                middle = [np.median(found) if found else math.nan for found in delays]
                cells = [f"{false[way] / runs:4.2f} {len(delays[way]):3d} {middle[way]:4.0f}" for way in (0, 1)]
                print(f"{steps:6d} {noise:.2f} {name:10s}: {cells[0]} | {cells[1]}", flush=True)


if __name__ == "__main__":
    faults()
    bends()
