"""Fit two published ladders with this library and keep the constants in examples/fits.

    python examples/fit_published.py FOLDER   # FOLDER holds the ladders' public tables, see below

The tables are not ours to ship; the fits hold constants and sizes, no losses of single runs. Sources:

* delphi_dense.json: 81 IsoFLOP runs of seven budgets, `delphi_ladder_isoflop.csv`, marin-community/delphi-blog-data.
* marin_hero_moe.json: evaluations along training of four rungs, `hero_ladder_eval_grid.csv` and
  `hero_ladder_rungs.csv`, from marin-community/marin issue 8435.
"""

import argparse
import csv
import dataclasses
from collections import defaultdict
from pathlib import Path

from trajectory_guard import DelphiFit, Ladder, LossCurve, LRSchedule, Recipe, Rung, RunPlan, fit_ladder

FITS = Path(__file__).resolve().parent / "fits"

UNSTATED = ("lr_schedule", "warmup", "batch_schedule")
"""Identity fields that the tables do not tell, so that a plan is not compared in them."""


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def delphi_dense(folder: Path) -> DelphiFit:
    """Terminal law of the dense IsoFLOP ladder: final loss against compute."""
    rungs = []
    for row in read(folder / "delphi_ladder_isoflop.csv"):
        steps, tokens = int(row["train_steps"]), int(row["tokens"])
        params = float(row["params_total"])
        plan = RunPlan(
            total_steps=steps,
            tokens_per_step=int(row["batch_size"]) * int(row["seq_len"]),
            active_params=params,
            schedule=LRSchedule(shape="linear"),
            # Nominal: the ladder's budgets count 6 N D without embeddings, and are equal within a budget.
            flops_per_token=float(row["budget_flops"]) / (int(row["batch_size"]) * int(row["seq_len"]) * steps),
            flops_convention="per-token-excluding-lm-head",
            metric="paloma macro loss",
            split="validation",
            recipe=Recipe(data="Delphi dense ladder"),
        )
        curve = LossCurve(step=[steps], tokens=[plan.total_tokens], loss=[float(row["loss"])])
        assert abs(plan.total_tokens / tokens - 1) < 0.01
        rungs.append(Rung(name=row["run_name"], plan=plan, curves=(curve,)))
    fit = fit_ladder(Ladder(rungs=tuple(rungs)), "terminal")
    return constants(fit, "marin-community/delphi-blog-data: 81 IsoFLOP runs, 3e18 to 3e20 FLOPs", keep_rungs=False)


def marin_hero_moe(folder: Path) -> DelphiFit:
    """Matched progress along the mixture-of-experts ladder that stood before the 535B run."""
    points: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read(folder / "hero_ladder_eval_grid.csv"):
        points[row["rung"]].append(row)
    rungs = []
    for row in read(folder / "hero_ladder_rungs.csv"):
        if row["rung"] not in points:  # The target itself.
            continue
        tokens = int(row["batch_seqs_4096"]) * 4096
        plan = RunPlan(
            total_steps=int(row["total_steps"]),
            tokens_per_step=tokens,
            active_params=float(row["active_params"]),
            total_params=float(row["total_params"]),
            schedule=LRSchedule(shape="linear"),
            flops_per_token=float(row["flops_per_step_excl_lm_head"]) / tokens,
            flops_convention="per-token-excluding-lm-head",
            metric="paloma macro loss, dropless",
            split="validation",
            recipe=Recipe(data="Marin mixture-of-experts ladder", sequence_length=4096),
        )
        # The table counts steps from 0.
        step = [int(point["step"]) + 1 for point in points[row["rung"]]]
        loss = [float(point["loss_eval_dropless_paloma_macro"]) for point in points[row["rung"]]]
        curve = LossCurve(step=step, tokens=[s * tokens for s in step], loss=loss)
        rungs.append(Rung(name=row["rung"], plan=plan, curves=(curve,)))
    fit = fit_ladder(Ladder(rungs=tuple(rungs)), "matched-progress")
    return constants(
        fit, "marin-community/marin issue 8435: four rungs, 61M to 1.2B active parameters", keep_rungs=True
    )


def constants(fit: DelphiFit, source: str, *, keep_rungs: bool) -> DelphiFit:
    """The fit without the points of its rungs, and without what the tables do not state."""
    rungs = tuple(dataclasses.replace(r, progress=(), loss=(), error=()) for r in fit.rungs) if keep_rungs else ()
    recipe = {name: value for name, value in fit.recipe.items() if name not in UNSTATED}
    return dataclasses.replace(fit, rungs=rungs, recipe=recipe, source=source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the public tables")
    folder = parser.parse_args().folder
    for name, build in (("delphi_dense", delphi_dense), ("marin_hero_moe", marin_hero_moe)):
        build(folder).save(FITS / f"{name}.json")
        print(f"wrote {FITS / name}.json")


if __name__ == "__main__":
    main()
