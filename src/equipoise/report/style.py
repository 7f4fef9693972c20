"""The style sheet of a page, in light and dark; the content policy allows no style elsewhere."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1b1f24; --muted: #5a636e; --grid: #e3e6ea; --tint: #f5f7f9;
  --line-1: #0b66b0; --line-2: #c64f00; --line-3: #00805c; --line-4: #a8437f; --line-5: #8a6a00;
  --line-6: #5d6672;
  --heat: 11, 102, 176;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e8ebee; --muted: #a3acb7; --grid: #2c3238; --tint: #1c2026;
    --line-1: #6db5f2; --line-2: #f5974d; --line-3: #3fcf9f; --line-4: #e597c3; --line-5: #dcc04f;
    --line-6: #a9b3be;
    --heat: 52, 120, 184;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans",
    "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main {
  max-width: 1160px; margin: 0 auto; padding: clamp(28px, 6vw, 72px) clamp(18px, 4vw, 40px) 80px;
}
h1 {
  font-size: clamp(26px, 4.4vw, 38px); line-height: 1.2; font-weight: 650; letter-spacing:
  -0.015em; margin: 0;
}
h2 {
  font-size: 21px; line-height: 1.3; font-weight: 620; letter-spacing: -0.005em; margin: 0 0 20px;
}
h3 { font-size: 15px; line-height: 1.4; font-weight: 600; margin: 0 0 4px; }
p { max-width: 70ch; margin: 0 0 14px; }
.lead { color: var(--muted); margin: 10px 0 0; }
.prose { white-space: pre-line; }
section { margin-top: 68px; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 28px 24px;
  margin: 44px 0 0;
}
.tiles div { border-top: 2px solid var(--grid); padding-top: 12px; max-width: 280px; }
.tiles div { display: flex; flex-direction: column; }
.tiles div:first-child { border-top-color: var(--line-1); }
.tiles dt { font-size: 15px; line-height: 1.4; }
.tiles dd { margin: 0; }
.tiles .value {
  order: -1; font-size: 29px; line-height: 1.25; font-weight: 600; letter-spacing: -0.015em;
}
.tiles .more { font-size: 13px; line-height: 1.45; color: var(--muted); }
.charts { clear: both; display: grid; grid-template-columns: minmax(0, 1fr); gap: 44px 56px; }
figure { margin: 0; min-width: 0; display: flex; flex-direction: column; }
figure.plot { margin: 0 0 1.5rem; }
figure.plot img { max-width: 100%; height: auto; background: white; }
figcaption, .note { font-size: 13px; color: var(--muted); }
.chart { display: block; width: 100%; height: auto; margin-top: auto; padding-top: 8px; }
.chart * { stroke-linejoin: round; }
.chart text { font-size: 13px; font-family: inherit; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 3px 18px; margin: 0; padding: 0; }
.legend { font-size: 13px; color: var(--muted); }
.legend li { display: flex; align-items: center; gap: 7px; min-width: 0; }
.key { width: 22px; height: 10px; flex: none; fill: none; }
.swatch {
  width: 13px; height: 13px; flex: none; border-radius: 3px; outline: 1px solid var(--grid);
}
.bar {
  display: block; width: 100%; height: 12px; margin: 6px 0 18px; border-radius: 3px; background:
  var(--tint);
}
.scroll { overflow-x: auto; }
.legend + .scroll, .heat + .scroll { margin-top: 34px; }
table { border-collapse: collapse; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding: 0 0 6px; }
th, td { text-align: left; vertical-align: top; padding: 6px 0; border-top: 1px solid var(--grid); }
th { font-weight: 400; color: var(--muted); }
thead th { border-top: 0; }
.counts table { min-width: min(100%, 640px); }
.counts th, .counts td { padding-right: 20px; overflow-wrap: normal; }
.counts thead th, .counts td { text-align: right; white-space: nowrap; }
.counts thead th:first-child { text-align: left; }
.settings { columns: 1; column-gap: 56px; }
.settings table { width: 100%; table-layout: fixed; break-inside: avoid; margin: 0 0 30px; }
.settings th { width: 42%; padding-right: 16px; }
.matrix table { font-size: 13px; }
.matrix th, .matrix td {
  padding: 5px 4px; min-width: 2.6em; border: 0; text-align: center; overflow-wrap: normal;
}
.matrix th { max-width: 11em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.matrix th[scope=row] {
  text-align: right; padding-right: 10px; position: sticky; left: 0; background: var(--page);
}
.matrix thead th { vertical-align: bottom; }
.matrix .turned {
  display: inline-block; writing-mode: vertical-rl; transform: rotate(180deg); max-height: 9em;
  overflow: hidden;
}
.matrix td { border: 1px solid var(--page); color: var(--muted); }
.matrix td:nth-last-child(-n + 3) { color: var(--ink); padding-left: 12px; }
.matrix b {
  display: block; margin: -5px -4px; padding: 5px 4px; font-weight: 500; color: var(--ink);
}
HEAT
.pixels {
  image-rendering: pixelated; background: var(--tint); border-radius: 3px; max-width: 100%;
  height: auto;
}
.heat { display: block; width: min(100%, 560px); border: 1px solid var(--grid); }
.sample { float: right; width: clamp(84px, 18vw, 150px); margin: 4px 0 16px 28px; }
.sample img { width: 100%; }
.mistakes {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 22px 20px;
}
.mistakes img { width: 100%; }
.mistakes figcaption { margin-top: 4px; line-height: 1.4; }
figcaption span { display: block; }
.samples { display: grid; gap: 24px 40px; margin: 0 0 22px; }
.samples div { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 8px; }
.samples img { width: 100%; display: block; }
.samples figcaption { margin-top: 3px; }
@media (min-width: 800px) {
  .charts, .samples { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .settings { columns: 2; }
}
@media (min-width: 1080px) {
  .chart text { font-size: 10.5px; }
}
@media (max-width: 480px) {
  .counts th, .counts td { padding-right: 12px; }
  .matrix table { font-size: 11px; }
  .matrix th { max-width: 8em; }
}
@media print {
  :root { color-scheme: light; }
  section { margin-top: 36px; }
  figure, table { break-inside: avoid; }
}
""".replace(
    "HEAT",
    "\n".join(
        f".heat-{k} {{ background: rgba(var(--heat), {0.07 * k:.2f}); }}" for k in range(1, 11)
    ),
)
