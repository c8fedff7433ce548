"""One self-contained page of an evaluation: the verdict, tables, and plots as inline SVG that follow the reader's light or dark setting."""
from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

from jinja2 import Environment

from pykvq.evaluation.retrieval import DEPTHS

_INK = "#010203"                         # matplotlib wants a colour; the page's own takes its place
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999")      # Tol's bright set


def require_plots() -> None:
    """Raises ValueError, with the command to run, when matplotlib is missing."""
    try:
        import matplotlib                # noqa: F401
    except ImportError as error:
        raise ValueError("--html needs matplotlib; run: pip install 'pykvq[plot]'") from error


def page(value: dict) -> str:
    """The page for the JSON of pykvq eval. Raises ValueError without matplotlib."""
    require_plots()
    results = value["results"]
    whole = [r for r in results if _both(r)]
    plots = [("KL divergence from f16, mean with 95 % interval", "Blue: K and V together, red: one alone. The dashed line is the tolerance.", _divergence(results, value["tolerance"])),
             ("KL divergence along the context", "Mean over the scored positions of all texts, K and V together.", _drift(whole, value["setup"])),
             ("Distribution of the divergence", "Share of positions whose divergence is larger than the value.", _tail(whole))]
    environment = Environment(autoescape=True)
    environment.globals |= {"name": _name, "percent": lambda x: f"{100 * x:.0f} %", "interval": _interval, "depths": [f"{d:.0%}" for d in DEPTHS]}
    return environment.from_string(_PAGE).render(v=value, results=results, plots=plots)


def _name(result: dict) -> str:
    k, v = result["kv_type"]
    return k if k == v else f"K {k}, V {v}"


def _both(result: dict) -> bool:
    return "f16" not in result["kv_type"]


def _interval(figure: dict, digits: int = 3) -> str:
    text = f"{figure['value']:.{digits}g}"
    return text if figure["low"] is None else f"{text} ({figure['low']:.{digits}g} to {figure['high']:.{digits}g})"


def _svg(draw: Callable, height: float = 3.2) -> str:
    """What draw(axes) draws, as SVG without a fixed size, its ink in the page's text colour."""
    import matplotlib
    from matplotlib.figure import Figure
    ink = {f"{part}.color": _INK for part in ("text", "xtick", "ytick")} | {"axes.edgecolor": _INK, "axes.labelcolor": _INK}
    with matplotlib.rc_context(ink | {"svg.fonttype": "none", "svg.hashsalt": "pykvq", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg"):].replace(_INK, "currentColor")
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1), count=1)


def _divergence(results: Sequence[dict], tolerance: float) -> str:
    def draw(axes) -> None:
        for i, r in enumerate(results):
            kld = r["kld"]
            errors = None if kld["low"] is None else [[kld["value"] - max(kld["low"], 1e-6)], [kld["high"] - kld["value"]]]
            axes.errorbar(max(kld["value"], 1e-6), -i, xerr=errors, fmt="o", color=_COLOURS[0 if _both(r) else 1], capsize=3)
        axes.axvline(tolerance, color=_INK, linestyle="--", linewidth=1)
        axes.set_yticks([-i for i in range(len(results))], [_name(r) for r in results])
        axes.set_xscale("log")
        axes.set_xlabel("mean KL divergence, nats a token")
    return _svg(draw, 1 + 0.28 * len(results))


def _drift(results: Sequence[dict], setup: dict) -> str:
    def draw(axes) -> None:
        for colour, r in zip(_COLOURS, results):
            step = setup["context"] / len(r["drift"])
            axes.plot([(i + 0.5) * step for i in range(len(r["drift"]))], [max(f["value"], 1e-6) for f in r["drift"]], "o-", color=colour, label=_name(r))
        axes.set_yscale("log")
        axes.set_xlabel("position")
        axes.set_ylabel("mean KL divergence")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(draw)


