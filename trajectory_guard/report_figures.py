"""The figures of a report: as SVG that follows the page's light or dark colours, or stacked into one PNG."""

import dataclasses
import io
import re
import textwrap
import warnings
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trajectory_guard.detect.events import Event, Severity
from trajectory_guard.errors import MissingExtraError
from trajectory_guard.fit import DelphiFit
from trajectory_guard.fit_picture import draw_fit
from trajectory_guard.forecast import Forecast
from trajectory_guard.picture import RunRecord, draw_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_ladder", "draw_linear", "draw_logarithmic", "numbered", "save_png", "svg"]

INK = "#010203"
"""Colour that stands for the page's text colour while matplotlib draws; nothing else is drawn in it."""

PAGE_COLOURS = {
    INK: "currentColor",
    "#000000": "currentColor",
    "#333333": "var(--dim)",
    "#6e6e6e": "var(--dim)",
    "#e5e5e5": "var(--grid)",
    "#0072b2": "var(--blue)",
}
"""What becomes of the colours that would not be seen on dark paper."""

LABEL_GAP = 0.02
"""Events closer than this share of the horizon share one label."""

STRETCHES = 200
"""Stretches of a logarithmic step axis whose means are drawn."""

_LINK = re.compile(r"(?:(?<=^)|(?<=url\())#([\w-]+)")
"""A reference to an id, as a whole attribute or in `url(#...)`; not a colour inside a style."""

SVG = "http://www.w3.org/2000/svg"


