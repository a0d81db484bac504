"use strict";
// What charts, lanes and tables are made of: elements, numbers, scales. All text is set as
// text, never as HTML, so that what a file says cannot become part of the page.

const PALETTE = 7;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 3", "1 2"];

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  return fill(element, attributes, children);
}

function mark(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  return fill(element, attributes, children);
}

// Words in a drawing; `more` are further attributes.
function words(text, x, y, more = {}) {
  return mark("text", { x, y, ...more }, text);
}

function line([x1, y1], [x2, y2], more = {}) {
  return mark("line", { x1, y1, x2, y2, ...more });
}

const MIDDLE = { "text-anchor": "middle" };

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function colourOf(index) {
  return `var(--c${index % PALETTE})`;
}

function dashOf(index) {
  return DASHES[index % DASHES.length];
}

// The line of a run, for a key.
function sampleOf(index) {
  const stroke = { stroke: colourOf(index), "stroke-width": 2.5, "stroke-dasharray": dashOf(index) };
  return mark("svg", { width: 28, height: 10, "aria-hidden": "true" }, line([0, 5], [28, 5], stroke));
}

function say(text) {
  document.getElementById("spoken").textContent = text;
}

// --- numbers

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS) {
    if (size >= unit && size >= 1e4) return `${trimmed(value / unit, digits)} ${letter}`;
  }
  if (size !== 0 && size < 1e-4) return value.toExponential(Math.min(2, digits - 1));
  return trimmed(value, digits);
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function percent(value, digits = 1) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return `${(100 * value).toFixed(digits)}%`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// --- scales

function scale([low, high], [from, to], logarithmic = false) {
  const map = logarithmic ? Math.log10 : (value) => value;
  const back = logarithmic ? (value) => 10 ** value : (value) => value;
  const [a, b] = [map(low), map(high)];
  const span = b - a || 1;
  const at = (value) => from + ((map(value) - a) / span) * (to - from);
  at.back = (place) => back(a + ((place - from) / (to - from)) * span);
  at.ticks = (count) => (logarithmic ? logTicks(low, high, count) : ticks(low, high, count));
  return at;
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high, count) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    for (const factor of [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length >= 2 ? found : ticks(low, high, count);
}

// --- tables

// Where a heading says it already, the title is for screen readers alone.
function table(title, head, rows, isNamed = false) {
  const cells = (name, line) => line.map((cell) => make(name, {}, cellText(cell)));
  return make(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
    make(
      "table", {}, isNamed ? null : make("caption", {}, title),
      make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cellText(cell))))),
      make("tbody", {}, ...rows.map((line) => make("tr", {}, ...cells("td", line)))),
    ),
  );
}

function cellText(cell) {
  if (cell === null || cell === undefined || cell === "") return "–";
  return typeof cell === "number" ? short(cell) : String(cell);
}
