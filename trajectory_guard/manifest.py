"""The ladder manifest: a TOML file that lists a ladder's rungs with their plans and logs."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trajectory_guard.channel import MAX_CHANNELS, ChannelSeries
from trajectory_guard.curve import LossCurve
from trajectory_guard.errors import FileFormatError, TrajectoryGuardError
from trajectory_guard.ladder import Ladder, Rung
from trajectory_guard.logs.read import LogRead, read_log
from trajectory_guard.plan import RunPlan

__all__ = ["ManifestRead", "read_manifest"]

FORMAT = "trajectory-guard-ladder"
VERSION = 1
MAX_BYTES = 4 * 2**20

_SECTIONS = ("format", "version", "recipe", "plan", "read", "rung")
_PLAN_FIELDS = (
    "total_steps",
    "tokens_per_step",
    "active_params",
    "schedule",
    "total_params",
    "flops_per_token",
    "flops_convention",
    "metric",
    "split",
)
_READ_FIELDS: dict[str, type] = {
    "metric": str,
    "unit": str,
    "axis": str,
    "run": str,
    "step_offset": int,
    "channels": list,
}


class ManifestRead(NamedTuple):
    """A ladder read from its manifest, and what the log readers did on the way, one sentence each."""

    ladder: Ladder
    notes: tuple[str, ...]


def read_manifest(path: str | Path) -> ManifestRead:
    """Read a ladder manifest and every log that it names.

    `[recipe]` holds for all rungs; `[plan]` and `[read]` hold defaults that a `[[rung]]` may override. A rung's `log`
    is one path, or one entry per seed; an entry that is a list holds the attempts of one run, the latest last. Paths
    are relative to the manifest. `read.channels` names other columns of the logs whose courses the fit shall carry.
    docs/formats.md pins the fields.

    Raises:
        FileFormatError: the manifest is missing, not TOML, of a newer version, or has an unknown, missing or wrong
            field; or a log cannot be read. The message names the file, the rung and the field.
        TrajectoryGuardError: the rungs cannot stand in one ladder.
    """
    file = Path(path)
    content = _read_toml(file)
    unknown = sorted(set(content) - set(_SECTIONS))
    if unknown:
        raise FileFormatError(f"{file}: unknown fields {unknown}; a ladder manifest has {list(_SECTIONS)}")
    if content.get("format", FORMAT) != FORMAT:
        raise FileFormatError(f"{file}: its `format` is {content['format']!r}, expected {FORMAT!r}")
    version = content.get("version", VERSION)
    if version != VERSION:
        raise FileFormatError(f"{file}: its `version` is {version!r}; this release reads version {VERSION}")
    defaults = _section(file, content, "plan", _PLAN_FIELDS)
    reading = _section(file, content, "read", tuple(_READ_FIELDS))
    recipe = _section(file, content, "recipe", None)
    rungs = content.get("rung")
    if not isinstance(rungs, list) or not rungs or not all(isinstance(rung, dict) for rung in rungs):
        raise FileFormatError(f"{file}: needs at least one [[rung]] table")
    notes: list[str] = []
    built = []
    for number, rung in enumerate(rungs, start=1):
        name = rung.get("name")
        if not isinstance(name, str) or not name:
            raise FileFormatError(f"{file}: [[rung]] number {number} needs a `name`, got {name!r}")
        built.append(_rung(file, name, rung, defaults, reading, recipe, notes))
    try:
        return ManifestRead(Ladder(rungs=tuple(built)), tuple(notes))
    except TrajectoryGuardError as error:
        raise FileFormatError(f"{file}: {error}") from error


def _rung(
    file: Path,
    name: str,
    rung: Mapping[str, Any],
    defaults: Mapping[str, Any],
    reading: Mapping[str, Any],
    recipe: Mapping[str, Any],
    notes: list[str],
) -> Rung:
    where = f"{file}: rung {name!r}"
    unknown = sorted(set(rung) - {"name", "log", "read", "recipe", *_PLAN_FIELDS})
    if unknown:
        raise FileFormatError(f"{where}: unknown fields {unknown}; a rung has name, log, read, recipe, {_PLAN_FIELDS}")
    own_recipe = _section(file, rung, "recipe", None)
    fields = {**defaults, **{key: rung[key] for key in _PLAN_FIELDS if key in rung}}
    options = {**reading, **_section(file, rung, "read", tuple(_READ_FIELDS))}
    for key, value in options.items():
        if not isinstance(value, _READ_FIELDS[key]) or isinstance(value, bool):
            raise FileFormatError(f"{where}: read.{key} must be a {_READ_FIELDS[key].__name__}, got {value!r}")
    names = _channel_names(where, options.pop("channels", []))
    try:
        plan = RunPlan.from_dict({**fields, "recipe": {**recipe, **own_recipe}})
    except (TrajectoryGuardError, TypeError, ValueError) as error:
        raise FileFormatError(f"{where}: {error}") from error
    curves: list[LossCurve] = []
    channels: dict[str, list[ChannelSeries]] = {name: [] for name in names}
    for entry in _entries(where, rung.get("log")):
        paths = [file.parent / part for part in entry]
        try:
            log = read_log(paths, plan=plan, **{"metric": plan.metric, **options})
        except TrajectoryGuardError as error:
            raise FileFormatError(f"{where}: {error}") from error
        notes.extend(f"rung {name!r}, {' + '.join(entry)}: {note}" for note in log.notes)
        notes.extend(f"rung {name!r}, {' + '.join(entry)}: {note}" for note in _unit_notes(log.curve, plan))
        beyond = log.curve.tokens[-1] / plan.total_tokens
        if beyond > 1.01:
            raise FileFormatError(
                f"{where}: log {entry[-1]} reaches {log.curve.tokens[-1]:.6g} tokens, {beyond:.3g} times the planned "
                f"{plan.total_tokens}; correct total_steps or tokens_per_step"
            )
        if beyond < 0.98:
            notes.append(f"rung {name!r}, {' + '.join(entry)}: ends at progress {beyond:.3f}; used up to there")
        curves.append(log.curve)
        for channel, series in _channels_of(f"{where}: log {entry[-1]}", log, names).items():
            channels[channel].append(series)
    return Rung(
        name=name,
        plan=plan,
        curves=tuple(curves),
        channels={channel: tuple(series) for channel, series in channels.items()},
    )


def _channel_names(where: str, names: list[Any]) -> list[str]:
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise FileFormatError(f"{where}: read.channels must be a list of different column names, got {names!r:.200}")
    if len(names) > MAX_CHANNELS:
        raise FileFormatError(f"{where}: read.channels names {len(names)} columns, at most {MAX_CHANNELS} are carried")
    return names


def _channels_of(where: str, log: LogRead, names: list[str]) -> dict[str, ChannelSeries]:
    missing = [name for name in names if name not in log.channels]
    if missing:
        raise FileFormatError(
            f"{where} has no columns {missing[:20]} as read.channels asks for; beside the loss it has "
            f"{sorted(log.channels)[:50]}"
        )
    found = {}
    for name in names:
        known = np.isfinite(log.channels[name])
        found[name] = ChannelSeries(step=log.step[known], value=log.channels[name][known])  # type: ignore[arg-type]
    return found


def _unit_notes(curve: LossCurve, plan: RunPlan) -> list[str]:
    """Say when an untrained model's loss lies far above a uniform guess, as it does in bits."""
    vocabulary = plan.recipe.vocab_size
    if vocabulary is None or curve.step[0] > 5 or curve.loss[0] <= 1.25 * math.log(vocabulary):
        return []
    guess = math.log(vocabulary)
    return [
        f"its first loss, {curve.loss[0]:.3f}, is above ln({vocabulary}) = {guess:.3f} nats; if it is in bits, say so: "
        'read = { unit = "bits" }'
    ]


def _entries(where: str, log: object) -> list[list[str]]:
    """One entry per seed, each a list of paths."""
    seeds = log if isinstance(log, list) else [log]
    entries = [seed if isinstance(seed, list) else [seed] for seed in seeds]
    if not entries or not all(entry and all(isinstance(part, str) and part for part in entry) for entry in entries):
        raise FileFormatError(f"{where}: `log` must be a path or a list with one entry per seed, got {log!r}")
    return [[str(part) for part in entry] for entry in entries]


def _section(file: Path, content: Mapping[str, Any], name: str, allowed: tuple[str, ...] | None) -> dict[str, Any]:
    section = content.get(name, {})
    if not isinstance(section, dict):
        raise FileFormatError(f"{file}: `{name}` must be a table, got {section!r}")
    unknown = [] if allowed is None else sorted(set(section) - set(allowed))
    if unknown:
        raise FileFormatError(f"{file}: unknown fields {unknown} in [{name}]; it has {list(allowed or ())}")
    return section


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise FileFormatError(f"{file}: larger than {MAX_BYTES} bytes, which no ladder manifest is")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(f"{file}: no such file; expected a ladder manifest there") from error
    except OSError as error:
        raise FileFormatError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{file}: not valid TOML ({error})") from error
