// The lanes of learners: what each did when, and who exchanged with whom.

const LANE = { height: 24, gap: 14, top: 14, left: 74, right: 10, bottom: 36 };
const [BEGIN, END, WAITED, EXCHANGES, PEERS, LOST] = [0, 1, 2, 3, 4, 5];
const KINDS = {
  step: "computes a step", wait: "waits for others", evaluate: "validation", exchange: "exchange",
};

class Lanes {
  // left: names of figures that are to be left out.
  constructor(record, perSuperLearner, left) {
    Object.assign(this, { record, perSuperLearner: perSuperLearner || 1, left });
    this.learners = record.learners;
    const entries = this.learners.flatMap((one) => [...one.steps, ...one.events]);
    const times = entries.flatMap((entry) => [entry[BEGIN], entry[END]]);
    this.extent = extent(times.length ? times : [0, 1]);
    this.range = this.firstRange();
    this.svg = mark("svg", { class: "chart lanes", tabindex: "0", role: "img" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.caption = make("figcaption");
    this.figure = make("figure", { class: "wide" }, make("h3", {}, record.name), this.legend(), this.svg,
      this.caption, this.tools(), this.tip, this.summary());
    this.listen();
  }

  // A few steps of the slowest learner, in the middle of what all have recorded.
  firstRange() {
    const lengths = this.learners.filter((one) => one.steps.length)
      .map((one) => median(one.steps.map((step) => step[END] - step[BEGIN])));
    if (!lengths.length) return [...this.extent];
    const width = Math.min(this.extent[1] - this.extent[0], 6 * Math.max(...lengths));
    const active = this.learners.filter((one) => one.steps.length);
    const begin = Math.max(...active.map((one) => one.steps[0][BEGIN]));
    const end = Math.min(...active.map((one) => one.steps.at(-1)[END]));
    const middle = end > begin ? (begin + end) / 2 : (this.extent[0] + this.extent[1]) / 2;
    return [middle - width / 2, middle + width / 2];
  }

  legend() {
    const swatch = (kind) => make("i", { class: "swatch", style: `background:var(--${kind})` });
    const kinds = Object.entries(KINDS).map(([kind, text]) => make("span", {}, swatch(kind), text));
    const gap = make("span", {}, make("i", { class: "swatch gap" }), "between steps: loads a batch, runs callbacks");
    return make("div", { class: "controls" }, ...kinds, gap);
  }

  tools() {
    const tool = (text, label, onclick) => {
      const name = `${this.record.name}: ${label}`;
      return make("button", { type: "button", "aria-label": name, onclick }, text);
    };
    return make("div", { class: "controls" },
      tool("←", "earlier", () => this.pan(-0.4)), tool("→", "later", () => this.pan(0.4)),
      tool("+", "closer", () => this.zoom(0.5)), tool("−", "further", () => this.zoom(2)),
      tool("all", "all of it", () => this.show(this.extent)));
  }

  summary() {
    const rows = this.learners.map((one) => {
      const spent = one.steps.reduce((sum, step) => sum + step[END] - step[BEGIN], 0);
      const sum = (place) => one.steps.reduce((total, step) => total + step[place], 0);
      const count = one.steps.length;
      const span = count ? one.steps.at(-1)[END] - one.steps[0][BEGIN] : 0;
      const last = one.events.findLast((event) => event[2] !== "validation");
      const speed = span && !this.left.has("Speed of learners") ? short(count / span, 3) : "–";
      const exchanges = count ? short(sum(EXCHANGES) / count, 3) : "–";
      const waited = percent(spent ? sum(WAITED) / spent : null);
      return [one.name, String(count), speed, waited, exchanges, last ? last[2] : "no end written"];
    });
    const head = ["learner", "steps", "steps/s", "waited, of its steps", "exchanges/step", "ended with"];
    return table("What is recorded of each learner", head, rows);
  }

  listen() {
    this.svg.addEventListener("keydown", (event) => {
      const actions = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
        0: () => this.show(this.extent), Escape: () => { this.tip.hidden = true; },
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
    this.svg.addEventListener("pointerdown", (event) => { this.dragged = event.clientX; });
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      this.svg.addEventListener(end, () => { this.dragged = null; });
    }
    this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  move(event) {
    if (this.dragged != null && event.buttons) {
      const share = (this.dragged - event.clientX) / (this.width - LANE.left - LANE.right);
      this.dragged = event.clientX;
      return this.pan(share);
    }
    const box = this.svg.getBoundingClientRect();
    this.tell(event.clientX - box.left, event.clientY - box.top);
  }

  pan(share) {
    const [begin, end] = this.range;
    const by = Math.max(this.extent[0] - begin, Math.min(this.extent[1] - end, share * (end - begin)));
    this.show([begin + by, end + by]);
  }

  zoom(factor) {
    const [begin, end] = this.range;
    const [middle, half] = [(begin + end) / 2, ((end - begin) / 2) * factor];
    this.show([Math.max(this.extent[0], middle - half), Math.min(this.extent[1], middle + half)]);
  }

  show(range) {
    this.range = [...range];
    this.draw();
    say(`${this.record.name}: ${this.rangeInWords()}`);
  }

  rangeInWords() {
    return `second ${short(this.range[0])} to ${short(this.range[1])}`;
  }

  // --- drawing

  yOf(lane) {
    return LANE.top + lane * (LANE.height + LANE.gap);
  }

  draw() {
    this.width = Math.max(240, this.svg.clientWidth || this.figure.clientWidth || 480);
    const height = this.yOf(this.learners.length) + LANE.bottom;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.style.height = `${height}px`;
    const [least, most] = this.extent;
    this.caption.textContent = `Shown: ${this.rangeInWords()}. Recorded: ${short(least, 3)} to ${short(most, 3)}.`;
    this.x = scale(this.range, [LANE.left, this.width - LANE.right]);
    this.svg.replaceChildren();
    this.grid(height - LANE.bottom);
    const id = `lanes-${this.record.name.replaceAll(/\W/g, "-")}`;
    const size = { x: LANE.left, y: 0, width: this.width - LANE.left - LANE.right, height };
    this.svg.append(mark("clipPath", { id }, mark("rect", size)));
    const shown = mark("g", { "clip-path": `url(#${id})` });
    const links = mark("g", {});
    this.learners.forEach((one, lane) => this.lane(one, lane, shown, links));
    shown.append(links);
    this.svg.append(shown);
    const what = `Lanes of ${this.learners.length} learners of ${this.record.name}`;
    const keys = "Arrow keys move, + and - zoom, 0 shows all.";
    this.svg.setAttribute("aria-label", `${what}, ${this.rangeInWords()}. ${keys}`);
  }

  grid(base) {
    for (const value of this.x.ticks(this.width < 420 ? 3 : 8)) {
      const x = this.x(value);
      this.svg.append(line([x, LANE.top], [x, base], { class: "grid" }));
      this.svg.append(words(short(value, 5), x, base + 14, MIDDLE));
    }
    const place = [(LANE.left + this.width) / 2, base + 30];
    this.svg.append(words("seconds since the first step recorded", ...place, { ...MIDDLE, class: "faint" }));
  }

  lane(one, lane, shown, links) {
    const y = this.yOf(lane);
    this.svg.append(words(`learner ${one.name}`.slice(0, 11), 2, y + LANE.height / 2 + 4));
    const [begin, end] = this.range;
    const steps = one.steps.filter((step) => step[END] >= begin && step[BEGIN] <= end);
    const isDense = steps.length > this.width / 3;
    for (const block of isDense ? this.bins(steps) : steps.flatMap(blocksOf)) this.block(shown, block, y);
    for (const event of one.events) this.event(event, y, shown);
    for (const step of steps) {
      if (step[LOST] > 0) this.cross(shown, step[END], y, `${step[LOST]} lost`);
      if (!isDense && step[EXCHANGES] > 0) this.exchange(step, lane, links);
    }
  }

  // Too many to be seen: the share of each kind, in strips of a few pixels.
  bins(steps) {
    const width = (this.range[1] - this.range[0]) / Math.ceil(this.width / 4);
    const sums = new Map();
    for (const step of steps) {
      const bin = Math.floor((step[BEGIN] + step[END]) / 2 / width);
      const [busy, waited] = sums.get(bin) ?? [0, 0];
      sums.set(bin, [busy + step[END] - step[BEGIN] - step[WAITED], waited + step[WAITED]]);
    }
    return [...sums].flatMap(([bin, [busy, waited]]) => {
      const share = busy / (busy + waited || 1);
      const [from, to] = [bin * width, (bin + 1) * width];
      return [["step", from, to, 1 - share, 1], ["wait", from, to, 0, 1 - share]];
    });
  }

  block(shown, [kind, from, to, top = 0, bottom = 1], y) {
    const [x, end] = [this.x(from), this.x(to)];
    if (end <= x || bottom <= top) return;
    shown.append(mark("rect", {
      x, y: y + top * LANE.height, width: Math.max(0.5, end - x - (end - x > 4 ? 1 : 0)),
      height: (bottom - top) * LANE.height, fill: `var(--${kind})`, class: kind,
    }));
  }

  event([from, to, text], y, shown) {
    if (text === "validation") this.block(shown, ["evaluate", from, to], y);
    else if (text !== "end") this.cross(shown, from, y, text);
    else this.bar(shown, this.x(to), y, "ended");
  }

  bar(shown, x, y, text) {
    const end = line([x, y - 3], [x, y + LANE.height + 3], { stroke: "var(--ink)", "stroke-width": 2 });
    end.append(mark("title", {}, text));
    shown.append(end);
  }

  cross(shown, time, y, text) {
    const [x, middle, r] = [this.x(time), y + LANE.height / 2, 7];
    const d = `M${x - r} ${middle - r}L${x + r} ${middle + r}M${x - r} ${middle + r}L${x + r} ${middle - r}`;
    const about = { stroke: "var(--wrong)", "stroke-width": 3, class: "lost" };
    shown.append(mark("path", { d, ...about }, mark("title", {}, text)));
  }

  // Both ends have written it; the link is drawn from the lane of the lower number.
  exchange(step, lane, links) {
    const x = this.x(step[END]);
    const middle = (one) => this.yOf(one) + LANE.height / 2;
    const about = { stroke: "var(--exchange)", "stroke-width": 1.2, class: "link" };
    const dot = { cx: x, cy: middle(lane), r: 3, fill: "var(--exchange)", class: "exchange" };
    links.append(mark("circle", dot));
    for (const peer of step[PEERS]) {
      const other = Number(peer) * this.perSuperLearner + (lane % this.perSuperLearner);
      if (!(other > lane) || this.learners[other]?.name !== String(other)) continue;
      links.append(line([x, middle(lane)], [x, middle(other)], about));
    }
  }

  tell(x, y) {
    const lane = Math.floor((y - LANE.top + LANE.gap / 2) / (LANE.height + LANE.gap));
    const time = this.x.back(x);
    const one = this.learners[lane];
    const step = one?.steps.find((entry) => entry[BEGIN] <= time && time <= entry[END]);
    const event = one?.events.find((entry) => entry[BEGIN] <= time && time <= entry[END]);
    this.tip.hidden = !(step || event);
    if (this.tip.hidden) return;
    const [begin, end] = step ?? event;
    const ms = (seconds) => `${short(1000 * seconds, 3)} ms`;
    const lines = [`learner ${one.name}, ${step ? "step" : event[2]}: ${ms(end - begin)}`];
    if (step) {
      const peers = step[PEERS].length ? ` with ${step[PEERS].join(", ")}` : "";
      lines.push(`waited ${ms(step[WAITED])}`, `${step[EXCHANGES]} exchanges${peers}`);
    }
    this.tip.replaceChildren(...lines.map((text) => make("div", {}, text)));
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, this.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${this.svg.offsetTop + this.yOf(lane + 1)}px`;
  }
}

function blocksOf(step) {
  const turn = step[END] - Math.min(step[WAITED], step[END] - step[BEGIN]);
  return [["step", step[BEGIN], turn], ["wait", turn, step[END]]];
}
