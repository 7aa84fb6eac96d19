"""The page: style, script and Jinja template. Everything a browser needs is in these strings."""

from __future__ import annotations

from wholestep.report.palette import variables
from wholestep.report.scene import page_css

_PAGE_STYLE = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main, header { max-width: 1060px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 40px; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; }
header p { margin: 6px 0 0; color: var(--soft); }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 18px 0 0; list-style: none; }
a { color: var(--accent); text-underline-offset: 3px; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; border-radius: 3px; }
svg a:focus-visible { outline: none; }
svg a:focus-visible rect { stroke: var(--ink); stroke-width: 3; }
.skip {
  position: absolute; left: 12px; top: -60px; padding: 8px 14px; border-radius: 8px; z-index: 1;
  background: var(--surface); border: 1px solid var(--line);
}
.skip:focus { top: 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin: 24px 0; }
.cards > div { background: var(--surface); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.cards dt { color: var(--soft); font-size: 13px; }
.cards dd { margin: 2px 0 0; }
.cards .value { font-size: 24px; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.cards .note { color: var(--soft); font-size: 12.5px; line-height: 1.4; }
section {
  background: var(--surface); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 24px 22px; margin: 0 0 16px;
}
h2 { margin: 0 0 10px; font-size: 19px; line-height: 1.3; }
h3 { margin: 18px 0 6px; font-size: 15px; line-height: 1.3; }
.anchor { margin-left: 8px; font-weight: 400; text-decoration: none; opacity: 0; }
h2:hover .anchor, .anchor:focus { opacity: 1; }
section > p { margin: 0 0 12px; max-width: 78ch; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
table.narrow { max-width: 700px; }
caption { caption-side: bottom; text-align: left; color: var(--soft); font-size: 13px; padding-top: 8px; }
th, td { padding: 6px 0 6px 20px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.ends-in-text tr > :first-child { white-space: normal; min-width: 18ch; }
.ends-in-text tr > :last-child { text-align: left; white-space: normal; min-width: 32ch; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
tr:target > * { background: var(--track); }
tfoot > tr > * { font-weight: 650; border-bottom: 0; border-top: 2px solid var(--line); }
.bar { display: inline-flex; align-items: center; gap: 10px; justify-content: flex-end; }
.track { width: 92px; height: 8px; border-radius: 4px; background: var(--track); overflow: hidden; }
.fill { display: block; height: 100%; border-radius: 4px; background: var(--accent); }
.bar .text { min-width: 48px; }
.fill.forward, .key.forward { background: var(--forward); }
.fill.backward, .key.backward { background: var(--backward); }
.fill.comm, .key.comm { background: var(--comm); }
.fill.optimizer, .key.optimizer { background: var(--optimizer); }
figure { margin: 4px 0 14px; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .label { fill: var(--ink); }
svg .strong { font-weight: 650; }
svg .halo { paint-order: stroke; stroke: var(--surface); stroke-width: 4px; stroke-linejoin: round; }
svg .on-strip { fill: var(--surface); font-weight: 600; }
svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--soft); }
svg .area { fill: var(--accent); opacity: 0.22; }
svg .edge { fill: none; stroke: var(--accent); stroke-width: 1.5; stroke-linejoin: round; }
svg .strip { fill: var(--accent); }
svg .area.forward, svg .strip.forward { fill: var(--forward); }
svg .area.backward, svg .strip.backward { fill: var(--backward); }
svg .area.comm, svg .strip.comm { fill: var(--comm); }
svg .area.optimizer, svg .strip.optimizer { fill: var(--optimizer); }
svg .edge.forward { stroke: var(--forward); }
svg .edge.backward { stroke: var(--backward); }
svg .edge.comm { stroke: var(--comm); }
svg .edge.optimizer { stroke: var(--optimizer); }
svg .floor { fill: var(--floor); opacity: 0.35; }
svg .floor-edge { stroke: var(--floor); stroke-dasharray: 5 4; }
svg .peak { fill: var(--ink); stroke: var(--surface); stroke-width: 2; }
svg .line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .line-0 { stroke: var(--backward); stroke-width: 6; opacity: 0.45; }
svg .line-1 { stroke: var(--forward); stroke-width: 1.8; }
details > summary { cursor: pointer; font-weight: 500; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; background: var(--accent); }
.tools { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 12px; margin: 0 0 8px; }
.tools[hidden], .browser [hidden] { display: none; }
.tools input {
  flex: 1 1 220px; min-width: 0; padding: 7px 10px; font: inherit; color: var(--ink); background: var(--code);
  border: 1px solid var(--floor); border-radius: 7px;
}
.tools button {
  padding: 7px 12px; font: inherit; color: var(--ink); background: var(--track); border: 1px solid var(--floor);
  border-radius: 7px; cursor: pointer;
}
.browser details { border-top: 1px solid var(--line); }
.browser summary { padding: 5px 0; overflow-wrap: anywhere; }
.browser .count, .browser .notes, .browser .note, .tools output { color: var(--soft); font-size: 13px; }
.browser .count { font-weight: 400; margin-left: 8px; }
.browser ol { list-style: none; margin: 0 0 8px; padding: 0 0 0 20px; }
.browser li { padding: 3px 0; }
.browser code {
  font: 12.5px/1.5 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere;
}
.browser .notes { display: block; overflow-wrap: anywhere; }
pre {
  margin: 12px 0 0; padding: 14px 16px; max-height: 70vh; overflow: auto; border-radius: 8px;
  background: var(--code); border: 1px solid var(--line); tab-size: 4;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace;
}
@media (max-width: 700px) {
  main, header { padding-left: 14px; padding-right: 14px; }
  section { padding: 16px; }
  th:first-child { white-space: normal; }
  figure { overflow-x: auto; }
  svg { min-width: 640px; }
}
@media print { body { background: none; } section, .cards > div { break-inside: avoid; } nav { display: none; } }
"""

STYLE = f"\n{variables()}{_PAGE_STYLE}{page_css()}"

# Folds and searches what the page holds already; without it everything is there, to be unfolded by hand.
SCRIPT = """
"use strict";
for (const browser of document.querySelectorAll(".browser")) {
  const tools = browser.querySelector(".tools");
  const input = tools.querySelector("input");
  const output = tools.querySelector("output");
  const groups = [...browser.querySelectorAll("details")].map((details) => ({
    details,
    chapter: details.closest(".chapter"),
    lines: [...details.querySelectorAll("li")].map((line) => ({
      line,
      text: `${details.dataset.name} ${line.textContent}`.toLowerCase(),
    })),
  }));
  const search = () => {
    const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
    const chapters = new Map(groups.map((group) => [group.chapter, 0]));
    let total = 0;
    for (const group of groups) {
      let hits = 0;
      for (const { line, text } of group.lines) {
        line.hidden = !words.every((word) => text.includes(word));
        hits += !line.hidden;
      }
      group.details.hidden = words.length > 0 && hits === 0;
      group.details.open = words.length > 0 && hits > 0;
      chapters.set(group.chapter, chapters.get(group.chapter) + !group.details.hidden);
      total += hits;
    }
    for (const [chapter, count] of chapters) chapter.hidden = count === 0;
    output.textContent = words.length ? `${total} found` : "";
  };
  input.addEventListener("input", search);
  for (const button of tools.querySelectorAll("button"))
    button.addEventListener("click", () => {
      for (const group of groups) group.details.open = button.dataset.action === "open";
    });
  tools.hidden = false;
}
"""

PAGE = """{% macro cell(value) %}
{% if value is bar %}
<span class="bar"><span class="track" aria-hidden="true"><span class="fill {{ value.tone }}" \
style="width:{{ '%.1f'|format([0, [value.fraction, 1]|min]|max * 100) }}%"></span></span>\
<span class="text">{{ value.text }}</span></span>
{%- else %}{{ value }}{% endif %}
{% endmacro %}
{% macro row(cells, anchor) %}
<tr{% if anchor %} id="{{ anchor }}"{% endif %}>
{% for value in cells %}
{% if loop.first %}<th scope="row">{{ value }}</th>{% else %}<td>{{ cell(value)|trim }}</td>{% endif %}

{% endfor %}
</tr>
{% endmacro %}
{% macro table(block, title) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ title }}, table">
<table class="{{ 'narrow' if block.columns|length <= 4 and not block.ends_in_text }} \
{{ 'ends-in-text' if block.ends_in_text }}">
{% if block.caption %}<caption>{{ block.caption }}</caption>{% endif %}

<thead><tr>{% for name in block.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for cells in block.rows %}{{ row(cells, block.anchors[loop.index0] if block.anchors else "") }}{% endfor %}
</tbody>
{% if block.total %}<tfoot>
{{ row(block.total, "") }}</tfoot>{% endif %}

</table>
</div>
{% endmacro %}
{% macro browser(block, number) %}
<div class="browser">
<div class="tools" hidden>
<label for="search-{{ number }}">Search {{ block.what }}</label>
<input type="search" id="search-{{ number }}" autocomplete="off" spellcheck="false" \
placeholder="op, module, type or source line">
<button type="button" data-action="open">Open all</button>
<button type="button" data-action="close">Close all</button>
<output for="search-{{ number }}" aria-live="polite"></output>
</div>
{% if block.note %}<p class="note">{{ block.note }}</p>{% endif %}

{% for name, groups in block.chapters %}
<div class="chapter">
<h3>{{ name }}</h3>
{% for group in groups %}
<details data-name="{{ name }} {{ group.name }}"><summary><span class="key {{ group.tone }}" aria-hidden="true"></span>
{{ group.name }}<span class="count">{{ group.lines|length + group.num_left_out }} {{ block.what }}</span></summary>
<ol>
{% for line in group.lines %}
<li><code>{{ line.code }}</code><span class="notes">{{ line.notes|join(" · ") }}</span></li>
{% endfor %}
</ol>
{% if group.num_left_out %}<p class="note">{{ group.num_left_out }} more are left out.</p>{% endif %}

</details>
{% endfor %}
</div>
{% endfor %}
</div>
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ report.title }} – wholestep report</title>
<style>{{ style|safe }}</style>
</head>
<body>
<a class="skip" href="#report-body">Skip to the report</a>
<header>
<h1>{{ report.title }}</h1>
<p>{{ report.subtitle }}</p>
<nav aria-label="Sections"><ul>
{% for section in report.sections %}
<li><a href="#{{ section.slug }}">{{ section.title }}</a></li>
{% endfor %}
</ul></nav>
</header>
<main id="report-body" tabindex="-1">
<dl class="cards">
{% for card in report.cards %}
<div><dt>{{ card.label }}</dt><dd class="value">{{ card.value }}</dd>\
{% if card.note %}<dd class="note">{{ card.note }}</dd>{% endif %}</div>
{% endfor %}
</dl>
{% for section in report.sections %}
{% set section_number = loop.index %}
<section id="{{ section.slug }}" aria-labelledby="{{ section.slug }}-title">
<h2 id="{{ section.slug }}-title">{{ section.title }}<a class="anchor" href="#{{ section.slug }}" \
aria-label="Link to {{ section.title }}">#</a></h2>
{% for block in section.blocks %}
{% if kind(block) == "Prose" %}
<p>{{ block.text }}</p>
{% elif kind(block) == "Table" %}
{{ table(block, section.title) }}
{% elif kind(block) == "Figure" %}
<figure>
{{ block.svg }}
{% if block.caption %}<figcaption>{{ block.caption }}</figcaption>{% endif %}

</figure>
{% elif kind(block) == "Code" %}
<details><summary>{{ block.summary }}</summary>
<pre tabindex="0"><code>{{ block.text }}</code></pre>
</details>
{% elif kind(block) == "Browser" %}
{{ browser(block, section_number) }}
{% endif %}
{% endfor %}
</section>
{% endfor %}
</main>
{% if script %}<script>{{ script|safe }}</script>{% endif %}

</body>
</html>
"""
