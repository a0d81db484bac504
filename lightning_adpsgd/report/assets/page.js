// The page: sections, controls and theme, from the data in it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLUMNS = {
  algorithm: "algorithm", topology: "topology", num_super_learners: "super-learners",
  super_learner_size: "learners in each", global_batch: "global batch", lr: "learning rate",
  seed: "seed", best_loss: "best held-out loss", last_loss: "last held-out loss", wer: "held-out WER",
  global_samples: "samples", train_seconds: "training seconds", samples_per_second: "samples/s", exposed_share: "waited",
  relative_consensus_distance: "last consensus distance", exchanges_per_step: "exchanges/step",
  diverged: "diverged",
};
const LOSS_TEXT = "Thick: held-out loss of the consensus model. Thin: loss of learner 0 on its training "
  + "batches. A band: lowest to highest of several seeds, around their median. Drag to zoom.";
const COMPARED_TEXT = "Thick: held-out loss of the consensus model. Thin: loss of learner 0 on its training batches.";
const WER_TEXT = "Of a few held-out utterances, by the consensus model.";
const RUNS_WER_TEXT = "Held-out WER: the last rate of a few held-out utterances that were recognised during training.";
const TEST_WER_TEXT = " The rates of the test sets are under Word errors.";
const DISTANCE_TEXT = "√(mean |wᵢ − w|²) / |w| before each validation: how far super-learners are from their "
  + "mean w, relative to its length.";
const EXCHANGES_TEXT = "Exchanges of a learner per step of its own, since training began.";
const WAITING_TEXT = "Share of training time in which learners waited for communication, since training began.";
const STALENESS_TEXT = "Share of merged exchanges, by the optimizer steps between snapshot and merge.";
const SPEED_TEXT = "Optimizer steps per second of each learner.";
const SETTINGS = new Set(Object.keys(COLUMNS).slice(0, Object.keys(COLUMNS).indexOf("seed") + 1));
const SHARES = new Set(["wer", "exposed_share", "relative_consensus_distance"]);

class Page {
  constructor() {
    this.left = new Set(DATA.notes.flatMap((note) => note.hide ?? []));
    this.entries = entriesOf(DATA.runs);
    this.hidden = this.apart();
    this.axes = Object.keys(AXES).filter((axis) => DATA.runs.some((run) => hasCurves(run, axis)));
    this.axis = this.axes[0] ?? "samples";
    this.zoomed = true;
    this.log = false;
    this.reference = null;
    this.drawn = [];
    this.main = document.querySelector("main");
    this.nav = document.querySelector("nav");
  }

  indexOf(name) {
    const found = this.entries.find((entry) => entry.name === name || entry.runs.some((run) => run.name === name));
    return found ? found.index : this.entries.length;
  }

  build() {
    document.querySelector("h1").textContent = DATA.title;
    document.querySelector("footer").textContent =
      `Written ${DATA.written} by lightning-adpsgd. One file; nothing is loaded from elsewhere.`;
    this.notes();
    this.runs();
    this.training();
    this.lanes();
    this.words();
    this.facts();
    this.draw();
    new ResizeObserver(() => this.resized()).observe(this.main);
  }

  section(title, ...parts) {
    const id = title.toLowerCase().replaceAll(/\W+/g, "-");
    this.nav.append(make("a", { href: `#${id}` }, title));
    this.main.append(make("section", { id }, make("h2", {}, title), ...parts.filter((part) => part !== null)));
  }

  draw() {
    for (const one of this.drawn) one.draw();
  }

  resized() {
    const width = this.main.clientWidth;
    if (width !== this.width) {
      this.width = width;
      this.draw();
    }
  }

  // --- sections

  notes() {
    for (const note of DATA.notes) {
      for (const text of note.notes ?? []) this.main.append(make("p", {}, text));
      for (const one of note.tables ?? []) {
        const text = (one.text ?? []).map((paragraph) => make("p", {}, paragraph));
        this.section(one.title, ...text, table(one.title, one.head, one.rows, true), this.comparison(one.chart));
      }
    }
  }

  // Runs that a table has a chart for are off elsewhere at first, unless nothing else is there.
  apart() {
    const charts = DATA.notes.flatMap((note) => note.tables ?? []).flatMap((one) => one.chart ?? []);
    const names = charts.flatMap((chart) => this.entriesNamed(chart.runs)).map((entry) => entry.name);
    return new Set(this.entries.every((entry) => names.includes(entry.name)) ? [] : names);
  }

