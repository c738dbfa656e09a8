"""The report as one HTML page without network: text of any origin, escaped, and inline SVG."""

from collections.abc import Sequence
from html import escape

from trajectory_guard.detect.events import Event, Severity

__all__ = ["events_table", "facts", "figure", "items", "page", "section", "text_block"]

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1a1c1f; --dim: #5b6067; --grid: #dfe2e6; --card: #f4f5f7;
  --bad: #b34700; --good: #00664f; --blue: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e7e9ec; --dim: #a2a8b0; --grid: #3a3f46;
  --card: #202327; --bad: #f0884a; --good: #45c2a0;
  --blue: #3f9fdc; } }
@media print { :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --dim: #444444; --grid: #cccccc;
  --card: #ffffff; --bad: #8a3600; --good: #004d3b; --blue: #0072b2; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 1240px; padding: 20px 24px 48px; }
h1 { font-size: 23px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; border-bottom: 1px solid var(--grid); padding-bottom: 4px; }
p { margin: 6px 0; } .verdict { font-size: 17px; font-weight: 600; } .bad { color: var(--bad); }
.good { color: var(--good); } .dim { color: var(--dim); }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 10px; margin: 14px 0; }
dl.facts div { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; padding: 8px 12px; }
dt { color: var(--dim); font-size: 13px; } dd { margin: 0; font-size: 16px; overflow-wrap: anywhere; }
figure { margin: 10px 0; } figure svg { width: 100%; height: auto; color: var(--ink); }
figcaption { color: var(--dim); font-size: 14px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--dim); font-weight: 600; } th, td { padding: 5px 10px 5px 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; padding: 10px 12px; overflow-x: auto;
  font-size: 12.5px; } summary { cursor: pointer; color: var(--dim); margin: 8px 0; } ul { margin: 6px 0; }
@page { margin: 12mm; }
@media print { body { padding: 0; font-size: 12px; } h1 { font-size: 18px; } .verdict { font-size: 14px; }
  h2 { font-size: 15px; margin: 14px 0 6px; break-after: avoid; } dt, figcaption, table { font-size: 11px; }
  dl.facts { grid-template-columns: repeat(3, 1fr); gap: 6px; margin: 8px 0; } dl.facts div { padding: 4px 8px; }
  dd { font-size: 12.5px; } figure svg { max-height: 130mm; } details { display: none; }
  tr, figure, dl.facts div { break-inside: avoid; } }
"""


def page(title: str, verdict: str, *, good: bool, sections: Sequence[str]) -> str:
    """Return the whole page.

    Args:
        title: heading, plain text.
        verdict: one sentence under it, plain text.
        good: whether the sentence is good news.
        sections: finished HTML, as the other functions here make it.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Nothing may be loaded or run, whatever got into a log.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="verdict {"good" if good else "bad"}">{escape(verdict)}</p>\n'
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; `parts` are finished HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names with values as cards."""
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{cards}</dl>'


def figure(svg: str, caption: str) -> str:
    """Return a finished `<svg>` with a caption."""
    return f"<figure>\n{svg}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def items(texts: Sequence[str]) -> str:
    """Return sentences as a list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def text_block(summary: str, text: str) -> str:
    """Return text of fixed pitch behind a fold."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def events_table(numbered: Sequence[tuple[int, Event]], others: Sequence[Event]) -> str:
    """Return the events with their sentences: the marked ones by number, those that only inform behind a fold."""
    parts = []
    if numbered:
        parts.append(_table([(str(number), event) for number, event in numbered]))
    if others:
        table = _table([("", event) for event in others])
        parts.append(f"<details><summary>{len(others)} for information</summary>{table}</details>")
    return "\n".join(parts) or "<p>The guard had nothing to say.</p>"


def _table(rows: Sequence[tuple[str, Event]]) -> str:
    heads = ("", "flagged at", "since about", "until", "severity", "kind", "what was seen", "roll back to")
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for number, event in rows:
        cells = [number, *map(_step, (event.detected, event.onset))]
        cells += ["still open" if event.state == "open" else _step(event.closed)]
        colour = "bad" if event.severity >= Severity.WARNING else "dim"
        lines.append(
            "<tr>"
            + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
            + f'<td class="{colour}">{event.severity.name}</td><td>{escape(event.kind)}</td>'
            + f'<td>{escape(event.sentence)}</td><td class="number">{_step(event.rollback_step)}</td></tr>'
        )
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _step(step: object) -> str:
    return escape(f"{step:,}" if isinstance(step, int) else "" if step is None else str(step))
