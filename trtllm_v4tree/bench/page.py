"""The report's page as a jinja2 template. It refers to nothing outside itself."""

STYLE = """
  :root { color-scheme: light; }
  body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1b1b1b; background: #fff;
    margin: 0 auto; max-width: 1080px; padding: 1.5rem; }
  h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; }
  .sub { color: #555; margin: 0; }
  .cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.4rem 0; }
  .card { flex: 1 1 14rem; border: 1px solid #ddd; border-left: 5px solid #D55E00; border-radius: 4px; padding: .7rem 1rem; }
  .card b { display: block; font-size: 1.7rem; }
  .card span { color: #444; }
  figure { margin: 1.6rem 0; overflow-x: auto; } figure svg { width: 100%; height: auto; }
  figcaption { color: #444; margin-top: .3rem; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-size: .92rem; }
  th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
  th { background: #f5f5f5; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
  .verdict { white-space: nowrap; font-weight: 600; }
  .holds::before { content: "✓ "; } .holds { color: #00664b; }
  .holds-in-part::before { content: "~ "; } .holds-in-part { color: #7a5200; }
  .does-not-hold::before { content: "✗ "; } .does-not-hold { color: #a33c00; } .not-measured { color: #666; font-weight: 400; }
  .note { background: #fff6e0; border-left: 5px solid #E69F00; padding: .6rem 1rem; }
  code { font-size: .9em; overflow-wrap: anywhere; } details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
"""

PAGE = (
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>v4tree bench: {{ results.datasets|join(", ") }}</title>
<style>"""
    + STYLE
    + """</style>
</head>
<body>
<h1>What tree speculation gives here</h1>
<p class="sub">{{ results.about.date }}, {{ results.about.machine.processor }}, {{ results.about.machine.cores }} cores;
engine {{ results.about.engine.target }} {{ results.about.engine.dtype }}; {{ results.datasets|join(", ") }}</p>
{% if not results.complete %}
<p class="note">This run was not finished: every cell has fewer blocks than planned, and wider intervals.</p>
{% endif %}
{% if loaded %}
<p class="note">{{ loaded }}</p>
{% endif %}
<div class="cards">
{% for figure, text in headline %}
<div class="card"><b>{{ figure }}</b><span>{{ text }}</span></div>
{% endfor %}
</div>

<h2>In words</h2>
<p>{{ paragraph }}</p>
{% if why %}
<p>{{ why }}</p>
{% endif %}

<h2>Pictures</h2>
{% for picture in pictures %}
<figure id="{{ picture.name }}">{{ picture.svg|safe }}<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}

<h2>The paper's figures beside ours</h2>
<p class="sub">{{ source }}</p>
<div class="scroll"><table>
<tr><th>claim</th><th>paper</th><th>here</th><th>verdict</th></tr>
{% for v in verdicts %}
<tr><td>{{ v.claim }}</td><td>{{ v.published }}</td><td>{{ v.ours or "–" }}</td>
<td class="verdict {{ v.verdict|replace(" ", "-") }}">{{ v.verdict }}</td></tr>
{% endfor %}
</table></div>

<h2>The fastest speculation of all that were measured</h2>
<p class="sub">Chosen after looking, so slightly optimistic; everything above uses the shape fixed before.</p>
<div class="scroll"><table>
<tr><th>data set</th><th class="n">batch</th><th>speculation</th><th class="n">over plain</th></tr>
{% for dataset, batch, name, ratio in best %}
<tr><td>{{ dataset }}</td><td class="n">{{ batch }}</td><td>{{ name }}</td><td class="n">{{ ratio|estimate }}</td></tr>
{% endfor %}
</table></div>

{% if others %}
<h2>Other speculations against the fastest fixed choice</h2>
<p class="sub">The fastest of plain, linear and tree at each data set and batch size, known only afterwards, counts as 1.</p>
<div class="scroll"><table>
<tr><th>data set</th><th class="n">batch</th><th>speculation</th><th class="n">accepted length</th><th class="n">over plain</th>
<th class="n">of the fastest</th></tr>
{% for c, share in others %}
<tr><td>{{ c.dataset }}</td><td class="n">{{ c.batch }}</td><td>{{ c.speculation }}</td><td class="n">{{ c.accepted_length|estimate }}</td>
<td class="n">{{ c.to_plain|estimate }}</td><td class="n">{{ "%.2f"|format(share) }}</td></tr>
{% endfor %}
</table></div>
{% endif %}

<h2>All cells</h2>
<p class="sub">Medians over blocks and 95 % bootstrap intervals (accepted length: over prompts). Ratios are taken within a block. Throughput
counts decoding while the batch is full; results.csv has it to the end of the last sequence as well. Same text: share of prompts with the
token ids of plain decoding; where it is below 1, kernels rounded two near-equal tokens differently.</p>
<details><summary>{{ results.cells|length }} cells</summary>
<div class="scroll"><table>
<tr><th>data set</th><th class="n">batch</th><th>speculation</th><th class="n">blocks</th><th class="n">tokens/s</th>
<th class="n">accepted length</th><th class="n">over plain</th><th class="n">over linear</th><th class="n">same text</th></tr>
{% for c in results.cells %}
<tr><td>{{ c.dataset }}</td><td class="n">{{ c.batch }}</td><td>{{ c.speculation }}</td><td class="n">{{ c.blocks }}</td>
<td class="n">{{ c.tokens_per_second|estimate(0) }}</td><td class="n">{{ c.accepted_length|estimate }}</td>
<td class="n">{{ c.to_plain|estimate }}</td><td class="n">{{ c.to_linear|estimate }}</td><td class="n">{{ "%.2f"|format(c.same_text) }}</td></tr>
{% endfor %}
</table></div></details>

<h2>How it was measured</h2>
<p><code>{{ results.about.command|join(" ") }}</code></p>
<div class="scroll"><table>
{% for group in ("machine", "versions", "engine", "settings") %}
{% for name, value in results.about[group].items() %}
<tr><td>{{ group }}</td><td>{{ name }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}
{% endfor %}
<tr><td>run</td><td>load before, after; seconds</td><td><code>{{ results.about.load_average }}; {{ results.about.seconds }}</code></td></tr>
</table></div>
</body>
</html>
"""
)
