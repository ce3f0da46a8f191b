"""How does an inspection become pictures and one page that needs nothing beside it?"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

from soma_lightning import plots
from soma_lightning.data.findings import Finding
from soma_lightning.data.inspection import Inspection

PAGE, REPORT = "index.html", "report.json"
_STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:75em}"
    "td{padding:2px 1em 2px 0;vertical-align:top}"
    "img{max-width:100%}"
)


def write_report(inspection: Inspection, summary: Sequence[tuple[str, str]], out: Path) -> Path:
    """Writes report.json, the pictures (PNG) and index.html, which holds the pictures itself; returns the page's path.

    summary: lines (name, text) of the page's head.
    """
    (out / REPORT).write_text(json.dumps(inspection.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    pictures = draw(inspection, out)
    rows = "".join(f"<tr><td>{_escape(name)}</td><td>{_escape(text)}</td></tr>" for name, text in summary)
    body = [
        f"<h1>{_escape(inspection.root.name)}</h1>",
        f"<table>{rows}</table>",
        _list("Problems", inspection.problems),
        _list("Warnings", inspection.warnings),
        *(_picture(title, path) for title, path in pictures),
    ]
    page = out / PAGE
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escape(inspection.root.name)}</title>'
    page.write_text(f"{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n", encoding="utf-8")
    return page


def draw(inspection: Inspection, out: Path) -> list[tuple[str, Path]]:
    """(title, PNG) of every picture there is something to draw for."""
    pictures = [("Episode lengths", plots.episode_lengths(inspection.lengths, out / "episode_lengths.png"))]
    for key, column in inspection.columns.items():
        path = out / f"histogram_{_file_name(key)}.png"
        histogram = column.histogram
        plots.histograms(column.names, histogram.low, histogram.high, histogram.counts, (column.q01, column.q99), path)
        pictures.append((f"{key}: frames by value; dashed q01 and q99 of {column.source}", path))
    for key, check in inspection.cameras.items():
        if check.sheet:
            path = plots.camera_sheet(check.sheet, out / f"camera_{_file_name(key)}.png")
            pictures.append((f"{key}: first, middle and last frames", path))
    return pictures


def _list(title: str, findings: Sequence[Finding]) -> str:
    if not findings:
        return f"<h2>{title}</h2><p>none</p>"
    lines = "".join(f"<li>{_escape(str(finding))}</li>" for finding in findings)
    return f"<h2>{title} ({len(findings)})</h2><ul>{lines}</ul>"


def _picture(title: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{_escape(title)}</h2><img alt="{_escape(title)}" src="data:image/png;base64,{data}">'


def _file_name(key: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in key)


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
