// A chart of curves: hover, a cursor for the keyboard, zoom by dragging, buttons and keys.

const MARGIN = { left: 58, right: 12, top: 10, bottom: 38 };
const AXES = {
  samples: "samples of all learners",
  seconds: "seconds of training",
  bytes: "bytes sent by all learners",
  steps: "optimizer steps",
};

// The columns of a curve and of an axis; a run has one or another of them.
const CURVES = {
  heldOut: ["convergence/held_out_loss", "val_loss"],
  train: ["curve/loss", "convergence/train_loss"],
  distance: ["gossip/relative_consensus_distance"],
  exchanges: ["gossip/exchanges_per_step"],
  exposed: ["learners/exposed_fraction"],
  wer: ["wer"],
};
const TIMES = {
  samples: ["curve/global_samples", "convergence/global_samples", "learners/global_samples"],
  seconds: ["curve/train_seconds", "convergence/train_seconds", "learners/train_seconds"],
};
const BYTES = ["gossip/bytes_sent", "learners/allreduce_bytes"];

function seriesOf(run, names) {
  return run.series[names.find((name) => run.series[name]?.some(([, y]) => y !== null))] ?? [];
}

// The axis of a run as points [step, x] from the beginning on, which it lacks at steps of others.
function axisOf(run, axis) {
  if (axis !== "bytes") {
    // Each callback logs at steps of its own; for one step any of them will do.
    const known = new Map(TIMES[axis].flatMap((name) => run.series[name] ?? []));
    const points = [...known].filter(([, x]) => x !== null).sort((a, b) => a[0] - b[0]);
    return points.length ? [[-1, 0], ...points] : [];
  }
  const several = BYTES.map((name) => seriesOf(run, [name])).filter((points) => points.length);
  const sum = (step) => several.reduce((total, points) => total + (valueAt(points, step) ?? 0), 0);
  return several.length ? [[-1, 0], ...several[0].map(([step]) => [step, sum(step)])] : [];
}

// The points [x, y] of a curve of a run, in the order of x.
function pointsOf(run, curve, axis) {
  const values = seriesOf(run, CURVES[curve]).filter(([, y]) => y !== null);
  if (axis === "steps") return values.map(([step, y]) => [step + 1, y]);
  // A word error rate is known later than its model, and has samples of its own.
  const own = curve === "wer" ? run.series["wer/global_samples"] : null;
  const known = own && axis !== "samples" ? remapped(own, run, axis) : own ?? axisOf(run, axis);
  return values.map(([step, y]) => [valueAt(known, step), y]).filter(([x]) => x !== null).sort((a, b) => a[0] - b[0]);
}

// Points [step, samples] as points [step, x] of another axis.
function remapped(points, run, axis) {
  const samples = axisOf(run, "samples");
  const pairs = axisOf(run, axis).map(([step, x]) => [valueAt(samples, step), x]).filter(([at]) => at !== null);
  return points.map(([step, at]) => [step, valueAt(pairs, at)]).filter(([, x]) => x !== null);
}

