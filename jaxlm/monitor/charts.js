(() => {
"use strict";
const AXES = ["steps", "tokens", "seconds"];
const state = { axis: 0, smooth: 0 };
const figures = [...document.querySelectorAll("figure.chart")];
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

function brief(value) {
  const size = Math.abs(value);
  for (const [scale, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (size >= scale) return +(value / scale).toPrecision(3) + letter;
  return String(+value.toPrecision(3));
}

function duration(seconds) {
  if (seconds < 60) return brief(seconds) + "s";
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  if (seconds < 3600) return Math.floor(seconds / 60) + "m" + two(seconds % 60) + "s";
  if (seconds < 86400) return Math.floor(seconds / 3600) + "h" + two(seconds % 3600 / 60) + "m";
  return Math.floor(seconds / 86400) + "d" + two(seconds % 86400 / 3600) + "h";
}

const amount = (value) => (state.axis === 2 ? duration(value) : brief(value));

function ticks(low, high, most) {
  const span = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(span));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= span * (1 - 1e-9));
  const result = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++)
    result.push(+(n * step).toPrecision(12));
  return result;
}

// Exponential mean, without the bias of its start.
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = state.smooth * mean + (1 - state.smooth) * value;
    weight = state.smooth * weight + 1 - state.smooth;
    return mean / weight;
  });
}

function draw(figure) {
  const data = figure.chart, svg = figure.querySelector("svg");
  const width = Math.max(figure.clientWidth, 240), height = 280;
  const [left, right, top, bottom] = [56, 12, 12, 30];
  const scale = data.log ? Math.log10 : (v) => v;
  const all = data.series.flatMap((s) => s.y);
  let low = Math.min(...all), high = Math.max(...all);
  const reach = high - low || Math.abs(high) || 1;
  for (const [, value] of data.levels)
    if (value > low - reach && value < high + reach) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  [low, high] = [scale(low), scale(high)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const margin = (high - low) * 0.05;
  [low, high] = [low - margin, high + margin];
  const last = Math.max(...data.series.flatMap((s) => s.x[state.axis])) || 1;
  const x = (v) => left + (v / last) * (width - left - right);
  const y = (v) => height - bottom - ((scale(v) - low) / (high - low)) * (height - top - bottom);
  const parts = [], labels = [];
  const isDecades = data.log && high - low > 1;
  const values = isDecades ? ticks(low, high, 6).map((v) => 10 ** v)
    : data.log ? ticks(10 ** low, 10 ** high, 6) : ticks(low, high, 6);
  for (const value of values) {
    parts.push(`<path class="grid" d="M${left} ${y(value).toFixed(1)}H${width - right}"/>`,
      `<text class="y" x="${left - 6}" y="${y(value) + 4}">${brief(value)}</text>`);
  }
  for (const tick of ticks(0, last, width < 420 ? 3 : 6))
    parts.push(`<text class="x" x="${x(tick)}" y="${height - 8}">${amount(tick)}</text>`);
  let above = -99, end = width - right;
  const taken = [];  // heights of labels
  for (const [name, value] of data.levels)
    if (scale(value) >= low && scale(value) <= high) {
      end = Math.abs(y(value) - above) < 14 ? end - 8 * name.length - 14 : width - right;
      above = y(value);
      taken.push(above + 4);
      parts.push(`<path class="level" d="M${left} ${y(value).toFixed(1)}H${width - right}"/>`);
      labels.push(`<text class="level" x="${end}" y="${y(value) + 4}">${escaped(name)}</text>`);
    }
  data.series.forEach((series, index) => {
    const xs = series.x[state.axis];
    const line = (values, kind) => parts.push(`<path class="s${series.color} ${kind}" d="M${
      values.map((v, i) => `${x(xs[i]).toFixed(1)} ${y(v).toFixed(1)}`).join("L")}"/>`);
    const canSmooth = state.smooth > 0 && !series.marked;
    series.shown = canSmooth ? smoothed(series.y) : series.y;
    if (canSmooth) line(series.y, "thin");
    line(series.shown, series.thin ? "thin" : "");
    if (series.marked || xs.length === 1)
      series.y.forEach((v, i) => parts.push(
        `<circle class="s${series.color}" cx="${x(xs[i])}" cy="${y(v)}" r="2.5"/>`));
    if (index === data.mark) {
      const i = series.y.indexOf(Math.min(...series.y)), side = x(xs[i]) > width / 2;
      let at = y(series.y[i]) - 8;
      while (side && taken.some((each) => Math.abs(each - at) < 12)) at -= 4;
      parts.push(`<circle class="best" cx="${x(xs[i])}" cy="${y(series.y[i])}" r="6"/>`,
        `<text class="best" text-anchor="${side ? "end" : "start"}" x="${x(xs[i]) + (side ? -10 : 10)}" y="${
          at}">best: ${+series.y[i].toPrecision(5)} at ${data.axis} ${series.x[0][i]}</text>`);
    }
  });
  parts.push(...labels, `<path class="cursor" d=""/>`);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = parts.join("");
  figure.place = { x, last, left, right, top, bottom, width, height };
}

function hover(figure, event) {
  const { last, left, right, top, bottom, width, height, x } = figure.place;
  const box = figure.querySelector("svg").getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * last;
  const output = figure.querySelector("output");
  const near = figure.chart.series.map((series) => {
    const xs = series.x[state.axis];
    let best = 0;
    xs.forEach((v, i) => { if (Math.abs(v - at) < Math.abs(xs[best] - at)) best = i; });
    return best;
  });
  if (!near.length) return;
  const longest = figure.chart.series.map((s, i) => [s.x[state.axis][near[i]], s.x[0][near[i]]]);
  const [value, step] = longest.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
  const rows = figure.chart.series.map((series, i) =>
    series.thin ? "" : `<b class="s${series.color}">${escaped(series.name)}</b> ${
      +series.shown[near[i]].toPrecision(5)}`).filter(Boolean);
  output.innerHTML = `${figure.chart.axis} ${step}${state.axis ? `, ${amount(value)}${
    state.axis === 1 ? " tokens" : ""}` : ""}: ${rows.join(", ")}`;
  output.hidden = false;
  figure.querySelector(".cursor").setAttribute("d", `M${x(value).toFixed(1)} ${top}V${height - bottom}`);
}

function leave(figure) {
  figure.querySelector("output").hidden = true;
  figure.querySelector(".cursor")?.setAttribute("d", "");
}

const redraw = () => figures.forEach(draw);
for (const figure of figures) {
  figure.chart = JSON.parse(figure.dataset.chart);
  figure.querySelector("output").hidden = true;
  const svg = figure.querySelector("svg");
  for (const kind of ["pointermove", "pointerdown"])
    svg.addEventListener(kind, (event) => hover(figure, event));
  svg.addEventListener("pointerleave", () => leave(figure));
}
for (const form of document.querySelectorAll("form.controls")) {
  form.hidden = false;
  form.addEventListener("input", () => {
    state.axis = AXES.indexOf(form.elements.axis.value);
    state.smooth = Number(form.elements.smooth.value);
    redraw();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}
let pending = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(redraw);
});
redraw();
})();
