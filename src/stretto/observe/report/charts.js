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

function number(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(size >= 1000 ? digits + 1 : digits)));
}

function duration(seconds) {
  if (seconds >= 7200) return number(seconds / 3600) + " h";
  if (seconds >= 600) return number(seconds / 60) + " min";
  if (seconds >= 1 || seconds === 0) return number(seconds) + " s";
  return number(seconds * 1e3) + " ms";
}

const percent = (share) => (100 * share).toFixed(1) + " %";

/** At least two round values from low to high: 1, 2 or 5 times a power of ten apart. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    values.push(Number((i * step).toPrecision(12)));
  }
  return values.length < 2 && low < high ? ticks(low, high, 2 * count) : values;
}

/** Ticks with their texts, with enough digits to tell neighbours apart. */
function labelled(values, text = number) {
  const power = (value) => Math.floor(Math.log10(Math.abs(value) || 1));
  const [low, next] = values, high = Math.max(...values.map(Math.abs));
  const digits = next === undefined ? 3 : Math.max(3, power(high) - power(next - low) + 2);
  return values.map((value) => [value, text(value, digits)]);
}

/** Exponential moving averages, as TensorBoard's: without the bias to 0 of the first values. */
function smoothed(values, weight) {
  let last = 0;
  return values.map((value, i) => {
    last = last * weight + (1 - weight) * value;
    return last / (1 - weight ** (i + 1));
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

/** What a page remembers while its tab is open; nothing where a browser forbids that. */
function remembered(name, value) {
  try {
    if (value === undefined) return JSON.parse(sessionStorage.getItem(name)) ?? {};
    sessionStorage.setItem(name, JSON.stringify(value));
  } catch { /* as it is opened the next time */ }
  return {};
}

/** What all curves share: their axis, the part of it that is shown, and their smoothing. */
const view = {
  axis: "steps", range: null, smoothing: 0.6, dragged: false,
  ...remembered("view"),
  set(changes) {
    Object.assign(this, changes);
    const { axis, range, smoothing } = this;
    remembered("view", { axis, range, smoothing });
    this.painted();
  },
  painted() {}, // draws all curves again
};

/** A part of an axis: low to high, where that is in `whole` and not too short to zoom into. */
function zoomed([low, high], whole) {
  const part = [Math.max(low, whole[0]), Math.min(high, whole[1])];
  if (part[0] <= whole[0] && part[1] >= whole[1]) return null;
  return part[1] - part[0] > (whole[1] - whole[0]) / 1e4 ? part : view.range;
}

/**
 * Curves of runs: smoothed lines over what was recorded. Dragging across it, or Ctrl and the wheel,
 * zooms the common axis; a double click shows all of it.
 * series: [{index, name, x, y}]; options: as axes, and whole: [x0, x1], xTicksOf, xText, stepped, zero.
 */
function curveChart(host, series, options) {
  const { whole } = options, [x0, x1] = view.range ?? whole;
  const seen = series.flatMap((s) => s.y.filter((_, i) => s.x[i] >= x0 && s.x[i] <= x1));
  let y0 = Math.min(...seen, options.zero ? 0 : Infinity), y1 = Math.max(...seen);
  if (!seen.length) [y0, y1] = [0, 1];
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.1, y1 + (Math.abs(y1) || 1) * 0.1];
  y1 = Math.max(y1, ticks(y0, y1, 5).at(-1));
  const { svg, X, Y, left, right, top, bottom } = axes(host, [x0, x1], [y0, y1], { height: 220, ...options });
  svg.classList.add("curves");
  const id = `clip-${host.dataset.metric}`;
  draw(draw(svg, "clipPath", { id }), "rect", { x: left - 5, y: top - 4, width: right - left + 10, height: bottom - top + 8 });
  const plot = draw(svg, "g", { "clip-path": `url(#${id})`, fill: "none", "stroke-linejoin": "round" });
  const weight = options.stepped ? 0 : Number(view.smoothing);
  const shown = series.map((s) => {
    const stroke = runColour(s.index), xs = s.x.map(X), y = smoothed(s.y, weight);
    if (weight) draw(plot, "path", { stroke, "stroke-opacity": 0.25, d: path(xs, s.y.map(Y)) });
    draw(plot, "path", { class: "curve", stroke, "stroke-width": options.stepped ? 1.5 : 2, d: path(xs, y.map(Y), options.stepped) });
    if (xs.length < 30) for (const i of xs.keys()) draw(plot, "circle", { cx: xs[i], cy: Y(y[i]), r: xs.length > 1 ? 2.5 : 3.5, fill: stroke });
    return { ...s, smooth: y };
  });
  const cursor = draw(svg, "path", { class: "grid", visibility: "hidden" });
  const chosen = draw(svg, "rect", { class: "chosen", y: top, height: bottom - top, visibility: "hidden" });
  const dots = shown.map((s) => draw(plot, "circle", { r: 4, fill: runColour(s.index), stroke: "var(--paper)", "stroke-width": 1.5, visibility: "hidden" }));
  const pixel = (event) => Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left, left), right);
  const value = (px) => x0 + ((px - left) / (right - left)) * (x1 - x0);
  let from = null;
  const leave = () => {
    tip.hide();
    for (const mark of [cursor, ...dots]) mark.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = pixel(event);
    view.dragged = true;
    svg.setPointerCapture(event.pointerId);
  });
  const release = (event) => {
    view.dragged = false;
    chosen.setAttribute("visibility", "hidden");
    const [a, b] = [from, pixel(event)].sort((p, q) => p - q);
    from = null;
    if (event.type === "pointerup" && b - a > 6) view.set({ range: zoomed([value(a), value(b)], whole) });
  };
  svg.addEventListener("pointerup", release);
  svg.addEventListener("pointercancel", release);
  svg.addEventListener("dblclick", () => view.set({ range: null }));
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const x = value(pixel(event)), by = event.deltaY < 0 ? 0.8 : 1.25;
    view.set({ range: zoomed([x - (x - x0) * by, x + (x1 - x) * by], whole) });
  }, { passive: false });
  svg.addEventListener("pointermove", (event) => {
    const px = pixel(event), x = value(px);
    if (from !== null) {
      chosen.setAttribute("x", Math.min(from, px));
      chosen.setAttribute("width", Math.abs(px - from));
      chosen.setAttribute("visibility", "visible");
    }
    cursor.setAttribute("d", `M${px} ${top}V${bottom}`);
    cursor.setAttribute("visibility", "visible");
    const lines = shown.map((s, i) => {
      const near = nearest(s.x, x);
      dots[i].setAttribute("cx", X(s.x[near]));
      dots[i].setAttribute("cy", Y(s.smooth[near]));
      dots[i].setAttribute("visibility", "visible");
      return key(runColour(s.index), `${number(s.y[near])}${weight ? ` (smoothed ${number(s.smooth[near])})` : ""}  ${s.name}`);
    });
    tip.show(event, `${options.xLabel} ${options.xText(shown.length ? shown[0].x[nearest(shown[0].x, x)] : x)}`, ...lines);
  });
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
function timeText(seconds, high, digits) {
  const [unit, name] = timeUnit(high);
  return `${number(seconds / unit, digits)} ${name}`;
}