  entriesNamed(names) {
    return this.entries.filter((entry) => entry.runs.some((run) => names.includes(run.name)));
  }

  // The losses of the runs that a table compares, alone and against an axis of their own.
  comparison(asked) {
    if (!asked) return null;
    const entries = this.entriesNamed(asked.runs);
    const chart = new LineChart({
      title: `Loss against ${AXES[asked.against]}`, ownAxis: asked.against, wide: true, text: "",
      linesOf: (axis) => this.losses(axis, entries, null),
      captionOf: () => `${this.endings(entries, asked.against)} ${COMPARED_TEXT}`,
    }, this);
    if (!chart.linesOf(asked.against).some((one) => one.points.length > 1)) return null;
    this.drawn.push(chart);
    return make("div", { class: "charts" }, chart.figure);
  }

  runs() {
    if (!DATA.runs.length) return;
    const columns = Object.entries(COLUMNS)
      .filter(([name]) => !this.left.has(name) && DATA.runs.some((run) => resultOf(run, name) != null));
    const cell = (run, name) => {
      const value = resultOf(run, name);
      if (name === "diverged") return value === 1 || value === "True" ? "yes" : "no";
      return SHARES.has(name) && typeof value === "number" ? percent(value, 2) : value;
    };
    const part = (title, kept) => table(title, ["run", ...kept.map(([, text]) => text)],
      DATA.runs.map((run) => [run.name, ...kept.map(([name]) => cell(run, name))]));
    const settings = part("Settings", columns.filter(([name]) => SETTINGS.has(name)));
    const results = part("Results at the end of training", columns.filter(([name]) => !SETTINGS.has(name)));
    const explained = RUNS_WER_TEXT + (DATA.scores.length ? TEST_WER_TEXT : "");
    const hint = columns.some(([name]) => name === "wer") ? make("p", {}, explained) : null;
    this.section("Runs", settings, results, hint);
  }

  training() {
    if (!this.axes.length) return;
    const charts = this.charts().filter((chart) => !this.left.has(chart.title))
      .filter((chart) => this.axes.some((axis) => chart.linesOf(axis).some((one) => chart.bars || one.points.length > 1)));
    if (!charts.length) return;
    const off = [...this.hidden].join(", ");
    const why = off ? make("p", {}, `Switched off at first: ${off}. A chart of their own is above.`) : null;
    this.drawn.push(...charts);
    const figures = make("div", { class: "charts" }, ...charts.map((chart) => chart.figure));
    this.section("Training", why, this.controls(), this.legend(), figures);
  }

  lanes() {
    if (!DATA.lanes.length) return;
    const lanes = DATA.lanes.map((record) => new Lanes(record, this.sizeOf(record.name), this.left));
    this.drawn.push(...lanes);
    const text = "What each learner did. Each figure opens on a few steps in the middle of the record; the "
      + "buttons move to the others. An exchange stands at the end of the step in which it ended. A cross: a "
      + "learner was lost, or ended with an error.";
    const figures = make("div", { class: "charts" }, ...lanes.map((one) => one.figure));
    this.section("Timeline", make("p", {}, text), figures);
  }

  sizeOf(name) {
    return DATA.runs.find((run) => run.name === name)?.settings.super_learner_size;
  }

  words() {
    if (!DATA.scores.length) return;
    const intervals = new Intervals(DATA.scores, this);
    this.drawn.push(intervals);
    this.section("Word errors", intervals.figure, errorTable(DATA.scores), pairsTable(DATA.scores));
    const listed = DATA.words.filter((one) => one.utterances.length);
    if (listed.length) this.section("Worst utterances", new Utterances(listed).section);
  }