function valueAt(points, x) {
  if (!points.length || x < points[0][0] || x > points.at(-1)[0]) return null;
  const next = points.findIndex((point) => point[0] >= x);
  const [x1, y1] = points[next];
  const [x0, y0] = points[Math.max(0, next - 1)];
  return x1 === x0 ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

// Median, lowest and highest of several curves where at least two of them have a value.
function bandOf(several) {
  const places = [...new Set(several.flat().map(([x]) => x))].sort((a, b) => a - b);
  return places.flatMap((x) => {
    const values = several.map((points) => valueAt(points, x)).filter((y) => y !== null);
    return values.length < 2 ? [] : [[x, median(values), Math.min(...values), Math.max(...values)]];
  });
}

class LineChart {
  // spec: title, caption, unit, and lines(axis) -> [{name, index, points, thin, marked}],
  // where a point is [x, y] or, for a band, [x, y, low, high]. With bars, x are whole
  // numbers, and each line is a bar beside those of the others.
  constructor(spec, page) {
    Object.assign(this, spec);
    this.page = page;
    this.range = null;
    this.cursor = null;
    this.svg = mark("svg", { class: "chart", tabindex: "0", role: "img" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.caption = make("figcaption");
    const tools = make("div", { class: "controls" },
      this.tool("+", "closer", () => this.zoom(0.5)),
      this.tool("−", "further", () => this.zoom(2)),
      this.tool("all", "all of it", () => this.reset()),
    );
    this.figure = make("figure", { class: spec.wide ? "wide" : null },
      make("h3", {}, this.title), this.svg, tools, this.caption, this.tip);
    this.listen();
  }

  tool(text, label, action) {
    return make("button", { type: "button", "aria-label": `${this.title}: ${label}`, onclick: action }, text);
  }

  listen() {
    const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointermove", (event) => this.hover(place(event)));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("pointerdown", (event) => {
      this.dragFrom = place(event);
      this.hover(this.dragFrom);
    });
    this.svg.addEventListener("pointerup", (event) => this.drop(place(event)));
    this.svg.addEventListener("pointercancel", () => { this.dragFrom = null; });
    this.svg.addEventListener("dblclick", () => this.reset());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.leave());
  }

  // --- what is asked of it

  zoom(factor) {
    const [low, high] = this.x.domain;
    const middle = this.cursor ?? (low + high) / 2;
    this.show([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }

  show([low, high]) {
    const [least, most] = this.extent;
    this.range = [Math.max(least, low), Math.min(most, high)];
    this.draw();
  }

  reset() {
    this.show(this.extent);
  }

  key(event) {
    const [low, high] = this.x ? this.x.domain : [0, 1];
    const step = (high - low) / 50;
    const actions = {
      ArrowRight: () => this.point((this.cursor ?? low) + step),
      ArrowLeft: () => this.point((this.cursor ?? high) - step),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.reset(), Escape: () => this.leave(),
    };
    if (!this.x || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  point(x) {
    const [low, high] = this.x.domain;
    this.cursor = Math.min(high, Math.max(low, x));
    this.follow();
    say(this.tip.innerText.replaceAll("\n", ", "));
  }

  hover(place) {
    if (!this.x) return;
    const [low, high] = this.x.domain;
    if (this.dragFrom != null) this.select(this.dragFrom, place);
    this.cursor = Math.min(high, Math.max(low, this.x.back(place)));
    this.follow();
  }

  select(from, to) {
    const [begin, end] = [Math.min(from, to), Math.max(from, to)];
    this.selection?.remove();
    this.selection = mark("rect", {
      x: begin, width: end - begin, y: MARGIN.top, height: this.height - MARGIN.top - MARGIN.bottom,
      fill: "var(--focus)", "fill-opacity": ".15",
    });
    this.svg.append(this.selection);
  }

  drop(place) {
    const from = this.dragFrom;
    this.dragFrom = null;
    this.selection?.remove();
    if (from == null || Math.abs(place - from) < 8 || !this.x) return;
    this.show([this.x.back(Math.min(from, place)), this.x.back(Math.max(from, place))]);
  }

  leave() {
    this.cursor = this.dragFrom = null;
    this.selection?.remove();
    this.follow();
  }

  // --- drawing

  draw() {
    this.width = Math.max(240, this.svg.clientWidth || this.figure.clientWidth || 480);
    this.height = Math.round(Math.min(380, Math.max(230, this.width * 0.58)));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.style.height = `${this.height}px`;
    this.svg.replaceChildren();
    this.lines = this.linesOf(this.page.axis).filter((line) => line.points.length);
    const seen = this.lines.filter((line) => !this.page.hidden.has(line.name));
    this.x = null;
    this.caption.textContent = this.captionOf ? this.captionOf() : this.text;
    if (!seen.length) return this.explain();
    this.extent = extent(seen.flatMap((line) => line.points.map(([x]) => x)));
    if (this.bars) this.extent = [Math.floor(this.extent[0]) - 0.5, Math.ceil(this.extent[1]) + 0.5];
    this.place(seen);
    this.axes();
    const shown = mark("g", { "clip-path": this.clip() });
    seen.forEach((line, n) => (this.bars ? this.bar(line, shown, n, seen.length) : this.line(line, shown)));
    this.svg.append(shown);
    this.svg.setAttribute("aria-label", this.described(seen));
    this.follow();
  }

  explain() {
    const axis = AXES[this.page.axis];
    const why = this.lines.length ? "all curves are switched off" : `nothing recorded against ${axis}`;
    this.svg.append(mark("text", { x: 12, y: 30, class: "faint" }, why));
    this.svg.setAttribute("aria-label", `${this.title}: ${why}`);
  }

  place(seen) {
    const domain = this.range ?? this.firstRange();
    this.x = scale(domain, [MARGIN.left, this.width - MARGIN.right]);
    this.x.domain = domain;
    const heights = this.heights(seen, domain);
    const logarithmic = this.page.log && this.canBeLog && heights.every((y) => y > 0);
    let [low, high] = extent(heights);
    const room = logarithmic ? 0 : (high - low || Math.abs(high) || 1) * 0.06;
    if (this.fromZero) low = Math.min(0, low);
    [low, high] = logarithmic ? [low / 1.03, high * 1.03] : [low - (this.fromZero ? 0 : room), high + room];
    this.y = scale([low, high], [this.height - MARGIN.bottom, MARGIN.top], logarithmic);
    this.y.domain = [low, high];
  }

  // Zoomed, the first quarter is left out: losses fall there, and differences vanish.
  firstRange() {
    const [low, high] = this.extent;
    return this.page.zoomed && this.canZoom ? [low + (high - low) * 0.25, high] : this.extent;
  }

  heights(seen, [low, high]) {
    const main = seen.filter((line) => !line.thin);
    const kept = (lines) => lines.flatMap((line) => line.points
      .filter(([x]) => x >= low && x <= high).flatMap((point) => point.slice(1)));
    const found = kept(main.length ? main : seen);
    const all = found.length ? found : kept(seen);
    return all.length ? all : seen.flatMap((line) => line.points.flatMap((point) => point.slice(1)));
  }

  clip() {
    const id = `clip-${this.title.replaceAll(/\W/g, "-")}`;
    const { left, top, right, bottom } = MARGIN;
    // Wider by half a point, for those at both ends.
    const size = { width: Math.max(0, this.width - left - right) + 6, height: this.height - top - bottom + 3 };
    this.svg.append(mark("clipPath", { id }, mark("rect", { x: left - 3, y: top - 3, ...size })));
    return `url(#${id})`;
  }

  axes() {
    const { left, right, top, bottom } = MARGIN;
    const [base, end] = [this.height - bottom, this.width - right];
    for (const value of this.y.ticks(7)) {
      const y = this.y(value);
      this.svg.append(mark("line", { x1: left, x2: end, y1: y, y2: y, class: "grid" }));
      this.svg.append(mark("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, this.format(value)));
    }
    for (const value of this.x.ticks(this.width < 420 ? 4 : 7).filter((one) => !this.bars || Number.isInteger(one))) {
      const x = this.x(value);
      this.svg.append(mark("line", { x1: x, x2: x, y1: base, y2: base + 4, class: "axis" }));
      this.svg.append(mark("text", { x, y: base + 17, "text-anchor": "middle" }, short(value, 3)));
    }
    this.svg.append(mark("line", { x1: left, x2: end, y1: base, y2: base, class: "axis" }));
    const middle = (left + end) / 2;
    this.svg.append(mark("text", { x: middle, y: this.height - 4, "text-anchor": "middle", class: "faint" }, this.xLabel ?? AXES[this.page.axis]));
  }

  format(value) {
    return this.unit === "%" ? `${trimmed(100 * value, 3)} %` : short(value);
  }

  line(line, shown) {
    const path = (points) => points.map(([x, y], n) => `${n ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    const stroke = colourOf(line.index);
    if (line.points[0].length > 2) {
      const around = [...line.points.map(([x, , low]) => [x, low]), ...line.points.map(([x, , , high]) => [x, high]).reverse()];
      shown.append(mark("path", { d: `${path(around)}Z`, fill: stroke, "fill-opacity": ".2", class: "band" }));
    }
    shown.append(mark("path", {
      d: path(line.points), fill: "none", stroke, "data-run": line.name, "stroke-width": line.thin ? 1 : 2,
      "stroke-opacity": line.thin ? 0.45 : 1, "stroke-dasharray": line.thin ? null : dashOf(line.index),
    }));
    if (line.marked && line.points.length < 60) {
      for (const [x, y] of line.points) shown.append(mark("circle", { cx: this.x(x), cy: this.y(y), r: 2.6, fill: stroke }));
    }
  }

  bar(line, shown, n, count) {
    const width = Math.max(1, ((this.x(1) - this.x(0)) * 0.8) / count);
    for (const [x, y] of line.points) {
      const top = this.y(y);
      shown.append(mark("rect", {
        x: this.x(x) + (n - count / 2) * width, y: top, width, height: Math.max(0, this.y(0) - top), fill: colourOf(line.index), "data-run": line.name,
      }));
    }
  }

  described(seen) {
    const ends = seen.filter((line) => !line.thin).map((line) => `${line.name} ends at ${this.format(line.points.at(-1)[1])}`);
    return `${this.title} against ${this.xLabel ?? AXES[this.page.axis]}: ${ends.join("; ")}. Arrow keys move a cursor, + and - zoom, 0 shows all.`;
  }

  follow() {
    this.cross?.remove();
    this.tip.hidden = this.cursor == null || !this.x;
    if (this.tip.hidden) return;
    const x = this.x(this.cursor);
    this.cross = mark("g", {}, mark("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom, class: "axis" }));
    this.tip.replaceChildren(make("div", {}, `${short(this.bars ? Math.round(this.cursor) : this.cursor)} ${this.xUnit ?? this.page.axis}`));
    for (const line of this.lines.filter((one) => !this.page.hidden.has(one.name))) {
      const value = this.bars ? heightOf(line.points, Math.round(this.cursor)) : valueAt(line.points, this.cursor);
      if (value === null) continue;
      const label = `${line.name}${line.note ? `, ${line.note}` : ""}: ${this.format(value)}`;
      this.tip.append(make("div", {}, make("i", { style: `background:${colourOf(line.index)}` }), label));
      const y = this.y(value);
      if (y >= MARGIN.top && y <= this.height - MARGIN.bottom) this.cross.append(mark("circle", { cx: x, cy: y, r: 3.5, fill: colourOf(line.index) }));
    }
    this.svg.append(this.cross);
    const left = x > this.width / 2 ? x - this.tip.offsetWidth - 4 : x + 18;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${this.svg.offsetTop + MARGIN.top}px`;
  }
}

function heightOf(points, x) {
  const found = points.find((point) => point[0] === x);
  return found ? found[1] : null;
}

// Not by Math.min(...values): they can be more than a call takes arguments.
function extent(values) {
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  return low === high ? [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5] : [low, high];
}
