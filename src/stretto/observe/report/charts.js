"use strict";

const SVG = "http://www.w3.org/2000/svg";

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function draw(parent, tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function canvas(host, height) {
  const width = Math.max(host.clientWidth, 260);
  const svg = draw(host, "svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  return [svg, width];
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

function duration(seconds) {
  if (seconds >= 7200) return number(seconds / 3600) + " h";
  if (seconds >= 600) return number(seconds / 60) + " min";
  if (seconds >= 1 || seconds === 0) return number(seconds) + " s";
  return number(seconds * 1e3) + " ms";
}

const percent = (share) => (100 * share).toFixed(1) + " %";

/** Round values from low to high: 1, 2 or 5 times a power of ten apart. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    values.push(Number((i * step).toPrecision(12)));
  }
  return values;
}

/** Mean over the values up to and including each, at most `width` of them. */
function smoothed(values, width) {
  let sum = 0;
  return values.map((value, i) => {
    sum += value - (i >= width ? values[i - width] : 0);
    return sum / Math.min(i + 1, width);
  });
}

const tip = {
  box: document.getElementById("tip"),
  show(event, ...content) {
    this.box.replaceChildren(...content);
    this.box.style.display = "block";
    const { width, height } = this.box.getBoundingClientRect();
    const right = event.clientX + 14 + width > innerWidth;
    this.box.style.left = Math.max(4, event.clientX + (right ? -14 - width : 14)) + "px";
    this.box.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4)) + "px";
  },
  hide() {
    this.box.style.display = "none";
  },
};

const runColour = (index) => `var(--run-${index})`;

function key(colour, text) {
  return node("span", { class: "key" },
    node("span", { class: "swatch", style: `background:${colour}` }), text);
}

function path(xs, ys, stepped) {
  let d = "";
  xs.forEach((x, i) => {
    if (i && stepped) d += `H${x.toFixed(1)}`;
    d += `${i ? (stepped ? "V" : "L") : "M"}${i && stepped ? "" : x.toFixed(1) + " "}${ys[i].toFixed(1)}`;
  });
  return d;
}

/**
 * Lines over a common axis.
 * series: [{index, name, x, y}]; options: title, xText (formats x), xLabel, smooth, stepped, zero.
 */
function lineChart(host, series, options) {
  host.replaceChildren(node("h3", {}, options.title));
  const height = 230, left = 52, right = 14, top = 8, bottom = 38;
  const [svg, width] = canvas(host, height);
  const allX = series.flatMap((s) => s.x), allY = series.flatMap((s) => s.y);
  const x0 = Math.min(...allX, options.fromZero ? 0 : Infinity);
  const x1 = Math.max(...allX);
  let y0 = Math.min(...allY, options.zero ? 0 : Infinity), y1 = Math.max(...allY);
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.1, y1 + (Math.abs(y1) || 1) * 0.1];
  const yTicks = ticks(y0, y1, 5);
  y1 = Math.max(y1, yTicks.at(-1));
  const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  for (const y of yTicks) {
    draw(svg, "path", { class: "grid", d: `M${left} ${Y(y)}H${width - right}` });
    draw(svg, "text", { class: "muted", x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, number(y));
  }
  for (const x of options.ticks(x0, x1, Math.max(2, Math.floor((width - left) / 90)))) {
    draw(svg, "text", { class: "muted", x: X(x), y: height - bottom + 17, "text-anchor": "middle" }, (options.tickText ?? options.xText)(x, x1));
  }
  draw(svg, "text", { class: "muted", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, options.xLabel);
  const shown = series.map((s) => {
    const window = options.smooth && s.y.length >= 30 ? Math.round(s.y.length / 25) : 1;
    const line = { fill: "none", stroke: runColour(s.index), "stroke-linejoin": "round" };
    const xs = s.x.map(X);
    if (window > 1) draw(svg, "path", { ...line, "stroke-opacity": 0.25, d: path(xs, s.y.map(Y)) });
    const y = smoothed(s.y, window);
    draw(svg, "path", { ...line, "stroke-width": options.stepped ? 1.5 : 2, d: path(xs, y.map(Y), options.stepped) });
    if (xs.length === 1) draw(svg, "circle", { cx: xs[0], cy: Y(y[0]), r: 3.5, fill: runColour(s.index) });
    return { ...s, y };
  });
  const cursor = draw(svg, "path", { class: "grid", visibility: "hidden" });
  const dots = shown.map((s) => draw(svg, "circle", { r: 4, fill: runColour(s.index), stroke: "var(--paper)", "stroke-width": 1.5, visibility: "hidden" }));
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const x = x0 + ((at - left) / (width - left - right)) * (x1 - x0);
    if (x < x0 || x > x1) return leave();
    cursor.setAttribute("d", `M${at} ${top}V${height - bottom}`);
    cursor.setAttribute("visibility", "visible");
    const lines = shown.map((s, i) => {
      const near = nearest(s.x, x);
      dots[i].setAttribute("cx", X(s.x[near]));
      dots[i].setAttribute("cy", Y(s.y[near]));
      dots[i].setAttribute("visibility", "visible");
      return key(runColour(s.index), `${number(s.y[near])}  ${s.name}`);
    });
    tip.show(event, `${options.xLabel} ${options.xText(x)}`, ...lines);
  });
  const leave = () => {
    tip.hide();
    for (const mark of [cursor, ...dots]) mark.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointerleave", leave);
}

/** Place of the value nearest to `x` in an ascending list. */
function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle;
    else low = middle;
  }
  return x - values[low] > values[high] - x ? high : low;
}

const timeUnit = (high) => (high >= 7200 ? [3600, "h"] : high >= 600 ? [60, "min"] : high >= 1 ? [1, "s"] : [1e-3, "ms"]);

/** Round times between low and high [s], in the unit that fits the highest. */
function timeTicks(low, high, count) {
  const [unit] = timeUnit(high);
  return ticks(low / unit, high / unit, count).map((t) => t * unit);
}

/** A time on an axis that ends at `high`: all in one unit. */
function timeText(seconds, high) {
  const [unit, name] = timeUnit(high);
  return `${number(seconds / unit)} ${name}`;
}
