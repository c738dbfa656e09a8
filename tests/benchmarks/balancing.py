"""Each balancing rule side by side: on the example's layers and on wider ones (E = 32, k = 4).

    python tests/benchmarks/balancing.py                      # about ten minutes on two cores
    python tests/benchmarks/balancing.py --steps 100 --seeds 1

Every row trains the example's model (width 20) from the same seeds on the same batches with one rule. Loads are those
of each step's whole batch, before the update they cause. max-violation is the mean of the layers, worst the worst
layer's, as are CV and dead experts; all are means over the last 10 steps. The loss is the mean over the last 10 % of
the steps, without auxiliary losses.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import recipe  # noqa: E402
from corpus import Corpus, standard_library  # noqa: E402
from faults import Fault  # noqa: E402
from moe_lm import MoEConfig, MoELM  # noqa: E402
from trajectory_guard.kernels.balancing import (  # noqa: E402
    AuxLoss,
    Balancer,
    QuantileBalancing,
    SignRule,
    load_metrics,
)

RULES = {
    "none": Balancer,
    "sign .001": lambda e, k: SignRule(e, k, rate=0.001),  # the published rate
    "sign .01": lambda e, k: SignRule(e, k, rate=0.01),  # ten times that, for runs this short
    "aux .01": AuxLoss,
    "quantile": lambda e, k: QuantileBalancing(e, k, score="sigmoid"),
    "quantile ema .9": lambda e, k: QuantileBalancing(e, k, score="sigmoid", ema=0.9),
    # The last batch solved anew with the weights after the step, as the example's router lets it.
    "quantile exact 5": lambda e, k: QuantileBalancing(e, k, score="sigmoid", method="exact", passes=5),
}
LAYERS = {"example (E=8, k=2)": (8, 2, 13), "wide (E=32, k=4)": (32, 4, 58)}
"""Experts, k, sequences of 64 bytes a step: the example's smallest rung, and the batch of its target."""


def train(rule: str, experts: int, top_k: int, batch: int, steps: int, seed: int, corpus: Corpus) -> dict[str, float]:
    """One run; its loss and the loads at its end."""
    run, fault = replace(recipe.run_of(20), batch=batch), Fault()
    torch.manual_seed(seed)
    model = MoELM(MoEConfig(width=20, context=recipe.CONTEXT, experts=experts, top_k=top_k))
    for layer in model.layers():
        layer.router.balancer = RULES[rule](experts, top_k)
    optimizer, schedule = recipe.optimizer_of(model, run, fault)
    batches = recipe.batches_of(run, corpus=corpus, seed=seed, fault=fault)
    losses, loads = [], []
    for step in range(1, steps + 1):
        loss = model.loss(*batches(step))
        optimizer.zero_grad()
        (loss + model.auxiliary_loss()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.CLIP)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        metrics = [load_metrics(layer.router.balancer.load) for layer in model.layers()]
        loads.append([float(np.mean([m.max_violation.item() for m in metrics])),
                      max(m.max_violation.item() for m in metrics), max(m.cv.item() for m in metrics),
                      max(m.dead.item() for m in metrics)])  # fmt: skip
    end = np.array(loads[-10:]).mean(0)
    names = ("violation_mean", "violation_worst", "cv", "dead")
    return {"loss_nats": float(np.mean(losses[-max(1, steps // 10) :]))} | dict(zip(names, end.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="on the example; the wide layers train 200")
    parser.add_argument("--wide-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--layers", choices=["example", "wide", "both"], default="both")
    parser.add_argument("--rules", nargs="*", choices=list(RULES), default=list(RULES))
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    a = parser.parse_args()
    corpus = standard_library()
    results = []
    for name, (experts, top_k, batch) in LAYERS.items():
        if a.layers != "both" and not name.startswith(a.layers):
            continue
        steps = a.steps if name.startswith("example") else a.wide_steps
        print(f"\n{name}, {steps} steps, {a.seeds} seeds")
        print(f"{'rule':16} {'max-violation':>13} {'worst':>6} {'CV':>6} {'dead':>5}   loss (nats) by seed")
        for rule in a.rules:
            runs = [train(rule, experts, top_k, batch, steps, seed, corpus) for seed in range(a.seeds)]
            mean = {key: float(np.mean([r[key] for r in runs])) for key in runs[0]}
            losses = " ".join(f"{r['loss_nats']:.4f}" for r in runs)
            loads = (
                f"{mean['violation_mean']:13.3f} {mean['violation_worst']:6.3f} {mean['cv']:6.3f} {mean['dead']:5.1f}"
            )
            print(f"{rule:16} {loads}   {losses}", flush=True)
            results.append({"layers": name, "rule": rule, "steps": steps, "runs": runs})
    if a.json:
        a.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