/** The range of values with some room at both ends. */
function roomy(values, share) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}

/** Axes with round values; returns the scales. options: title, height, xLabel, xTicks, yText. */
function axes(host, [x0, x1], [y0, y1], options) {
  host.replaceChildren(node("h3", {}, options.title));
  const [svg, width] = canvas(host, options.height ?? 260);
  const left = 52, right = width - 18, top = 10, bottom = (options.height ?? 260) - 38;
  const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (right - left);
  const Y = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
  for (const [y, text] of labelled(ticks(y0, y1, 5), options.yText)) {
    draw(svg, "path", { class: "grid", d: `M${left} ${Y(y)}H${right}` });
    draw(svg, "text", { class: "muted", x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, text);
  }
  const most = Math.max(2, Math.floor((right - left) / 80));
  const xTicks = options.xTicks ?? (options.xTicksOf ?? ((...of) => labelled(ticks(...of))))(x0, x1, most);
  for (const [x, text] of xTicks) {
    draw(svg, "path", { class: "grid", d: `M${X(x)} ${bottom}v4` });
    draw(svg, "text", { class: "muted", x: X(x), y: bottom + 17, "text-anchor": "middle" }, text);
  }
  draw(svg, "text", { class: "muted", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, options.xLabel);
  return { svg, X, Y, left, right, top, bottom };
}

/**
 * Points with error bars and names.
 * points: [{colour, name, x, y, xError, yError, tip}]; options: as axes, and `line`: [y, text].
 */
function scatterChart(host, points, options) {
  const xs = points.flatMap((p) => [p.x - p.xError, p.x + p.xError]);
  const ys = points.flatMap((p) => [p.y - p.yError, p.y + p.yError]);
  const { svg, X, Y, left, right } = axes(host, roomy(xs, 0.12), roomy([...ys, options.line[0]], 0.08), options);
  const across = Y(options.line[0]);
  draw(svg, "path", { d: `M${left} ${across}H${right}`, stroke: "var(--muted)", "stroke-dasharray": "4 4" });
  draw(svg, "text", { class: "muted", x: right, y: across - 5, "text-anchor": "end" }, options.line[1]);
  const taken = points.map((p) => [X(p.x) - 8, Y(p.y) - 8, X(p.x) + 8, Y(p.y) + 8]);
  taken.push([right - 6.2 * options.line[1].length, across - 16, right, across]);
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
    const free = boxes.findIndex(([a, b, c, d]) => a > left && c < right + 16 && !taken.some(([e, f, g, h]) => a < g && c > e && b < h && d > f));
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