def numbered(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """Return the events that figures mark, WARNING and above, with the numbers they go by from 1."""
    return list(enumerate((event for event in events if event.severity >= Severity.WARNING), start=1))


def draw_linear(forecast: Forecast, record: RunRecord) -> "Figure":
    """Loss, residual and change statistic over its threshold along steps, with the numbers of the events.

    The statistic is that of whichever test is nearest its threshold, so only their ratio makes one curve.
    """
    if record.statistic is not None and record.threshold is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = record.statistic / record.threshold
        record = dataclasses.replace(record, statistic=ratio, threshold=np.where(np.isfinite(ratio), 1.0, np.nan))
    with _style():
        figure = draw_run(forecast, record)
        if record.statistic is not None:
            figure.axes[-1].set_ylabel("statistic /\nthreshold")
            figure.axes[-1].set_ylim(bottom=0)
        _label_events(figure, record.events, forecast.plan.total_steps)
    return figure


def draw_logarithmic(forecast: Forecast, record: RunRecord) -> "Figure":
    """Loss and residual on logarithmic axes, as means over stretches of equal ratio: there the start shows."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    means = _log_means(record)
    first, last = max(1, min(int(means.step[0]), forecast.first_step)), forecast.plan.total_steps
    with _style():
        figure = draw_run(forecast, means, averaged=True)
        figure.set_size_inches(10, 6)
        for axis in figure.axes:
            axis.set_xscale("log")
        top = figure.axes[0]
        for band in list(top.collections):
            if band.get_label() == "observed, single steps":
                band.remove()
        top.legend(loc="lower left", frameon=False, ncols=2)
        top.set_xlim(first, max(last, first + 1))
        top.set_yscale("log")
        low = min(float(means.loss.min()), float(forecast.loss(last)))
        high = max(float(means.loss.max()), float(forecast.loss(forecast.first_step)))
        top.set_ylim(low / 1.03, high * 1.03)
        top.yaxis.set_major_locator(FixedLocator(_round_values(low, high)))
        top.yaxis.set_minor_locator(NullLocator())
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        top.yaxis.set_minor_formatter(NullFormatter())
        figure.axes[-1].set_xlabel("step (optimizer updates), logarithmic")
        _label_events(figure, record.events, forecast.plan.total_steps)
    return figure


def draw_ladder(fit: DelphiFit, forecast: Forecast) -> "Figure":
    """The rungs and the fit behind the forecast; dollar signs in names stay what they are."""
    plain = dataclasses.replace(
        fit,
        metric=_plain(fit.metric),
        rungs=tuple(dataclasses.replace(rung, name=_plain(rung.name)) for rung in fit.rungs),
    )
    with _style():
        return draw_fit(plain, forecast.plan, override_recipe=True)


def svg(draw: Callable[[], "Figure"], *, label: str) -> str:
    """Return a figure as an `<svg>` element for inline use, in the colours of the page.

    Args:
        draw: makes the figure.
        label: what it shows, for screen readers.
    """
    import matplotlib

    figure = draw()
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": label}):
        warnings.simplefilter("ignore", UserWarning)  # A letter that the font does not have is drawn as a box.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(buffer.getvalue())  # Comments are dropped, and names in them.
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.tag.endswith("}style"):
                parent.remove(child)
    used = {link for item in root.iter() for value in item.attrib.values() for link in _LINK.findall(value)}
    prefix = f"f{zlib.crc32(label.encode()):x}-"
    for item in root.iter():
        for name, value in list(item.attrib.items()):
            if name == "id" and value not in used:
                del item.attrib[name]
            elif name == "id":
                item.set(name, prefix + value)  # One page holds several drawings with glyphs of the same names.
            elif "#" in value:
                for colour, on_page in PAGE_COLOURS.items():
                    value = value.replace(colour, on_page)
                item.set(name, _LINK.sub(lambda link: f"#{prefix}{link[1]}", value))
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


def save_png(figures: Sequence["Figure"], text: Sequence[str], path: Path) -> None:
    """Write figures below a text as one PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    width, dpi = 12.0, 110
    lines = [part for line in text for part in textwrap.wrap(line, 135, subsequent_indent="      ") or [""]]
    head = Figure(figsize=(width, 0.4 + 0.19 * len(lines)))
    head.text(0.02, 1 - 0.15 / head.get_figheight(), "\n".join(lines), va="top", fontsize=10, parse_math=False)
    images = []
    for figure in (head, *figures):
        figure.set_size_inches(width, figure.get_figheight())
        figure.set_dpi(dpi)
        figure.patch.set_facecolor("white")
        canvas = FigureCanvasAgg(figure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            canvas.draw()
        images.append(np.asarray(canvas.buffer_rgba()))
    buffer = io.BytesIO()
    imsave(buffer, np.concatenate(images, axis=0), format="png", dpi=dpi)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "report") from error
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    style: Any = {**dict.fromkeys(ink, INK), "axes.facecolor": "none", "font.size": 10}
    with matplotlib.rc_context(style):
        yield


def _label_events(figure: "Figure", events: Sequence[Event], total_steps: int) -> None:
    """Write the numbers of the events over the top panel, those that would overlap as one range."""
    groups: list[list[tuple[int, Event]]] = []
    for number, event in sorted(numbered(events), key=lambda pair: pair[1].detected):
        if groups and event.detected - groups[-1][0][1].detected < LABEL_GAP * total_steps:
            groups[-1].append((number, event))
        else:
            groups.append([(number, event)])
    for group in groups:
        numbers = sorted(number for number, _ in group)
        text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}"
        place = (group[0][1].detected, 1.0)
        figure.axes[0].annotate(
            text, place, xytext=(0, 3), textcoords="offset points", xycoords=("data", "axes fraction"), ha="center"
        )


def _log_means(record: RunRecord) -> RunRecord:
    """The record as means over stretches of equal ratio of steps, without its statistic."""
    usable = np.isfinite(record.loss) & (record.loss > 0)
    step, loss = record.step[usable], record.loss[usable]
    # Rounding may put the first edge beyond the first step, and the last beyond the last one.
    edges = np.searchsorted(step, np.geomspace(step[0], step[-1] + 1, STRETCHES + 1)[1:-1])
    edges = np.unique(np.append(0, edges[edges < len(step)]))
    count = np.diff(np.append(edges, len(step)))
    return RunRecord(
        step=np.round(np.add.reduceat(step, edges) / count).astype(np.int64),
        loss=np.add.reduceat(loss, edges) / count,
        events=record.events,
    )


def _round_values(low: float, high: float) -> list[float]:
    """About eight round values between two positive numbers, dense enough that at least four are there."""
    for steps in ((1.0, 2.0, 5.0), (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0), tuple(np.arange(1.0, 10.0, 0.05))):
        decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 4:
            return ticks[:: max(1, len(ticks) // 8)]
    return [low, high]


def _plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics, and does not leave out of a legend."""
    return text.replace("$", r"\$").lstrip("_") or " "
