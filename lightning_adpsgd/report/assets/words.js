// Word error rates with their intervals, tests between runs, and aligned errors to hear.

const KIND_NAMES = { S: "substituted", D: "deleted", I: "inserted" };

class Intervals {
  constructor(scores, page) {
    Object.assign(this, { scores, page });
    this.svg = mark("svg", { class: "chart", role: "img", style: "cursor:default" });
    this.figure = make("figure", { class: "wide" }, make("h3", {}, "Word error rate"), this.svg,
      make("figcaption", {}, "Point: word errors per word of the reference. Line: interval of 95 %, by a bootstrap over speakers, where there are at least two."));
  }

  draw() {
    const width = Math.max(240, this.svg.clientWidth || 480);
    const rows = [...new Set(this.scores.flatMap((score) => Object.keys(score.parts)))]
      .flatMap((part) => this.scores.filter((score) => score.parts[part]).map((score, n) => ({ part: n ? "" : part, name: score.name, ...score.parts[part] })));
    const ends = rows.flatMap((row) => [row.wer, row.wer_low, row.wer_high]).filter((end) => end != null);
    const x = scale([0, Math.max(0.001, ...ends) * 1.05], [22, width - 20]);
    let y = 6;
    this.svg.replaceChildren();
    const body = mark("g", {});
    for (const row of rows) {
      if (row.part) {
        y += 20;
        body.append(mark("text", { x: 4, y, "font-weight": "600", style: "font-weight:600" }, row.part));
      }
      y += 17;
      const colour = colourOf(this.page.indexOf(row.name));
      body.append(mark("text", { x: 8, y, class: "faint" }, `${row.name}: ${percent(row.wer, 2)}`));
      y += 9;
      if (row.wer_low != null) body.append(mark("line", { x1: x(row.wer_low), x2: x(row.wer_high), y1: y, y2: y, stroke: colour, "stroke-width": 3, class: "interval" }));
      body.append(mark("circle", { cx: x(row.wer ?? 0), cy: y, r: 5, fill: colour }));
      y += 4;
    }
    for (const value of x.ticks(width < 420 ? 4 : 8)) {
      this.svg.append(mark("line", { x1: x(value), x2: x(value), y1: 8, y2: y + 8, class: "grid" }));
      this.svg.append(mark("text", { x: x(value), y: y + 22, "text-anchor": "middle" }, percent(value, value && x.back(60) < 0.01 ? 1 : 0)));
    }
    this.svg.append(body);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${y + 28}`);
    this.svg.style.height = `${y + 28}px`;
    this.svg.setAttribute("aria-label", rows.map((row) => `${row.name}: ${percent(row.wer, 2)}`).join("; "));
  }
}

function errorTable(scores) {
  const head = ["run", "part", "words", "sub.", "del.", "ins.", "segments", "with errors", "WER", "95 % interval", "CER"];
  const rows = scores.flatMap((score) => Object.entries(score.parts).map(([part, counts]) => [
    score.name, part, String(counts.num_words), ...["substitutions", "deletions", "insertions", "num_segments", "wrong_segments"].map((name) => String(counts[name] ?? "–")),
    percent(counts.wer, 2), counts.wer_low == null ? "–" : `${percent(counts.wer_low, 2)} to ${percent(counts.wer_high, 2)}`, percent(counts.cer, 2),
  ]));
  return table("Word errors", head, rows);
}

function pairsTable(scores) {
  const rows = scores.flatMap((score) => Object.entries(score.compared ?? {}).map(([other, test]) => [
    `${score.name} less ${other}`, `${test.difference < 0 ? "−" : "+"}${percent(Math.abs(test.difference), 2)}`,
    test.z == null ? "–" : short(test.z, 3), test.p == null ? "–" : short(test.p, 2), String(test.num_segments),
  ]));
  if (!rows.length) return null;
  return make("div", {}, table("Matched pairs of segments", ["runs", "WER", "z", "p", "segments"], rows),
    make("p", {}, "p: how often a difference as large comes about if neither run is better. Above 0.05 this test tells them not apart."));
}

class Utterances {
  constructor(words) {
    this.words = words;
    this.list = make("div");
    this.choice = make("select", { id: "utterances-of", onchange: () => this.draw() },
      ...words.map((one, n) => make("option", { value: String(n) }, one.name)));
    this.section = make("div", {}, make("div", { class: "controls" }, make("label", { for: "utterances-of" }, "run"), this.choice),
      make("p", {}, "Above what was said, below what was recognised, then the recogniser's confidence. A line under a word: red substituted, amber deleted, violet inserted."),
      this.list);
    this.draw();
  }

  draw() {
    const { utterances } = this.words[Number(this.choice.value)];
    this.list.replaceChildren(...utterances.map(card));
  }
}

function card(one) {
  const times = one.begin == null ? "" : `, ${one.begin.toFixed(2)} to ${one.end.toFixed(2)} s`;
  const about = `${one.file ?? ""} ${one.channel ?? ""}${times}: ${one.errors} ${one.errors === 1 ? "error" : "errors"} in ${one.words} words${one.part ? `, ${one.part}` : ""}`;
  const audio = one.audio ? make("audio", { controls: "", preload: "none", src: one.audio, "aria-label": `sound of ${one.file ?? "the utterance"}` }) : null;
  return make("div", { class: "utterance" }, make("p", {}, about.trim()), audio, make("div", { class: "pairs" }, ...one.pairs.map(pairOf)));
}

function pairOf([kind, said, heard, confidence]) {
  const name = KIND_NAMES[kind] ? `, ${KIND_NAMES[kind]}` : "";
  return make("span", { class: `pair ${kind}`, title: `${said || "nothing"} → ${heard || "nothing"}${name}` },
    make("span", {}, said || "∅"), make("b", {}, heard || "∅"),
    confidence == null ? null : make("small", {}, percent(confidence, 0)));
}
