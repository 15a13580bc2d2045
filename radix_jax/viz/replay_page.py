"""The HTML page of a replay. Without scripts it is a list of steps; with them it shows one step at a time."""

from collections.abc import Sequence

from radix_jax.viz.shapes import safe
from radix_jax.viz.style import page_css_colours, svg_css

_CSS = """\
body{margin:0;padding:20px;background:var(--paper);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",Arial,sans-serif}
h1{margin:0 0 12px;font-size:20px}
a{color:var(--evictable-edge)}
.index{margin:0 0 16px;padding:0;display:flex;flex-wrap:wrap;gap:6px;list-style:none;counter-reset:step}
.index a{display:block;padding:2px 10px;border:1px solid var(--rule);border-radius:12px;text-decoration:none;
  font-size:13px;counter-increment:step}
.index a::before{content:counter(step) ". "}
.index a[aria-current]{background:var(--ink);color:var(--paper);border-color:var(--ink)}
.steps{margin:0;padding:0;list-style:none}
.step{margin:0 0 20px;overflow-x:auto}
.bar{display:flex;flex-wrap:wrap;align-items:center;gap:8px;margin:0 0 16px;font-size:13px;color:var(--faint)}
.bar[hidden],.stepping .step[hidden]{display:none}
button{padding:4px 14px;border:1px solid var(--plain-edge);border-radius:6px;background:var(--plain);color:var(--ink);
  font:inherit;cursor:pointer}
button:disabled{opacity:.45;cursor:default}
:focus-visible{outline:2px solid var(--evictable-edge);outline-offset:2px}
@media print{.bar{display:none}.stepping .step[hidden]{display:block}}
"""
_SCRIPT = """\
(() => {
  const steps = [...document.querySelectorAll(".step")];
  const links = [...document.querySelectorAll(".index a")];
  const bar = document.querySelector(".bar");
  const [previous, next, all] = bar.querySelectorAll("button");
  const place = bar.querySelector("output");
  let current = 0;
  let stepping = true;
  const show = (index) => {
    current = Math.max(0, Math.min(index, steps.length - 1));
    document.body.classList.toggle("stepping", stepping);
    steps.forEach((step, number) => { step.hidden = stepping && number !== current; });
    links.forEach((link, number) => {
      if (stepping && number === current) link.setAttribute("aria-current", "step");
      else link.removeAttribute("aria-current");
    });
    previous.disabled = !stepping || current === 0;
    next.disabled = !stepping || current === steps.length - 1;
    all.textContent = stepping ? "Show all" : "Step by step";
    place.textContent = stepping ? `Step ${current + 1} of ${steps.length}` : `${steps.length} steps`;
  };
  previous.addEventListener("click", () => show(current - 1));
  next.addEventListener("click", () => show(current + 1));
  all.addEventListener("click", () => { stepping = !stepping; show(current); });
  links.forEach((link, number) => link.addEventListener("click", (event) => {
    if (stepping) event.preventDefault();
    show(number);
  }));
  const keys = {
    ArrowLeft: () => current - 1, ArrowRight: () => current + 1, Home: () => 0, End: () => steps.length - 1,
  };
  document.addEventListener("keydown", (event) => {
    if (!stepping || event.ctrlKey || event.altKey || event.metaKey || !(event.key in keys)) return;
    event.preventDefault();
    show(keys[event.key]());
  });
  if (steps.length < 2) return;
  bar.hidden = false;
  show(links.findIndex((link) => location.hash && link.hash === location.hash));
})();
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, steps: Sequence[tuple[str, str]]) -> str:
    """The whole document. steps: the title of each and its drawing, an SVG element without a style sheet."""
    index = "".join(f'<li><a href="#step-{n}">{safe(name)}</a></li>\n' for n, (name, _) in enumerate(steps, 1))
    items = "".join(f'<li class="step" id="step-{n}">\n{svg}</li>\n' for n, (_, svg) in enumerate(steps, 1))
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{safe(title)}</title>
<style>
{page_css_colours()}{_CSS}{svg_css()}</style>
</head>
<body>
<h1>{safe(title)}</h1>
<nav aria-label="Steps"><ol class="index">
{index}</ol></nav>
<div class="bar" hidden>
<button type="button">Previous</button>
<button type="button">Next</button>
<button type="button">Show all</button>
<output aria-live="polite"></output>
<span>Keys: left, right, Home, End</span>
</div>
<ol class="steps">
{items}</ol>
<script>
{_SCRIPT}</script>
</body>
</html>
"""
