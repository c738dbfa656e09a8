"""What README and docs show works: Python blocks run, our commands parse, links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "kernels").glob("*.md"))]


def blocks(document: Path, *languages: str) -> list[str]:
    """The fenced blocks of a document in one of these languages, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for language, text in fenced if language in languages]


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has before pasting a block: the example's fit, a plan, a model, data and a loop of losses."""
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    from trajectory_guard import Forecast, RunPlan, load_fit

    fit = load_fit(ROOT / "examples" / "fits" / "moe_tiny.json")
    fit.save(tmp_path / "fit.json")
    largest = fit.rungs[-1].plan
    content = largest.to_dict()
    plan = RunPlan.from_dict({**content, "total_steps": 60, "tokens_per_step": largest.total_tokens // 60})
    plan.save(tmp_path / "plan.json")
    forecast = fit.forecast(plan)
    loss = np.nan_to_num(np.asarray(forecast.loss(np.arange(1, 61))), nan=3.0)
    rows = [f"{step},{value:.6f}" for step, value in enumerate(loss, start=1)]
    (tmp_path / "run.csv").write_text("step,loss\n" + "\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)

    class Quiet(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx)["loss"] + 3.0}

    def training_steps() -> Iterator[tuple[float, int]]:
        for value in loss:
            yield float(value), plan.total_tokens // 60

    return {
        "model": Quiet(),
        "train_dataloader": torch.utils.data.DataLoader(torch.randn(60, 32)),
        "training_steps": training_steps,
        "fit": fit,
        "plan": plan,
        "forecast": forecast,
        "Forecast": Forecast,
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_every_python_block_runs(document: Path, surroundings: dict[str, Any]) -> None:
    for code in blocks(document, "python"):
        code = code.replace("max_steps=3000", "max_steps=60, logger=False, enable_checkpointing=False")
        exec(compile(code, str(document), "exec"), surroundings)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_every_yaml_block_is_a_run_of_lightning_cli(
    document: Path, surroundings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr("sys.argv", ["train.py"])
    for text in blocks(document, "yaml"):
        Path("config.yaml").write_text(text)
        words = ["--config", "config.yaml", "--trainer.max_steps", "60", "--trainer.logger", "false"]
        words += ["--trainer.enable_checkpointing", "false", "--trainer.accelerator", "cpu"]
        given = {"args": words, "save_config_callback": None, "seed_everything_default": False}
        cli = LightningCLI(type(surroundings["model"]), run=False, **given)
        cli.trainer.fit(cli.model, surroundings["train_dataloader"])
        # The model is none of the fit: the guard may stop the run, and reports in either case.
        assert "of 60 steps" in Path("report.html").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_ours_parses(document: Path) -> None:
    from trajectory_guard.__main__ import parse

    for block in blocks(document, "sh", ""):
        for line in block.splitlines():
            if line.startswith("trajectory-guard "):
                words = shlex.split(line, comments=True)
                assert parse(words[1:]).command == words[1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_to_one(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
