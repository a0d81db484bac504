// The points of a curve of a run, against any axis, and of several runs together.

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
  const points = values.map(([step, y]) => [valueAt(known, step), y]).filter(([x]) => x !== null);
  return points.sort((a, b) => a[0] - b[0]);
}

// Points [step, samples] as points [step, x] of another axis.
function remapped(points, run, axis) {
  const samples = axisOf(run, "samples");
  const pairs = axisOf(run, axis).map(([step, x]) => [valueAt(samples, step), x])
    .filter(([at]) => at !== null);
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
