// Word error rates with their intervals, tests between runs, and aligned errors to hear.

const INTERVAL_TEXT = "Point: word errors per word of the reference. Line: interval of 95%, by a bootstrap "
  + "over speakers, where there are at least two.";
const PAIRS_TEXT = "p: how often a difference as large comes about if neither run is better. Above 0.05, "
  + "this test does not tell them apart.";
const WORDS_TEXT = "Above what was said, below what was recognised, then the recogniser's confidence. A line "
  + "under a word: red substituted, amber deleted, violet inserted. ∅ stands where there is no word. A word in "
  + "parentheses, such as (%hesitation), may be left out: without a line, ∅ below it is no error.";
const UNFOLDED = 3;
const COUNTS = ["num_words", "substitutions", "deletions", "insertions", "num_segments", "wrong_segments"];
const KIND_NAMES = { S: "substituted", D: "deleted", I: "inserted" };

class Intervals {
  constructor(scores, page) {
    Object.assign(this, { scores, page });
    this.svg = mark("svg", { class: "chart", role: "img", style: "cursor:default" });
    this.figure = make("figure", { class: "wide" }, make("h3", {}, "Word error rate"), this.svg,
      make("figcaption", {}, INTERVAL_TEXT));
  }

  // Part by part; the first row of each names it.
  rows() {
    const parts = new Set(this.scores.flatMap((score) => Object.keys(score.parts)));
    return [...parts].flatMap((part) => this.scores.filter((score) => score.parts[part])
      .map(({ name, parts: rates }, n) => ({ ...rates[part], name, part: n ? "" : part })));
  }

  draw() {
    const width = Math.max(240, this.svg.clientWidth || 480);
    const rows = this.rows();
    const ends = rows.flatMap((row) => [row.wer, row.wer_low, row.wer_high]).filter((end) => end != null);
    const label = (row) => `${row.name}: ${percent(row.wer, 2)}`;
    const longest = Math.max(...rows.map((row) => label(row).length));
    const left = Math.min(width * 0.45, 7 * longest + 12);
    const x = scale([0, Math.max(0.001, ...ends) * 1.05], [left + 8, width - 20]);
    let y = 6;
    this.svg.replaceChildren();
    const body = mark("g", {});
    for (const row of rows) {
      if (row.part) {
        y += 26;
        body.append(words(row.part, 4, y, { style: "font-weight:600" }));
      }
      y += 18;
      const colour = colourOf(this.page.indexOf(row.name));
      // Beside its line: above, it could be taken for the name of the line before.
      const fits = Math.floor((left - 8) / 6.5);
      const [name, rate] = [row.name, percent(row.wer, 2)];
      const cut = label(row).length > fits ? `${name.slice(0, Math.max(1, fits - rate.length - 3))}…: ${rate}` : label(row);
      body.append(mark("text", { x: 8, y: y + 4, class: "faint" }, cut, mark("title", {}, label(row))));
      const about = { stroke: colour, "stroke-width": 3, class: "interval" };
      if (row.wer_low != null) body.append(line([x(row.wer_low), y], [x(row.wer_high), y], about));
      body.append(mark("circle", { cx: x(row.wer ?? 0), cy: y, r: 5, fill: colour }));
    }
    y += 8;
    for (const value of x.ticks(width < 420 ? 3 : 8)) {
      this.svg.append(line([x(value), 8], [x(value), y + 8], { class: "grid" }));
      this.svg.append(words(`${trimmed(100 * value, 3)}%`, x(value), y + 22, MIDDLE));
    }
    this.svg.append(body);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${y + 28}`);
    this.svg.style.height = `${y + 28}px`;
    this.svg.setAttribute("aria-label", rows.map((row) => `${row.name}: ${percent(row.wer, 2)}`).join("; "));
  }
}

function errorTable(scores) {
  const counted = ["words", "sub.", "del.", "ins.", "segments", "with errors"];
  const head = ["run", "part", ...counted, "WER", "95% interval", "CER"];
  const range = ([low, high]) => (low == null ? "–" : `${percent(low, 2)} to ${percent(high, 2)}`);
  const rows = scores.flatMap((score) => Object.entries(score.parts).map(([part, counts]) => [
    score.name, part, ...COUNTS.map((name) => String(counts[name] ?? "–")),
    percent(counts.wer, 2), range([counts.wer_low, counts.wer_high]), percent(counts.cer, 2),
  ]));
  return table("Word errors", head, rows);
}

function pairsTable(scores) {
  const rows = scores.flatMap((score) => Object.entries(score.compared ?? {}).map(([other, test]) => [
    `${score.name} less ${other}`, `${test.difference < 0 ? "-" : "+"}${percent(Math.abs(test.difference), 2)}`,
    test.z == null ? "–" : short(test.z, 3), test.p == null ? "–" : short(test.p, 2), String(test.num_segments),
  ]));
  if (!rows.length) return null;
  return make("div", {}, table("Matched pairs of segments", ["runs", "WER", "z", "p", "segments"], rows),
    make("p", {}, PAIRS_TEXT));
}

class Utterances {
  constructor(words) {
    this.words = words;
    this.list = make("div");
    this.choice = make("select", { id: "utterances-of", onchange: () => this.draw() },
      ...words.map((one, n) => make("option", { value: String(n) }, one.name)));
    const label = make("label", { for: "utterances-of" }, "run");
    const controls = make("div", { class: "controls" }, label, this.choice);
    this.section = make("div", {}, controls, make("p", {}, WORDS_TEXT), this.list);
    this.draw();
  }

  draw() {
    const { utterances } = this.words[Number(this.choice.value)];
    const [first, others] = [utterances.slice(0, UNFOLDED), utterances.slice(UNFOLDED)];
    const more = make("details", {}, make("summary", {}, `${others.length} more`), ...others.map(card));
    const silent = utterances.some((one) => !one.audio) ? make("p", {}, soundOf(utterances)) : null;
    this.list.replaceChildren(...[silent, ...first.map(card), others.length ? more : null].filter((part) => part));
  }
}

function soundOf(utterances) {
  const heard = utterances.filter((one) => one.audio).length;
  return heard ? `Only ${heard} of these ${utterances.length} utterances were kept with their sound.` : "None was kept with its sound.";
}

function card(one) {
  const pairs = make("div", { class: "pairs" }, ...one.pairs.map(pairOf));
  return make("div", { class: "utterance" }, make("p", {}, aboutOf(one)), audioOf(one), pairs);
}

function aboutOf({ file = "", channel = "", begin, end, part, words: count, errors }) {
  const times = begin == null ? "" : `, ${Number(begin).toFixed(2)} to ${Number(end).toFixed(2)} s`;
  const counted = `${errors} ${errors === 1 ? "error" : "errors"} in ${count} words`;
  return `${file} ${channel}${times}: ${counted}${part ? `, ${part}` : ""}`.trim();
}

function audioOf({ audio, file = "the utterance" }) {
  const about = { controls: "", preload: "none", "aria-label": `sound of ${file}` };
  return audio ? make("audio", { ...about, src: audio }) : null;
}

function pairOf([kind, said, heard, confidence]) {
  const name = KIND_NAMES[kind] ? `, ${KIND_NAMES[kind]}` : "";
  return make("span", { class: `pair ${kind}`, title: `${said || "nothing"} → ${heard || "nothing"}${name}` },
    make("span", {}, said || "∅"), make("b", {}, heard || "∅"),
    confidence == null ? null : make("small", {}, percent(confidence, 0)));
}
