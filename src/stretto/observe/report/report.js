const D = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const paints = {};

/** Fill a section, or take it off the page when there is nothing to show. */
function section(id, filled, paint) {
  if (!filled) return at(id).remove();
  paints[id] = paint;
  paint();
}

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
    ["reward, last tenth", (run) => run.reward === null ? undefined : number(run.reward)],
    ["pass@1", (run) => withError(run.verified?.pass_at_1, percent)],
    ["mean score", (run) => withError(run.verified?.mean_score, number)],
    ["of its prompts asked in training", (run) => overlap(run.verified)],
    ["staleness", (run) => run.staleness && number(run.staleness)],
    ["GPU memory, peak of tensors (reserved)", (run) => run.gpu_memory.map(([process, peak, reserved]) => `${process} ${number(peak)} (${number(reserved)}) GB`).join(", ") || undefined],
    ["generators busy", (run) => busy(run) !== undefined ? percent(busy(run)) : undefined],
  ].map(([title, value]) => [title, D.runs.map(value)]).filter(([, cells]) => cells.some((c) => c !== undefined && c !== 0));
  at("summary").replaceChildren(node("table", {},
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
    const rect = (role, from, units, fill, kind, text, height = 1) => {
      const made = draw(svg, "rect", { x: left + from * scale, y: lane * role + bar * (1 - height), width: Math.max(units * scale, 0.8), height: bar * height, fill, class: kind, rx: units * scale > 6 && height === 1 ? 2 : 0 });
      made.addEventListener("pointermove", (e) => tip.show(e, text()));
      made.addEventListener("pointerleave", () => tip.hide());
    };
    const when = (from, units) => `${duration(moment(units))}, from ${duration(moment(from))} on`;
    for (const [role, cause, from, units] of waits) {
      causes.add(cause);
      const [name, title] = D.causes[cause];
      rect(role, from, units, `url(#hatch-${name})`, "wait", () => `${run.roles[role]}: ${title}\n${when(from, units)}`);
    }
    for (const [role, kind, from, units, tokens, version, count, ids, joined, height] of bars) {
      kinds.add(kind);
      const [colour, title, pale] = D.kinds[kind];
      rect(role, from, units, colour, height ? "count" : "work", () => [
        `${run.roles[role]}: ${title}`, when(from, units),
        count ? `${count} rollout${count > 1 ? "s" : ""}${ids ? `: ${ids.join(", ")}${count > ids.length ? ", ..." : ""}` : ""}` : "",
        tokens != null ? `${tokens.toLocaleString("en")} tokens` : "",
        version != null ? `policy version ${version}` : "",
        joined ? `${joined} calls in a row` : "",
      ].filter(Boolean).join("\n"), height);
      if (!height && units * scale > 7 * title.length + 8) {
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

const CURVES = [
  ["objective/scores", "Reward"],
  ["eval/score", "Evaluations, mean score"],
  ["eval/pass@1", "Evaluations, pass@1"],
  ["objective/kl", "KL to the reference [nats a response]"],
  ["loss/policy_avg", "Policy loss"],
  ["loss/value_avg", "Value loss"],
  ["policy/entropy_avg", "Entropy [nats a token]"],
  ["policy/clipfrac_avg", "Clipped share of tokens", { zero: true }],
  ["response/length_mean", "Response length, mean [tokens]"],
  ["episode/turns_mean", "Turns of an episode, mean", { zero: true }],
  ["episode/wait_s_mean", "Wait for the environment, mean [s]", { zero: true }],
  ["perf/samples_per_s", "Samples per second", { zero: true }],
  ["schedule/overcommit", "Over-commitment: responses in flight beyond the batch", { stepped: true, zero: true }],
  ["schedule/chunk_tokens", "Chunk size [tokens]", { stepped: true, zero: true }],
  ["schedule/score_on", "Scored on: 0 batch, 1 rollout, 2 chunk", { stepped: true, zero: true }],
  ["schedule/lag", "Lag [versions]", { stepped: true, zero: true }],
  ["schedule/predicted", "Predicted speedup of the last trial", { stepped: true }],
  ["schedule/measured", "Measured speedup of the last trial", { stepped: true }],
  ["schedule/carried", "Responses carried into the next step", { stepped: true, zero: true }],
  ["staleness/mean", "Staleness, mean [versions]", { zero: true }],
];

const wholeTicks = (...of) => labelled(ticks(...of).filter(Number.isInteger));
const AXES = {
  steps: { xLabel: "step", xText: (x) => String(Math.round(x)), xTicksOf: wholeTicks },
  times: { xLabel: "time", xText: duration, xTicksOf: (a, b, n) => labelled(timeTicks(a, b, n), (x, digits) => timeText(x, b, digits)) },
};

/** Metrics of all runs: those of CURVES that are not 0 throughout, and all others. */
function metrics() {
  const names = [...new Set(D.runs.flatMap((run) => Object.keys(run.curves.values)))].sort();
  const used = ([name]) => D.runs.some((run) => run.curves.values[name]?.some(Boolean));
  const shown = CURVES.filter(used);
  const known = new Set(CURVES.map(([name]) => name));
  return [shown, names.filter((name) => !known.has(name)).map((name) => [name, name])];
}

function curveCharts() {
  const [shown, others] = metrics();
  const xs = D.runs.flatMap((run) => run.curves[view.axis]);
  const whole = [view.axis === "times" ? 0 : Math.min(...xs), Math.max(...xs)];
  if (view.range && view.range[0] >= whole[1]) view.range = null;
  const fill = (host, curves) => host.replaceChildren(...curves.map(([metric]) => node("div", { "data-metric": metric })));
  const paint = (host, curves) => {
    fill(host, curves);
    curves.forEach(([metric, title, more], i) => {
      const series = D.runs.flatMap((run, index) => {
        const all = run.curves.values[metric] ?? [];
        const points = all.flatMap((y, k) => (y === null ? [] : [[run.curves[view.axis][k], y]]));
        return points.length ? [{ index, name: run.name, x: points.map(([x]) => x), y: points.map(([, y]) => y) }] : [];
      });
      curveChart(host.children[i], series, { title, whole, ...AXES[view.axis], ...more });
    });
  };
  at("smoothing").value = view.smoothing;
  at("smoothing-value").textContent = Number(view.smoothing).toFixed(2);
  at("axis").value = view.axis;
  at("whole").disabled = !view.range;
  paint(at("curves"), shown);
  at("others").hidden = !others.length;
  if (!shown.length) at("others").open = true;
  const wanted = at("others-search").value.toLowerCase();
  if (at("others").open) paint(at("other-curves"), others.filter(([name]) => name.toLowerCase().includes(wanted)));
}

function curveControls() {
  view.painted = () => requestAnimationFrame(curveCharts);
  at("smoothing").addEventListener("input", (e) => view.set({ smoothing: Number(e.target.value) }));
  at("axis").addEventListener("change", (e) => view.set({ axis: e.target.value, range: null }));
  at("whole").addEventListener("click", () => view.set({ range: null }));
  at("others").addEventListener("toggle", curveCharts);
  at("others-search").addEventListener("input", curveCharts);
}

const samples = {
  sort: ["step", false], // the column, and whether it ascends
  most: 10,

  start() {
    at("sample-run").append(...D.runs.map((run, i) => node("option", { value: i }, run.name)));
    if (D.runs.length < 2) at("sample-run").remove();
    for (const id of ["sample-run", "sample-step", "sample-search"]) at(id)?.addEventListener("input", () => this.paint());
    at("sample-more").addEventListener("click", () => {
      this.most += 100;
      this.paint();
    });
  },

  rows() {
    const step = at("sample-step").value, text = at("sample-search").value.toLowerCase();
    const found = D.runs.flatMap((run, i) => (String(i) !== (at("sample-run")?.value || String(i)) ? [] :
      Object.entries(run.samples).flatMap(([at, rows]) => (step && step !== at ? [] : rows.map((row) => [i, Number(at), ...row])))));
    return found.filter(([, , prompt, response]) => `${prompt}\n${response}`.toLowerCase().includes(text));
  },

  paint() {
    const rows = this.rows();
    const sources = [...new Set(rows.flatMap((row) => Object.keys(row[7])))];
    const columns = [
      ...(at("sample-run") ? [["run", (row) => row[0], (row) => key(runColour(row[0]), D.runs[row[0]].name)]] : []),
      ["step", (row) => row[1]],
      ["reward", (row) => row[4]],
      ...sources.map((name) => [name, (row) => row[7][name]]),
      ["tokens", (row) => row[6]],
      ["end", (row) => row[5]],
      ["prompt", (row) => row[2], (row) => node("div", { class: "text" }, ...marked(row[2]))],
      ...(rows.every((row) => row[8]) ? [] : [["response", (row) => row[3], (row) => node("div", { class: "text" }, ...marked(row[8] ? "see below" : row[3]))]]),
    ];
    const [by, ascends] = this.sort, value = columns.find(([name]) => name === by)?.[1] ?? ((row) => row[1]);
    rows.sort((a, b) => {
      const [p, q] = ascends ? [value(a), value(b)] : [value(b), value(a)];
      return (p ?? -Infinity) < (q ?? -Infinity) ? -1 : Number((p ?? -Infinity) > (q ?? -Infinity));
    });
    const shown = (value) => (typeof value === "number" ? number(value) : value ?? "-");
    const head = columns.map(([name]) => {
      const button = node("button", { type: "button", title: `Sort by ${name}` }, name + (name === by ? (ascends ? " ▲" : " ▼") : ""));
      button.addEventListener("click", () => {
        this.sort = [name, name === by && !ascends];
        this.paint();
      });
      return node("th", {}, button);
    });
    at("samples").replaceChildren(node("table", {}, node("thead", {}, node("tr", {}, ...head)),
      node("tbody", {}, ...rows.slice(0, this.most).flatMap((row, i) => [
        node("tr", {}, ...columns.map(([, get, made]) => node("td", {}, made ? made(row) : shown(get(row))))),
        ...(row[8] ? [node("tr", {}, node("td", { colspan: columns.length }, transcript(row[8], i === 0)))] : []),
      ]))));
    at("sample-count").textContent = `${Math.min(this.most, rows.length)} of ${rows.length} samples`;
    at("sample-more").hidden = rows.length <= this.most;
  },
};

function lengthChart() {
  const host = at("lengths");
  host.replaceChildren();
  const runs = D.runs.map((run, index) => ({ index, name: run.name, ...run.lengths })).filter((run) => run.counts);
  const row = 20, left = 52, right = 14, plot = 210, labels = 34;
  const [svg, width] = canvas(host, plot + labels + row * runs.length);
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
  for (const [y, text] of labelled(ticks(0, top, 4), share)) {
    draw(svg, "path", { class: "grid", d: `M${left} ${Y(y)}H${width - right}` });
    draw(svg, "text", { class: "muted", x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, text);
  }
  const every = Math.ceil((bins - first) / ((width - left) / 52));
  const longest = D.edges[bins] - 1;
  for (let bin = first; bin <= bins - every / 2; bin += every) {
    if (D.edges[bin] < longest) draw(svg, "text", { class: "muted", x: X(bin), y: plot + 17, "text-anchor": "middle" }, D.edges[bin]);
  }
  draw(svg, "text", { class: "muted", x: X(bins), y: plot + 17, "text-anchor": "end" }, longest);
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
  });
  host.append(node("div", { class: "legend small" },
    ...runs.map((run) => key(runColour(run.index), `median ${number(run.median)}, p95 ${number(run.p95)}, max ${number(run.max)}; ${run.total.toLocaleString("en")} responses${run.rejected ? `, ${run.rejected} rejected` : ""}`)),
    "tokens in a response: ● median   ◆ 95th percentile   ┃ longest"));
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
const share = (y, digits) => number(100 * y, digits) + " %";
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
  at("settings").replaceChildren(node("table", {},
    node("thead", {}, node("tr", {}, node("th", {}), ...D.runs.map((run, i) => node("th", {}, key(runColour(i), run.name))))),
    node("tbody", {}, ...D.settings.map(([name, values]) => node("tr", {}, node("td", {}, name), ...values.map((v) => node("td", {}, text(v))))))));
}

/** Take up what a server says of runs that go on; a new page shows what this one has no place for. */
const live = {
  async poll() {
    const steps = D.runs.map((run) => run.curves.steps.at(-1) ?? 0);
    const answer = await fetch(`data?${steps.map((step) => `after=${step}`).join("&")}`);
    if (answer.status === 204) return;
    if (!answer.ok) throw new Error(await answer.text());
    const { roles, runs } = await answer.json();
    const homeless = runs.some((news) => (news.shares.length && !paints["shares-section"])
      || (Object.keys(news.samples).length && !paints["samples-section"]));
    if (homeless || runs.some((news, i) => news.steps < D.runs[i].steps || (news.steps && !D.runs[i].steps))) {
      location.reload();
      return;
    }
    const grew = runs.some((news, i) => news.steps > D.runs[i].steps);
    D.roles = roles;
    runs.forEach(({ curves, samples, ...figures }, i) => this.add(Object.assign(D.runs[i], figures), curves, samples));
    if (grew) for (const id of ["summary-section", "curves-section", "samples-section", "shares-section"]) paints[id]?.();
  },

  add(run, { steps, times, values }, samples) {
    const before = run.curves.steps.length;
    run.curves.steps.push(...steps);
    run.curves.times.push(...times);
    for (const name of new Set([...Object.keys(run.curves.values), ...Object.keys(values)])) {
      run.curves.values[name] ??= Array(before).fill(null);
      run.curves.values[name].push(...(values[name] ?? Array(steps.length).fill(null)));
    }
    Object.assign(run.samples, samples);
  },

  async start() {
    const at_first = Math.max(...D.runs.map((run) => run.steps));
    for (;;) {
      const now = Math.max(...D.runs.map((run) => run.steps));
      const behind = now > at_first ? `; timelines and lengths are of step ${at_first}, until the page is reloaded` : "";
      at("live").textContent = now ? `live: step ${now}${behind}` : "live: no step so far";
      await new Promise((done) => setTimeout(done, D.live));
      if (view.dragged || document.hidden) continue;
      try {
        await this.poll();
      } catch {
        at("live").textContent = `no answer since step ${now}`;
      }
    }
  },
};

header();
const one = !D.in_brief;
section("summary-section", D.runs.some((run) => run.steps), summary);
if (one && D.runs.some((run) => run.steps)) curveControls();
section("curves-section", one && D.runs.some((run) => run.steps), curveCharts);
if (timeline.steps.length) timeline.start();
section("timeline-section", timeline.steps.length, () => timeline.paint());
section("pareto-section", D.pareto.length, paretoCharts);
section("off-policy-section", D.off_policy.length, offPolicyCharts);
section("shares-section", one && D.runs.some((run) => run.shares.length), shareBars);
section("prediction-section", D.predictions.length, predictionTable);
section("lengths-section", one && D.runs.some((run) => run.lengths), lengthChart);
if (D.runs.some((run) => Object.keys(run.samples).length)) samples.start();
section("samples-section", D.runs.some((run) => Object.keys(run.samples).length), () => samples.paint());
section("settings-section", D.settings.length, settingsTable);
if (D.live) live.start();

let painted = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== painted) requestAnimationFrame(() => Object.values(paints).forEach((paint) => paint()));
  painted = innerWidth;
});