  facts() {
    const facts = DATA.notes.flatMap((note) => Object.entries(note.facts ?? {}));
    if (!facts.length) return;
    const pairs = facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, String(text))]);
    this.section("How it was measured", make("dl", {}, ...pairs));
  }

  // --- controls

  controls() {
    this.buttons = [];
    const axes = this.axes.map((axis) => this.button(axis, () => this.axis === axis, () => this.against(axis)));
    const zoomed = this.button("zoomed", () => this.zoomed, () => {
      this.zoomed = !this.zoomed;
      this.against(this.axis);
    });
    const log = this.button("log", () => this.log, () => { this.log = !this.log; });
    return make("div", { class: "controls" }, make("span", {}, "against"), ...axes,
      make("span", {}, "loss axis"), zoomed, log, make("label", { for: "reference" }, "show"), this.choice());
  }

  button(text, isOn, action) {
    const button = make("button", { type: "button", "aria-pressed": String(isOn()) }, text);
    button.addEventListener("click", () => {
      action();
      this.update();
    });
    this.buttons.push([button, isOn]);
    return button;
  }

  choice() {
    const option = (value, text) => make("option", { value }, text);
    const names = this.entries.filter((entry) => this.heldOut(entry, this.axis).length).map((entry) => entry.name);
    const differences = names.map((name) => option(name, `difference to ${name}`));
    const choice = make("select", { id: "reference" }, option("", "the losses"), ...differences);
    choice.addEventListener("change", () => {
      this.reference = choice.value || null;
      this.update();
    });
    return choice;
  }

  against(axis) {
    this.axis = axis;
    for (const chart of this.drawn) {
      if (chart instanceof LineChart && !chart.bars && !chart.ownAxis) chart.range = chart.cursor = null;
    }
  }

  update() {
    for (const [button, isOn] of this.buttons) button.setAttribute("aria-pressed", String(isOn()));
    this.draw();
  }

  legend() {
    const shown = this.entries.filter((entry) => entry.runs.some((run) => Object.keys(run.series).length));
    const buttons = shown.map((entry) => this.toggle(entry));
    return make("div", { class: "legend", role: "group", "aria-label": "curves shown" }, ...buttons);
  }

  toggle(entry) {
    const isOn = String(!this.hidden.has(entry.name));
    const button = make("button", { type: "button", "aria-pressed": isOn }, sampleOf(entry.index), entry.name);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(entry.name)) this.hidden.add(entry.name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(entry.name)));
      this.draw();
    });
    return button;
  }

  // --- charts

  charts() {
    const chart = (title, linesOf, spec) => new LineChart({ title, linesOf, text: "", ...spec }, this);
    const curve = (name) => (axis) => this.linesOf(name, axis);
    const share = { unit: "%", fromZero: true };
    return [
      chart("Loss", (axis) => this.losses(axis), {
        wide: true, canBeLog: true, canZoom: true, captionOf: () => `${this.endings()} ${LOSS_TEXT}`,
      }),
      chart("Word error rate during training", curve("wer"), { unit: "%", text: WER_TEXT }),
      chart("Consensus distance", curve("distance"), { ...share, text: DISTANCE_TEXT }),
      chart("Exchanges per step", curve("exchanges"), { fromZero: true, text: EXCHANGES_TEXT }),
      chart("Waiting", curve("exposed"), { ...share, text: WAITING_TEXT }),
      chart("Staleness", () => this.staleness(), {
        ...share, bars: true, xLabel: "age in optimizer steps", xUnit: "steps old", text: STALENESS_TEXT,
      }),
      chart("Speed of learners", () => this.numbered("learners/steps_per_second_", (pairs) => pairs), {
        fromZero: true, bars: true, xLabel: "learner", xUnit: "is the learner", text: SPEED_TEXT,
      }),
    ];
  }

  linesOf(curve, axis, entries = this.entries) {
    return this.linesWith((entry) => this.pointsOf(entry, curve, axis), { marked: true }, entries);
  }

  linesWith(points, about = {}, entries = this.entries) {
    const lines = entries.map(({ name, index, ...entry }) => ({ name, index, ...about, points: points(entry) }));
    return lines.filter((one) => one.points.length);
  }

  pointsOf(entry, curve, axis) {
    const several = entry.runs.map((run) => pointsOf(run, curve, axis)).filter((points) => points.length);
    return several.length > 1 ? bandOf(several) : several[0] ?? [];
  }

  heldOut(entry, axis) {
    return this.pointsOf(entry, "heldOut", axis);
  }

  losses(axis, entries = this.entries, name = this.reference) {
    const reference = entries.find((entry) => entry.name === name);
    const held = this.linesOf("heldOut", axis, entries).map((one) => ({ ...one, note: "held out" }));
    if (reference) {
      const base = this.heldOut(reference, axis);
      return held.map((one) => ({ ...one, points: lessThan(one.points, base) }));
    }
    const training = ({ runs }) => (runs.length === 1 ? pointsOf(runs[0], "train", axis) : []);
    return [...this.linesWith(training, { thin: true, note: "training" }, entries), ...held];
  }

  endings(entries = this.entries.filter((entry) => !this.hidden.has(entry.name)), axis = this.axis) {
    const ends = this.linesOf("heldOut", axis, entries).map((one) => `${one.name} ${short(one.points.at(-1)[1])}`);
    return ends.length ? `Held out at the end: ${ends.join(", ")}.` : "";
  }

  staleness() {
    return this.numbered("gossip/staleness_", (pairs) => {
      const total = pairs.reduce((sum, [, count]) => sum + count, 0);
      return total ? pairs.map(([steps, count]) => [steps, count / total]) : [];
    });
  }

  numbered(prefix, points) {
    return this.linesWith(({ runs }) => points(numberedOf(runs, prefix)));
  }
}

