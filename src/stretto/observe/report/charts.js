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

/** The range of values with some room at both ends. */
function roomy(values, share) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}

/** Axes with round values; returns the scales. options: title, xLabel, xTicks, yText. */
function axes(host, [x0, x1], [y0, y1], options) {
  host.replaceChildren(node("h3", {}, options.title));
  const height = options.height ?? 260, left = 52, right = 18, top = 10, bottom = 38;
  const [svg, width] = canvas(host, height);
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  for (const y of ticks(y0, y1, 5)) {
    draw(svg, "path", { class: "grid", d: `M${left} ${Y(y)}H${width - right}` });
    draw(svg, "text", { class: "muted", x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, (options.yText ?? number)(y));
  }
  const xTicks = options.xTicks ?? ticks(x0, x1, Math.max(2, Math.floor((width - left) / 80))).map((x) => [x, number(x)]);
  for (const [x, text] of xTicks) {
    draw(svg, "path", { class: "grid", d: `M${X(x)} ${height - bottom}v4` });
    draw(svg, "text", { class: "muted", x: X(x), y: height - bottom + 17, "text-anchor": "middle" }, text);
  }
  draw(svg, "text", { class: "muted", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, options.xLabel);
  return { svg, width, X, Y, left, right };
}

/**
 * Points with error bars and names.
 * points: [{colour, name, x, y, xError, yError, tip}]; options: as axes, and `line`: [y, text].
 */
function scatterChart(host, points, options) {
  const xs = points.flatMap((p) => [p.x - p.xError, p.x + p.xError]);
  const ys = points.flatMap((p) => [p.y - p.yError, p.y + p.yError]);
  const { svg, width, X, Y, left, right } = axes(host, roomy(xs, 0.12), roomy([...ys, options.line[0]], 0.08), options);
  const across = Y(options.line[0]);
  draw(svg, "path", { d: `M${left} ${across}H${width - right}`, stroke: "var(--muted)", "stroke-dasharray": "4 4" });
  draw(svg, "text", { class: "muted", x: width - right, y: across - 5, "text-anchor": "end" }, options.line[1]);
  const taken = points.map((p) => [X(p.x) - 8, Y(p.y) - 8, X(p.x) + 8, Y(p.y) + 8]);
  taken.push([width - right - 6.2 * options.line[1].length, across - 16, width - right, across]);
  for (const p of points) {
    const x = X(p.x), y = Y(p.y);
    const bars = `M${X(p.x - p.xError)} ${y}H${X(p.x + p.xError)}M${x} ${Y(p.y - p.yError)}V${Y(p.y + p.yError)}`;
    draw(svg, "path", { d: bars, stroke: p.colour, "stroke-opacity": 0.55, "stroke-width": 1.5 });
    const dot = draw(svg, "circle", { class: "work", cx: x, cy: y, r: 5.5, fill: p.colour });
    dot.addEventListener("pointermove", (event) => tip.show(event, key(p.colour, p.name), p.tip));
    dot.addEventListener("pointerleave", () => tip.hide());
    const length = 6.4 * p.name.length;
    const places = [[9, -7], [-9 - length, -7], [9, 16], [-9 - length, 16], [-length / 2, -13], [-length / 2, 24]];
    const boxes = places.map(([dx, dy]) => [x + dx, y + dy - 10, x + dx + length, y + dy + 2]);
    const free = boxes.findIndex(([a, b, c, d]) => a > left && c < width - 2 && !taken.some(([e, f, g, h]) => a < g && c > e && b < h && d > f));
    if (free < 0) continue; // its name is shown when it is pointed at
    taken.push(boxes[free]);
    draw(svg, "text", { x: boxes[free][0], y: boxes[free][3] - 2 }, p.name);
  }
}

/**
 * Lines over a dial that doubles.
 * lines: [{colour, name, points: [[n, y]], dots: [[n, y, name]]}]; options: as axes, without xTicks.
 */
function dialChart(host, lines, options) {
  const dial = [...new Set(lines.flatMap((l) => l.points.map(([n]) => n)))].sort((a, b) => a - b);
  const at = Math.log2;
  const [x0, x1] = [at(dial[0]), at(dial.at(-1))];
  const room = (x1 - x0 || 1) * 0.06;
  const ys = lines.flatMap((l) => l.dots.map(([, y]) => y));
  const { svg, X, Y } = axes(host, [x0 - room, x1 + room], roomy(ys, 0.08), { ...options, xTicks: dial.map((n) => [at(n), n]) });
  for (const l of lines) {
    draw(svg, "path", { fill: "none", stroke: l.colour, "stroke-width": 2, "stroke-linejoin": "round", d: path(l.points.map(([n]) => X(at(n))), l.points.map(([, y]) => Y(y))) });
    for (const [n, y, name] of l.dots) {
      const dot = draw(svg, "circle", { class: "work", cx: X(at(n)), cy: Y(y), r: 4, fill: l.colour });
      dot.addEventListener("pointermove", (event) => tip.show(event, key(l.colour, l.name), `${name}\nN = ${n}: ${(options.yText ?? number)(y)}`));
      dot.addEventListener("pointerleave", () => tip.hide());
    }
  }
}
