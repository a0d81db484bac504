// A chart of curves: hover, a cursor for the keyboard, zoom by dragging, buttons and keys.

const MARGIN = { left: 58, right: 12, top: 10, bottom: 38 };

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
    this.legend = make("div", { class: "key" });
    const tools = make("div", { class: "controls" },
      this.tool("+", "closer", () => this.zoom(0.5)),
      this.tool("−", "further", () => this.zoom(2)),
      this.tool("all", "all of it", () => this.reset()),
    );
    this.figure = make("figure", { class: spec.wide ? "wide" : null },
      make("h3", {}, this.title), this.legend, this.svg, tools, this.caption, this.tip);
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
    const lines = this.linesOf(this.axis).filter((line) => line.points.length);
    this.lines = lines.filter((one) => !this.isAlone(one));
    const seen = this.lines.filter((line) => this.isOn(line));
    this.x = null;
    this.caption.textContent = `${this.captionOf ? this.captionOf() : this.text} ${this.once(lines)}`;
    this.legend.replaceChildren(...this.names(seen));
    if (!seen.length) return this.explain();
    this.extent = extent(seen.flatMap((line) => line.points.map(([x]) => x)));
    if (this.bars) this.extent = [Math.floor(this.extent[0]) - 0.5, Math.ceil(this.extent[1]) + 0.5];
    this.place(seen);
    this.axes();
    const shown = mark("g", { "clip-path": this.clip() });
    seen.forEach((one, n) => (this.bars ? this.bar(one, shown, n, seen.length) : this.curve(one, shown)));
    this.svg.append(shown);
    this.svg.setAttribute("aria-label", this.described(seen));
    this.follow();
  }

  get axis() {
    return this.ownAxis ?? this.page.axis;
  }

  isOn(line) {
    return Boolean(this.ownAxis) || !this.page.hidden.has(line.name);
  }

  // One figure is no curve: the caption tells it.
  isAlone({ points }) {
    return !this.bars && !this.canZoom && points.length === 1;
  }

  once(lines) {
    const told = lines.filter((one) => this.isAlone(one) && this.isOn(one))
      .map((one) => `${one.name} ${this.format(one.points[0][1])}`);
    return told.length ? `Recorded once: ${told.join(", ")}.` : "";
  }

  names(seen) {
    const indices = new Map(seen.map((one) => [one.name, one.index]));
    const sample = (index) => (this.bars
      ? make("i", { class: "swatch", style: `background:${colourOf(index)}` }) : sampleOf(index));
    return [...indices].map(([name, index]) => make("span", {}, sample(index), name));
  }

  explain() {
    const axis = AXES[this.axis];
    const why = this.lines.length ? "all curves are switched off" : `nothing recorded against ${axis}`;
    this.svg.append(words(why, 12, 30, { class: "faint" }));
    this.svg.setAttribute("aria-label", `${this.title}: ${why}`);
  }

  place(seen) {
    const domain = this.range ?? this.firstRange(seen);
    this.x = scale(domain, [MARGIN.left, this.width - MARGIN.right]);
    this.x.domain = domain;
    const heights = this.heights(seen, domain);
    const logarithmic = this.page.log && this.canBeLog && heights.every((y) => y > 0);
    let [low, high] = extent(heights);
    const room = logarithmic ? 0 : (high - low || Math.abs(high) || 1) * 0.06;
    if (this.fromZero) low = Math.min(0, low);
    // A curve of zeros stands above the axis, and not on it; bars begin at the axis.
    [low, high] = logarithmic ? [low / 1.03, high * 1.03] : [low - (this.bars ? 0 : room), high + room];
    this.y = scale([low, high], [this.height - MARGIN.bottom, MARGIN.top], logarithmic);
    this.y.domain = [low, high];
  }

  // Zoomed, the first quarter of each curve does not count: losses fall there, and
  // differences vanish.
  beginOf({ points }) {
    const [low, high] = [points[0][0], points.at(-1)[0]];
    return this.page.zoomed && this.canZoom && !this.range ? low + (high - low) * 0.25 : low;
  }

  firstRange(seen) {
    const [low, high] = this.extent;
    if (!this.page.zoomed || !this.canZoom) return this.extent;
    const main = seen.filter((one) => !one.thin && one.points.length > 1);
    return main.length ? [Math.min(...main.map((one) => this.beginOf(one))), high] : [low, high];
  }

  heights(seen, [low, high]) {
    const main = seen.filter((line) => !line.thin);
    const kept = (lines) => lines.flatMap((one) => one.points
      .filter(([x]) => x >= Math.max(low, this.beginOf(one)) && x <= high).flatMap((point) => point.slice(1)));
    const found = kept(main.length ? main : seen);
    const all = found.length ? found : kept(seen);
    return all.length ? all : seen.flatMap((line) => line.points.flatMap((point) => point.slice(1)));
  }

  clip() {
    const id = `clip-${this.title.replaceAll(/\W/g, "-")}`;
    const { left, top, right, bottom } = MARGIN;
    // Wider by half a point, for those at both ends.
    const width = Math.max(0, this.width - left - right) + 6;
    const size = { width, height: this.height - top - bottom + 3 };
    this.svg.append(mark("clipPath", { id }, mark("rect", { x: left - 3, y: top - 3, ...size })));
    return `url(#${id})`;
  }

  axes() {
    const { left, right, top, bottom } = MARGIN;
    const [base, end] = [this.height - bottom, this.width - right];
    for (const value of this.y.ticks(7)) {
      const y = this.y(value);
      this.svg.append(line([left, y], [end, y], { class: "grid" }));
      this.svg.append(words(this.format(value), left - 6, y + 4, { "text-anchor": "end" }));
    }
    const ticks = this.x.ticks(this.width < 420 ? 4 : 7);
    for (const value of ticks.filter((one) => !this.bars || Number.isInteger(one))) {
      const x = this.x(value);
      this.svg.append(line([x, base], [x, base + 4], { class: "axis" }));
      this.svg.append(words(short(value, 3), x, base + 17, MIDDLE));
    }
    this.svg.append(line([left, base], [end, base], { class: "axis" }));
    const place = [(left + end) / 2, this.height - 4];
    this.svg.append(words(this.nameOfX(), ...place, { ...MIDDLE, class: "faint" }));
  }

  nameOfX() {
    return this.xLabel ?? AXES[this.axis];
  }

  format(value) {
    return this.unit === "%" ? `${trimmed(100 * value, 3)}%` : short(value);
  }

  curve(one, shown) {
    const stroke = colourOf(one.index);
    if (one.points[0].length > 2) this.band(one.points, shown, stroke);
    shown.append(mark("path", {
      d: this.path(one.points), fill: "none", stroke, "data-run": one.name,
      "stroke-width": one.thin ? 1 : 2, "stroke-opacity": one.thin ? 0.45 : 1,
      "stroke-dasharray": one.thin ? null : dashOf(one.index),
    }));
    if (!one.marked || one.points.length > 60) return;
    for (const [x, y] of one.points) {
      shown.append(mark("circle", { cx: this.x(x), cy: this.y(y), r: 2.6, fill: stroke }));
    }
  }

  path(points) {
    const place = ([x, y]) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
    return `M${points.map(place).join("L")}`;
  }

  band(points, shown, fill) {
    const low = points.map(([x, , least]) => [x, least]);
    const high = points.map(([x, , , most]) => [x, most]).reverse();
    const d = `${this.path([...low, ...high])}Z`;
    shown.append(mark("path", { d, fill, "fill-opacity": ".2", class: "band" }));
  }

  bar(one, shown, n, count) {
    const width = Math.max(1, ((this.x(1) - this.x(0)) * 0.8) / count);
    const about = { width, fill: colourOf(one.index), "data-run": one.name };
    for (const [x, y] of one.points) {
      const top = this.y(y);
      const height = Math.max(0, this.y(0) - top);
      shown.append(mark("rect", { x: this.x(x) + (n - count / 2) * width, y: top, height, ...about }));
    }
  }

  described(seen) {
    const ends = seen.filter((one) => !one.thin)
      .map((one) => `${one.name} ends at ${this.format(one.points.at(-1)[1])}`);
    const keys = "Arrow keys move a cursor, + and - zoom, 0 shows all.";
    return `${this.title} against ${this.nameOfX()}: ${ends.join("; ")}. ${keys}`;
  }

  follow() {
    this.cross?.remove();
    this.tip.hidden = this.cursor == null || !this.x;
    if (this.tip.hidden) return;
    const x = this.x(this.cursor);
    const base = this.height - MARGIN.bottom;
    const at = this.bars ? Math.round(this.cursor) : this.cursor;
    this.cross = mark("g", {}, line([x, MARGIN.top], [x, base], { class: "axis" }));
    this.tip.replaceChildren(make("div", {}, `${short(at)} ${this.xUnit ?? this.axis}`));
    for (const one of this.lines.filter((each) => this.isOn(each))) {
      const value = this.bars ? heightOf(one.points, at) : valueAt(one.points, at);
      if (value === null) continue;
      const fill = colourOf(one.index);
      const label = `${one.name}${one.note ? `, ${one.note}` : ""}: ${this.format(value)}`;
      this.tip.append(make("div", {}, make("i", { style: `background:${fill}` }), label));
      const cy = this.y(value);
      if (cy >= MARGIN.top && cy <= base) this.cross.append(mark("circle", { cx: x, cy, r: 3.5, fill }));
    }
    this.svg.append(this.cross);
    const left = x > this.width / 2 ? x - this.tip.offsetWidth - 4 : x + 18;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${this.svg.offsetTop + MARGIN.top}px`;
  }
}