// The last figures `<prefix><number>`, their mean over runs, in the order of the numbers.
function numberedOf(runs, prefix) {
  const sums = new Map();
  for (const [name, points] of runs.flatMap((run) => Object.entries(run.series))) {
    if (!name.startsWith(prefix) || !/^\d+$/.test(name.slice(prefix.length))) continue;
    const number = Number(name.slice(prefix.length));
    sums.set(number, (sums.get(number) ?? 0) + (points.at(-1)[1] ?? 0) / runs.length);
  }
  return [...sums].sort((a, b) => a[0] - b[0]);
}

// A setting or result of the run's row, or the last figure of that name.
function resultOf(run, name) {
  const logged = ["run/", "gossip/"].map((group) => run.series[group + name]?.at(-1)[1]);
  return run.settings[name] ?? logged.find((value) => value != null) ?? null;
}

// The row of a run may lie in another folder than its figures, under the same name.
function joined(runs) {
  const hasFigures = (run) => Object.keys(run.series).length > 0;
  const named = (name) => runs.filter((run) => hasFigures(run) && run.settings.name === name);
  return runs.filter((row) => {
    const own = hasFigures(row) ? [] : named(row.settings.name);
    if (own.length === 1) own[0].settings = { ...row.settings, ...own[0].settings };
    return own.length !== 1;
  });
}

function hasCurves(run, axis) {
  return Object.keys(CURVES).some((curve) => pointsOf(run, curve, axis).length);
}

// What has a colour and a switch: a run, or the runs that differ in their seeds alone.
function entriesOf(runs) {
  const groups = new Map();
  for (const run of runs) {
    const key = withoutSeed(run);
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  const named = [...groups.values()].flatMap((group) => {
    const seeds = new Set(group.map((run) => run.settings.seed ?? null));
    const differ = group.length > 1 && seeds.size === group.length && !seeds.has(null);
    if (!differ) return group.map((run) => ({ name: run.name, runs: [run] }));
    return [{ name: `${ownName(group[0])}, ${group.length} seeds`, runs: group }];
  });
  return named.map((entry, index) => ({ ...entry, index }));
}

function ownName(run) {
  return String(run.settings.name ?? run.name).replace(/[-_ ]?seed[-_ ]?\w+(-[0-9a-f]{8})?$/, "");
}

function withoutSeed(run) {
  const kept = ["algorithm", "topology", "communication", "num_super_learners", "super_learner_size", "global_batch", "lr"];
  return JSON.stringify([ownName(run), ...kept.map((name) => run.settings[name] ?? null)]);
}

function lessThan(points, reference) {
  return points.flatMap(([x, ...values]) => {
    const base = valueAt(reference, x);
    return base === null ? [] : [[x, ...values.map((value) => value - base)]];
  });
}

// --- theme

function kept(value) {
  try {  // a page in a frame may be forbidden to keep anything
    if (value !== undefined) localStorage.setItem("theme", value);
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "light page" : "dark page";
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(kept() ?? (system.matches ? "dark" : "light"));
  system.addEventListener("change", follow);
  document.getElementById("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    kept(theme);
    setTheme(theme);
  });
  follow();
}

DATA.runs = joined(DATA.runs);
startTheme();
new Page().build();
