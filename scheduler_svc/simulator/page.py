"""The frame of HTML reports: one file, light or dark, that asks for nothing outside itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #636b78; --line: #dfe3e9; --paper: #ffffff;
  --panel: #f6f7f9;
  --s0: #2463c4; --s1: #c2540a; --s2: #1d7f4e; --s3: #a32a86; --s4: #8a6d00; --s5: #0b7f8c;
  --s6: #b3261e; --s7: #5b5f97 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa3b2; --line: #343a45; --paper: #14171c;
  --panel: #1c2027; --s0: #74a7f7; --s1: #f2994f; --s2: #5fc68f; --s3: #e58bd0; --s4: #d9be4f; --s5: #5cc8d3;
  --s6: #f28b82; --s7: #a9addf } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1360px;
  margin: 0 auto; padding: 24px }
h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 17px; margin: 28px 0 10px }
.note { color: var(--soft); margin: 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 4px 14px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tbody th { font-weight: 400; color: var(--soft) }
.settings td { white-space: normal; text-align: left } .settings th { text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 18px }
figure { margin: 0; padding: 14px; background: var(--panel); border-radius: 8px }
figcaption { font-weight: 600; margin-bottom: 4px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft) }
.legend span { display: inline-flex; align-items: center; gap: 6px } .swatch { width: 24px; height: 8px }
figure > svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font-size: 11px }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--line) } .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.dashed { stroke-dasharray: 6 4 }
""" + "".join(f".s{i} {{ stroke: var(--s{i}) }}\n" for i in range(8))


def page(title: str, body: str) -> str:
    """A whole document. `body` is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Gilir: {escape(title.lower())}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def html_table(heading: Sequence[str], lines: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table whose cells are escaped; the first of each line is its heading."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in lines
    )
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
