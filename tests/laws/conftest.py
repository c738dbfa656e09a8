"""The published mixture-of-experts ladder, as rungs and as the table of its pre-registered forecast."""

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from trajectory_guard.curve import LossCurve
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.lr_schedule import LRSchedule
from trajectory_guard.plan import RunPlan

NAMES = ("d768", "d1024", "d1536", "d2048")


class Hero(NamedTuple):
    ladder: Ladder
    progress: np.ndarray
    losses: np.ndarray
    flops: np.ndarray
    published: dict[str, np.ndarray]
    target: RunPlan


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def hero(shared_data: Path) -> Hero:
    facts = {row["rung"]: row for row in rows(shared_data / "ladders/hero_ladder_rungs.csv")}
    points: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows(shared_data / "ladders/hero_ladder_eval_grid.csv"):
        points[row["rung"]].append(row)

    def plan(name: str) -> RunPlan:
        tokens = int(facts[name]["batch_seqs_4096"]) * 4096
        return RunPlan(
            total_steps=int(facts[name]["total_steps"]),
            tokens_per_step=tokens,
            active_params=float(facts[name]["active_params"]),
            schedule=LRSchedule(shape="linear"),
            flops_per_token=float(facts[name]["flops_per_step_excl_lm_head"]) / tokens,
            flops_convention="per-token-excluding-lm-head",
            metric="paloma macro loss, dropless",
            split="validation",
        )

    rungs = []
    for name in NAMES:
        step = np.array([int(row["step"]) + 1 for row in points[name]])
        loss = [float(row["loss_eval_dropless_paloma_macro"]) for row in points[name]]
        curve = LossCurve(step=step, tokens=plan(name).tokens(step), loss=loss)
        rungs.append(Rung(name=name, plan=plan(name), curves=(curve,)))
    table = rows(shared_data / "ladders/hero_matched_progress_prediction.csv")
    published = {
        name: np.array([float(row[name]) for row in table])
        for name in (
            "fraction",
            "hero_flops_excl_lm_head",
            "A_g",
            "alpha_g",
            "hero_pred_loss_floor1.5",
            "loo_min",
            "loo_max",
        )
    }
    return Hero(
        ladder=Ladder(rungs=tuple(rungs)),
        progress=published["fraction"],
        losses=np.array([[float(row[f"L_{name}"]) for row in table] for name in NAMES]),
        flops=np.array([float(facts[name]["flops_total_excl_lm_head"]) for name in NAMES]),
        published=published,
        target=plan("d6144_hero"),
    )