def _tail(results: Sequence[dict]) -> str:
    def draw(axes) -> None:
        for colour, r in zip(_COLOURS, results):
            values = [max(x, 1e-7) for x in r["histogram"]]
            axes.plot(values, [100 - 100 * i / (len(values) - 1) for i in range(len(values))], color=colour, label=_name(r))
        axes.set_xscale("log")
        axes.set_xlabel("KL divergence, nats")
        axes.set_ylabel("% of positions above")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(draw)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pykvq eval: {{ v.model }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dc; --soft: #f3f4f6; --good: #1b7f3b; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e9; --paper: #16181c; --line: #3a3f46; --soft: #20242a; --good: #6fd08c; --bad: #ff8a80 } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
#verdict { border-left: .3rem solid var({{ '--good' if v.verdict.kv_type else '--bad' }}); background: var(--soft); padding: .8rem 1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap } th:first-child, td:first-child { text-align: left }
td.within { color: var(--good) } td.beyond { color: var(--bad) }
svg { width: 100%; height: auto; color: var(--ink) } figure { margin: 0 } p.note, figcaption { font-size: .9rem; opacity: .8 }
</style>
</head>
<body>
<h1>{{ v.model }}: what a smaller KV cache costs</h1>
<p id="verdict">{{ v.verdict.sentence }}</p>
<h2>Against the f16 cache</h2>
<p class="note">{{ v.setup.chunks }} texts of {{ v.setup.context }} tokens ({{ v.text }}), {{ v.setup.rows }} positions scored in each;
f16 perplexity {{ '%.2f' % v.f16.perplexity }}. Brackets: 95 % intervals.</p>
<div class="wide"><table id="figures">
<tr><th>cache type</th><th>smaller</th><th>mean KLD</th><th>last quarter</th><th>90 %</th><th>99 %</th><th>99.9 %</th><th>perplexity to f16</th><th>same top token</th></tr>
{% for r in results %}<tr><td>{{ name(r) }}</td><td>{{ '%.2f' % r.smaller }}x</td>
<td class="{{ 'within' if r.kld.value <= v.tolerance else 'beyond' }}">{{ interval(r.kld) }}</td><td>{{ '%.3g' % r.kld_late.value }}</td>
{% for q in ('90', '99', '99.9') %}<td>{{ '%.3g' % r.kld_quantiles[q].value }}</td>{% endfor %}
<td>{{ interval(r.perplexity_ratio, 4) }}</td><td>{{ '%.1f' % (100 * r.same_top.value) }} %</td></tr>
{% endfor %}</table></div>
{% for title, caption, svg in plots %}<h2>{{ title }}</h2><figure>{{ svg | safe }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
<h2>Planted facts</h2>
<p class="note">{% if v.verdict.able %}Codes hidden in made-up text at several depths; the share found, by length and depth. f16 finds {{ v.f16.found }}.
{% else %}This model does not find the planted facts with f16 itself, so they say nothing about the types.{% endif %}</p>
<div class="wide"><table id="facts">
<tr><th>cache type</th><th>tokens</th>{% for d in depths %}<th>{{ d }}</th>{% endfor %}<th>found</th><th>lost</th><th>gained</th></tr>
{% for r in [v.f16] + results %}{% for length, row in r.retrieval.items() %}<tr><td>{{ name(r) if loop.first else '' }}</td><td>{{ length }}</td>
{% for share in row %}<td>{{ percent(share) }}</td>{% endfor %}
{% if loop.first %}<td>{{ r.found }}</td><td>{{ r.lost }}</td><td>{{ r.gained }}</td>{% else %}<td></td><td></td><td></td>{% endif %}</tr>
{% endfor %}{% endfor %}</table></div>
<h2>Long greedy runs</h2>
<p class="note">{{ v.setup.chunks }} runs of {{ v.setup.generated }} tokens after half a text, one token at a time: tokens that equal f16's before the first difference, and the share of
four-token sequences that had occurred before (f16 {{ percent(v.f16.repetition_f16) }}).</p>
<div class="wide"><table id="runs"><tr><th>cache type</th><th>equal tokens</th><th>repetition</th></tr>
{% for r in results %}<tr><td>{{ name(r) }}</td><td>{{ r.first_divergence | join(', ') }}</td><td>{{ percent(r.repetition.value) }}</td></tr>
{% endfor %}</table></div>
<p class="note">Everything on this page is measured, in {{ '%.0f' % v.seconds }} s. Written by pykvq eval.</p>
</body>
</html>
"""
