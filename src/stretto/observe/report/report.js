const D = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const redraws = [];

/** Fill a section, or take it off the page when there is nothing to show. */
function section(id, filled, paint) {
  if (!filled) return at(id).remove();
  redraws.push(paint);
  paint();
}

function curves(name, x) {
  return D.runs.flatMap((run, index) => {
    const curve = run.curves[name];
    return curve ? [{ index, name: run.name, x: curve[x], y: curve[2] }] : [];
  });
}

const wholeTicks = (a, b, n) => ticks(a, b, n).filter(Number.isInteger);
const bySteps = { xLabel: "step", xText: (x) => String(Math.round(x)), ticks: wholeTicks };
const byTime = { xLabel: "time", xText: duration, tickText: timeText, ticks: timeTicks, fromZero: true };
const STEPS = 0, TIMES = 1;

function header() {
  at("legend").append(...(D.in_brief ? algorithmKeys() : D.runs.map((run, i) => key(runColour(i), run.name))));
  if (D.in_brief) {
    at("missing").append(node("li", {}, `${D.runs.length} runs: curves, timelines and lengths are left out; name fewer runs to see them.`));
  }
  for (const run of D.in_brief ? [] : D.runs) {
    for (const text of run.missing) at("missing").append(node("li", {}, `${run.name} lacks ${text}.`));
  }
  at("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  });
}

function summary() {
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const of = (run, name) => run.curves[name]?.[2];
  const rate = D.runs.map((run) => run.rate ?? undefined);
  const busy = (run) => {
    const generators = run.shares.filter(([role]) => /^generator( \d+)?$/.test(role));
    const sum = (pick) => generators.reduce((a, s) => a + pick(s), 0);
    const idle = (s) => Object.values(s[2]).reduce((a, b) => a + b, 0);
    return generators.length ? sum((s) => s[1]) / sum((s) => s[1] + idle(s)) : undefined;
  };
  const withError = (value, text) => value && `${text(value[0])} ± ${text(value[1])}`;
  const overlap = (of) => (of ? (of.overlap === null ? "not known" : percent(of.overlap)) : undefined);
  const columns = [
    ["run", (run, i) => key(runColour(i), run.name)],
    ["steps", (run) => run.steps || undefined],
    ["time", (run) => run.seconds && duration(run.seconds)],
    ["samples/s", (run, i) => rate[i] && number(rate[i])],
    ["against the first", (run, i) => {
      if (!i || !rate[0] || !rate[i]) return undefined;
      return String(run.task) === String(D.runs[0].task) ? number(rate[i] / rate[0]) + " x" : "another task";
    }],
    ["reward, last tenth", (run) => of(run, "reward") && number(mean(of(run, "reward").slice(-Math.ceil(of(run, "reward").length / 10))))],
    ["pass@1", (run) => withError(run.verified?.pass_at_1, percent)],
    ["mean score", (run) => withError(run.verified?.mean_score, number)],
    ["of its prompts asked in training", (run) => overlap(run.verified)],
    ["staleness", (run) => of(run, "staleness") && number(mean(of(run, "staleness")))],
    ["GPU memory, peak of tensors (reserved)", (run) => run.gpu_memory.map(([process, peak, reserved]) => `${process} ${number(peak)} (${number(reserved)}) GB`).join(", ") || undefined],
    ["generators busy", (run) => busy(run) !== undefined ? percent(busy(run)) : undefined],
  ].map(([title, value]) => [title, D.runs.map(value)]).filter(([, cells]) => cells.some((c) => c !== undefined && c !== 0));
  at("summary").append(node("table", {},
    node("thead", {}, node("tr", {}, ...columns.map(([title]) => node("th", {}, title)))),
    node("tbody", {}, ...D.runs.map((run, i) => node("tr", {}, ...columns.map(([, cells]) => node("td", {}, cells[i] ?? "-")))))));
}

function hatchKey(cause, title) {
  const swatch = node("span", { class: "swatch" });
  const svg = draw(swatch, "svg", { width: 14, height: 14 });
  draw(svg, "rect", { width: 14, height: 14, rx: 3, fill: `url(#hatch-${cause})` });
  return node("span", { class: "key" }, swatch, title);
}

function causeKeys(used) {
  return D.causes.filter(([cause]) => used.has(cause) && cause !== "other").map(([cause, title]) => hatchKey(cause, title));
}

const timeline = {
  steps: [...new Set(D.runs.flatMap((run) => Object.keys(run.timeline).map(Number)))].sort((a, b) => a - b),
  place: 0,

  start() {
    const { steps } = this;
    const wanted = steps.indexOf(D.step);
    const traced = D.runs.filter((run) => Object.keys(run.timeline).length);
    const shared = steps.filter((step) => traced.every((run) => run.timeline[step]));
    const middle = shared.length ? steps.indexOf(shared[shared.length >> 1]) : steps.length >> 1;
    this.place = wanted >= 0 ? wanted : middle;
    at("step-choice").append(...steps.map((step) => node("option", { value: step }, step)));
    at("step-range").max = steps.length - 1;
    at("step-range").addEventListener("input", (e) => this.go(Number(e.target.value)));
    at("step-choice").addEventListener("change", (e) => this.go(steps.indexOf(Number(e.target.value))));
    at("step-back").addEventListener("click", () => this.go(this.place - 1));
    at("step-on").addEventListener("click", () => this.go(this.place + 1));
    at("same-axis").addEventListener("change", () => this.paint());
    if (D.runs.length < 2) at("same-axis").parentElement.remove();
  },

  go(place) {
    this.place = Math.max(0, Math.min(this.steps.length - 1, place));
    this.paint();
  },

  paint() {
    const step = this.steps[this.place];
    at("step-range").value = this.place;
    at("step-choice").value = step;
    const host = at("timeline");
    host.replaceChildren();
    const kinds = new Set(), causes = new Set();
    const shown = D.runs.map((run) => run.timeline[step]);
    const longest = Math.max(...shown.map((of) => of?.[1] ?? 0));
    D.runs.forEach((run, i) => {
      if (!run.roles.length) return;
      const of = shown[i];
      host.append(node("div", { class: "run-title" }, key(runColour(i), run.name),
        node("span", {}, of ? duration(of[1]) : `step ${step} is not in its trace`)));
      const span = at("same-axis")?.checked ?? true ? longest : of?.[1];
      if (of) this.lanes(host, run, of, span || 1, kinds, causes);
    });
    at("timeline-legend").replaceChildren(
      ...D.kinds.filter((_, k) => kinds.has(k)).map(([colour, title]) => key(colour, title)),
      ...causeKeys(new Set([...causes].map((c) => D.causes[c][0]))));
  },

  lanes(host, run, [start, length, bars, waits], axis, kinds, causes) {
    const lane = 24, bar = 18, left = Math.min(150, Math.max(...run.roles.map((r) => 7 * r.length + 14), 70));
    const height = lane * run.roles.length + 24;
    const [svg, width] = canvas(host, height);
    const scale = ((width - left - 8) * length) / axis / D.resolution;
    const moment = (units) => (units * length) / D.resolution;
    for (const t of timeTicks(0, axis, Math.max(2, Math.floor((width - left) / 90)))) {
      const x = left + ((width - left - 8) * t) / axis;
      draw(svg, "path", { class: "grid", d: `M${x} 0V${height - 22}` });
      draw(svg, "text", { class: "muted", x, y: height - 8, "text-anchor": "middle" }, timeText(t, axis));
    }
    run.roles.forEach((role, i) => draw(svg, "text", { x: left - 8, y: lane * i + 14, "text-anchor": "end" }, role.length > 20 ? role.slice(0, 19) + "…" : role));
    const rect = (role, from, units, fill, kind, text) => {
      const made = draw(svg, "rect", { x: left + from * scale, y: lane * role, width: Math.max(units * scale, 0.8), height: bar, fill, class: kind, rx: units * scale > 6 ? 2 : 0 });
      made.addEventListener("pointermove", (e) => tip.show(e, text()));
      made.addEventListener("pointerleave", () => tip.hide());
    };
    const when = (from, units) => `${duration(moment(units))}, from ${duration(moment(from))} on`;
    for (const [role, cause, from, units] of waits) {
      causes.add(cause);
      const [name, title] = D.causes[cause];
      rect(role, from, units, `url(#hatch-${name})`, "wait", () => `${run.roles[role]}: ${title}\n${when(from, units)}`);
    }
    for (const [role, kind, from, units, tokens, version, count, ids, joined] of bars) {
      kinds.add(kind);
      const [colour, title, pale] = D.kinds[kind];
      rect(role, from, units, colour, "work", () => [
        `${run.roles[role]}: ${title}`, when(from, units),
        count ? `${count} rollout${count > 1 ? "s" : ""}: ${(ids ?? []).join(", ")}${count > (ids ?? []).length ? ", ..." : ""}` : "",
        tokens != null ? `${tokens.toLocaleString("en")} tokens` : "",
        version != null ? `policy version ${version}` : "",
        joined ? `${joined} calls in a row` : "",
      ].filter(Boolean).join("\n"));
      if (units * scale > 7 * title.length + 8) {
        draw(svg, "text", { class: pale ? "on-pale" : "on-bar", x: left + (from + units / 2) * scale, y: lane * role + 13, "text-anchor": "middle" }, title);
      }
    }
  },
};

function shareBars() {
  const host = at("shares");
  host.replaceChildren();
  const roles = D.roles;
  const causes = new Set();
  const height = 14, gap = 4, between = 12, left = Math.min(150, Math.max(...roles.map((r) => 7 * r.length + 14), 70)), right = 92;
  const rows = roles.map((role) => D.runs.flatMap((run, i) => {
    const found = run.shares.find(([name]) => name === role);
    return found ? [[i, run, found]] : [];
  }));
  const [svg, width] = canvas(host, rows.reduce((y, of) => y + of.length * (height + gap) + between, 0));
  let y = 0;
  rows.forEach((of, r) => {
    draw(svg, "text", { x: left - 8, y: y + (of.length * (height + gap) - gap) / 2 + 4, "text-anchor": "end" }, roles[r].length > 20 ? roles[r].slice(0, 19) + "…" : roles[r]);
    for (const [i, run, [role, busy, idle]] of of) {
      const total = busy + Object.values(idle).reduce((a, b) => a + b, 0) || 1;
      let x = left;
      const part = (seconds, fill, text) => {
        const w = ((width - left - right) * seconds) / total;
        const made = draw(svg, "rect", { x, y, width: Math.max(w - 0.5, 0), height, fill, class: "wait" });
        made.addEventListener("pointermove", (e) => tip.show(e, `${run.name}\n${role} ${text}\n${percent(seconds / total)}, ${duration(seconds)}`));
        made.addEventListener("pointerleave", () => tip.hide());
        x += w;
      };
      part(busy, runColour(i), "works");
      for (const [cause, seconds] of Object.entries(idle)) {
        causes.add(cause);
        const title = D.causes.find(([name]) => name === cause)?.[1] ?? cause;
        part(seconds, cause === "other" ? "var(--wait)" : `url(#hatch-${cause})`, title);
      }
      draw(svg, "text", { class: "muted", x: width - right + 10, y: y + 11 }, percent(busy / total) + " busy");
      y += height + gap;
    }
    y += between;
  });
  at("shares-legend").replaceChildren("in the run's colour: at work", ...causeKeys(causes),
    ...(causes.has("other") ? [key("var(--wait)", "idle for another cause")] : []));
}

function scheduleCharts() {
  const host = at("schedule");
  host.replaceChildren();
  for (const [name, title, more] of [
    ["samples_per_s", "Samples per second", { smooth: true, zero: true }],
    ["overcommit", "Over-commitment: responses in flight beyond the batch", { stepped: true, zero: true }],
    ["chunk_tokens", "Chunk size [tokens]", { stepped: true, zero: true }],
    ["staleness", "Staleness, mean [versions]", { smooth: true, zero: true }],
    ["carried", "Responses carried into the next step", { stepped: true, zero: true }],
  ]) {
    const series = curves(name, STEPS);
    if (!series.some((s) => s.y.some(Boolean))) continue; // a knob that no run uses
    const chart = node("div");
    host.append(chart);
    lineChart(chart, series, { title, ...bySteps, ...more });
  }
}

function lengthChart() {
  const host = at("lengths");
  host.replaceChildren();
  const runs = D.runs.map((run, index) => ({ index, name: run.name, ...run.lengths })).filter((run) => run.counts);
  const row = 20, left = 52, right = 14, plot = 210, labels = 34;
  const [svg, width] = canvas(host, plot + labels + row * runs.length + 22);
  const bins = D.edges.length - 1;
  const first = Math.max(0, Math.min(...runs.map((run) => run.counts.findIndex((c) => c))) - 1);
  const X = (bin) => left + ((bin - first) / (bins - first)) * (width - left - right);
  const place = (tokens) => {
    let bin = D.edges.findLastIndex((edge) => edge <= tokens);
    bin = Math.min(bin, bins - 1);
    return X(bin + (tokens - D.edges[bin]) / (D.edges[bin + 1] - D.edges[bin]));
  };
  const top = Math.max(...runs.flatMap((run) => run.counts.map((c) => c / run.total)));
  const Y = (share) => plot - (share / top) * (plot - 12);
  for (const share of ticks(0, top, 4)) {
    draw(svg, "path", { class: "grid", d: `M${left} ${Y(share)}H${width - right}` });
    draw(svg, "text", { class: "muted", x: left - 8, y: Y(share) + 4, "text-anchor": "end" }, number(100 * share) + " %");
  }
  const every = Math.ceil((bins - first) / ((width - left) / 52));
  for (let bin = first; bin <= bins; bin += every) {
    draw(svg, "text", { class: "muted", x: X(bin), y: plot + 17, "text-anchor": "middle" }, D.edges[bin]);
  }
  for (const run of runs) {
    let d = `M${X(first)} ${plot}`;
    for (let bin = first; bin < bins; bin++) d += `V${Y(run.counts[bin] / run.total).toFixed(1)}H${X(bin + 1).toFixed(1)}`;
    d += `V${plot}`;
    draw(svg, "path", { d, fill: runColour(run.index), "fill-opacity": 0.1, stroke: runColour(run.index), "stroke-width": 2, "stroke-linejoin": "round" });
  }
  runs.forEach((run, i) => {
    const y = plot + labels + row * i + 4, colour = runColour(run.index);
    draw(svg, "path", { d: `M${place(run.median)} ${y}H${place(run.max)}`, stroke: colour, "stroke-opacity": 0.5, "stroke-width": 2 });
    draw(svg, "circle", { cx: place(run.median), cy: y, r: 5, fill: colour });
    const [p, m] = [place(run.p95), place(run.max)];
    draw(svg, "path", { d: `M${p - 6} ${y}L${p} ${y - 6}L${p + 6} ${y}L${p} ${y + 6}Z`, fill: colour });
    draw(svg, "path", { d: `M${m} ${y - 7}V${y + 7}`, stroke: colour, "stroke-width": 3 });
    const rejected = run.rejected ? `, ${run.rejected} rejected` : "";
    draw(svg, "text", { class: "muted", x: place(run.median) - 12, y: y + 4, "text-anchor": "end" }, number(run.median));
    const text = `p95 ${number(run.p95)}, max ${number(run.max)}; ${run.total.toLocaleString("en")} responses${rejected}`;
    const near = m + 10 + 6 * text.length > width;
    const label = draw(svg, "text", { class: "muted", x: near ? place(run.median) - 48 : m + 12, y: y + 4 }, text);
    if (near) label.setAttribute("text-anchor", "end");
  });
  draw(svg, "text", { class: "muted", x: left, y: plot + labels + row * runs.length + 14 }, "tokens in a response: ● median   ◆ 95th percentile   ┃ longest");
  svg.addEventListener("pointermove", (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    const bin = Math.floor(first + ((x - left) / (width - left - right)) * (bins - first));
    if (bin < first || bin >= bins) return tip.hide();
    const last = D.edges[bin + 1] - 1;
    tip.show(event, `${D.edges[bin]}${last > D.edges[bin] ? " to " + last : ""} tokens`,
      ...runs.map((run) => key(runColour(run.index), `${percent(run.counts[bin] / run.total)}  ${run.name}`)));
  });
  svg.addEventListener("pointerleave", () => tip.hide());
}

const groupColour = (algorithm) => `var(--group-${Math.min(D.algorithms.indexOf(algorithm), 6)})`;
const share = (y) => number(100 * y) + " %";
const algorithmKeys = () => D.algorithms.map((name) => key(groupColour(name), name));

function paretoCharts() {
  const host = at("pareto");
  host.replaceChildren();
  for (const { by, sft, points } of D.pareto) {
    for (const [x, xError, label] of [["kl", "kl_error", `KL to ${sft} [nats a response]`], ["perplexity", null, `perplexity of ${sft} on the samples`]]) {
      const chart = node("div");
      host.append(chart);
      scatterChart(chart, points.map((p) => ({
        colour: runColour(p.run), name: D.runs[p.run].name, x: p[x], y: p.rate,
        xError: xError ? p[xError] : 0, yError: p.rate_error,
        tip: `win-rate ${percent(p.rate)} ± ${percent(p.rate_error)}\nKL ${number(p.kl)} ± ${number(p.kl_error)} nats a response\nperplexity ${number(p.perplexity)}`,
      })), { title: `by ${by}`, xLabel: label, yText: share, line: [0.5, "as good as the references"] });
    }
  }
}

function offPolicyCharts() {
  const host = at("off-policy");
  host.replaceChildren();
  for (const { title, is_share: isShare, lines } of D.off_policy) {
    const chart = node("div");
    host.append(chart);
    dialChart(chart, lines.map((line) => ({
      colour: groupColour(line.algorithm), name: line.algorithm, points: line.points,
      dots: line.runs.map(([n, y, run]) => [n, y, D.runs[run].name]),
    })), { title, height: 230, xLabel: "N: batches generated with one version of the weights", yText: isShare ? share : number });
  }
  at("off-policy-legend").replaceChildren(...algorithmKeys());
}

function predictionTable() {
  const told = D.predictions.map((found, i) => ({ ...found, index: i, name: D.runs[i].name })).filter((found) => found.phases);
  const phases = [...new Set(told.flatMap((found) => found.phases.map(([name]) => name)))];
  const cells = (found, phase) => {
    const [, measured, predicted] = found.phases.find(([name]) => name === phase) ?? [];
    if (measured === undefined) return ["-", "-", "-"];
    return [duration(measured), duration(predicted), measured ? (predicted / measured).toFixed(2) : "-"];
  };
  if (told.length) at("prediction").replaceChildren(node("table", {},
    node("thead", {},
      node("tr", {}, node("th", {}), ...told.map((found) => node("th", { colspan: 3 }, key(runColour(found.index), found.name)))),
      node("tr", {}, node("th", {}, "a step"), ...told.flatMap(() => ["measured", "predicted", "ratio"].map((title) => node("th", {}, title))))),
    node("tbody", {}, ...phases.map((phase) => node("tr", {}, node("td", {}, phase),
      ...told.flatMap((found) => cells(found, phase).map((text) => node("td", {}, text))))))));
  const titles = [...new Set(told.map((found) => found.title))];
  at("prediction-notes").replaceChildren(
    ...titles.map((title) => node("li", {}, (titles.length > 1 ? told.filter((found) => found.title === title).map((found) => found.name).join(", ") + ": " : "") + title)),
    ...D.predictions.flatMap((found, i) => (found.why ? [node("li", {}, `${D.runs[i].name}: no prediction: ${found.why}`)] : [])));
}

function settingsTable() {
  const text = (value) => (value === null ? "-" : typeof value === "string" ? value || '""' : JSON.stringify(value));
  at("settings").append(node("table", {},
    node("thead", {}, node("tr", {}, node("th", {}, "setting"), ...D.runs.map((run, i) => node("th", {}, key(runColour(i), run.name))))),
    node("tbody", {}, ...D.settings.map(([name, values]) => node("tr", {}, node("td", {}, name), ...values.map((v) => node("td", {}, text(v))))))));
}

header();
section("summary-section", D.runs.some((run) => run.steps), () => { at("summary").replaceChildren(); summary(); });
if (timeline.steps.length) timeline.start();
section("timeline-section", timeline.steps.length, () => timeline.paint());
section("reward-section", !D.in_brief && curves("reward", STEPS).length, () => {
  lineChart(at("reward-time"), curves("reward", TIMES), { title: "against time", ...byTime, smooth: true });
  lineChart(at("reward-step"), curves("reward", STEPS), { title: "against steps", ...bySteps, smooth: true });
});
section("pareto-section", D.pareto.length, paretoCharts);
section("off-policy-section", D.off_policy.length, offPolicyCharts);
section("shares-section", !D.in_brief && D.runs.some((run) => run.shares.length), shareBars);
section("prediction-section", D.predictions.length, predictionTable);
section("schedule-section", !D.in_brief && Object.keys(D.runs[0].curves).some((name) => name !== "reward" && curves(name, STEPS).length), scheduleCharts);
section("lengths-section", !D.in_brief && D.runs.some((run) => run.lengths), lengthChart);
section("settings-section", D.settings.length, () => { at("settings").replaceChildren(); settingsTable(); });

let painted = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== painted) requestAnimationFrame(() => redraws.forEach((paint) => paint()));
  painted = innerWidth;
});
