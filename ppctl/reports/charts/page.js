"use strict";
// Charts of schedules on canvases. All charts share one time axis (`view`); the data is described in ppctl/reports/charts/draw_schedule.py.
const $ = (id) => document.getElementById(id);
const AXIS = 20, MEMORY = 120, COLUMN = 96, NUMBER = 44, SMALLEST = 9, PER_LETTER = 0.61, MONO = 'ui-monospace, "DejaVu Sans Mono", monospace';
const charts = [];
let end = 0, view = [0, 1], rowScale = 1, focus = null, ink = {}, queued = false;

const num = (x) => String(Number(x.toPrecision(5)));
const UNITS = [["s", 1], ["ms", 1e3], ["us", 1e6]];
const unitOf = (x) => UNITS.find(([, per]) => x * per >= 1) ?? UNITS[x ? 2 : 0]; // the unit of the page's times
const inUnit = (x) => num(x * unitOf(end)[1]), time = (x) => `${inUnit(x)} ${unitOf(end)[0]}`;
const percent = (x) => (100 * x).toFixed(1) + "%";
const packed = (hex) => new Uint32Array(Uint8Array.of(...[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)), 255).buffer)[0];
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
// the stage of a vocabulary-parallel task is the number of its rank
const isOfPart = (c, i) => c.kind[i] >= 4; // after F, B, I, W
const rankOf = (c, i) => (isOfPart(c, i) ? c.stage[i] : c.rank_of[c.stage[i]]);
const chunkOf = (c, i) => (isOfPart(c, i) ? 0 : c.chunk_of[c.stage[i]]);

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}

const offsets = (counts) => counts.reduce((sums, n) => [...sums, sums[sums.length - 1] + n], [0]);

async function decode(c) { // lists of ranks become arrays over all tasks, or over all points of memory curves
  Object.assign(c, JSON.parse(await unpack(c.numbers)));
  const cells = c.ranks.flat().map((cell) => /^(\d+)(\D)(\d+)$/.exec(cell)), held = {};
  c.num_tasks = c.ranks.map((tasks) => tasks.length);
  c.first = offsets(c.num_tasks);
  c.stage = Uint32Array.from(cells, (cell) => cell[1]);
  c.kind = Uint8Array.from(cells, (cell) => c.kinds.indexOf(cell[2]));
  c.mb = Uint32Array.from(cells, (cell) => cell[3]);
  c.start = Float64Array.from(c.start_s.flat());
  c.end = Float64Array.from(c.end_s.flat());
  c.waits = Int32Array.from(c.waits_for, (at, i) => (at === null ? 0 : at - i)); // distance in tasks; 0: waits for nothing
  c.present = c.kinds.filter((_, k) => c.kind.includes(k));
  c.chunk_of = c.rank_of.map((rank) => (held[rank] = (held[rank] ?? -1) + 1));
  c.point = offsets(c.memory.map((points) => points.length));
  c.when = Float32Array.from(c.memory.flat(), (point) => point[0]);
  c.live = Float32Array.from(c.memory.flat(), (point) => point[1]);
  [c.bubbles, c.peaks] = [c.bubble_fraction, c.peak_activations];
  c.bubble_fraction = c.bubbles.reduce((sum, share) => sum + share, 0) / c.num_ranks;
  c.peak_bound = Math.max(...c.peak_activations_lower_bound);
  c.peak = Math.max(...c.peaks);
  c.ranks = c.num_ranks;
  c.shown = c.peaks.indexOf(c.peak); // the rank of the memory curve
  c.packed = c.colours.flat().map(packed);
  const differ = (texts) => new Set(texts).size > 1, bubbles = c.bubbles.map(percent), peaks = c.peaks.map(num);
  c.columns = [ // numbers to the right of the rows, unless they are equal on every rank
    { name: "bubble", texts: bubbles, shares: c.bubbles },
    { name: "peak", texts: peaks, shares: c.peaks.map((peak) => peak / c.peak) },
  ].filter((column) => differ(column.texts));
  c.alike = { bubble: !differ(bubbles), peak: !differ(peaks), tasks: !differ(c.num_tasks) };
}

// --- geometry -------------------------------------------------------------------------------------------------------

function layout(c) {
  const w = c.gantt.clientWidth, room = clamp(innerHeight * 0.62, 240, 900);
  c.left = 12 + 7 * Math.max(String(c.ranks - 1).length, num(c.peak).length);
  c.right = 4 + (w > 640 ? COLUMN * c.columns.length : 0);
  c.wide = Math.max(w - c.left - c.right, 20);
  c.row = clamp(clamp(room / c.ranks, c.ranks > 200 ? 2 : 4, 26) * rowScale, 2, Math.min(40, 15000 / c.ranks / devicePixelRatio));
  c.letters = lettering(c);
  c.hint.textContent = hint(c);
  size(c.gantt, w, AXIS + c.row * c.ranks);
  size(c.memory, w, MEMORY);
}

const cellHeight = (c) => (c.row > 6 ? c.row - 1.5 : c.row - (c.row > 3 ? 0.5 : 0));

// The letter size in cells, one for the chart, and whether labels have the microbatch besides the kind. Labels are drawn
// only if they fit for every kind, so no kind loses its labels while another keeps them.
function lettering(c) {
  const wide = (c.labelled_s * c.wide) / (view[1] - view[0]) - 3, high = Math.min(12, cellHeight(c) - 3);
  for (const [count, isWhole] of [[c.longest_label, true], [1, false]]) {
    const size = Math.min(high, wide / (PER_LETTER * count));
    if (size >= SMALLEST) return { size, isWhole };
  }
  return { size: 0, isWhole: false };
}

function hint(c) {
  if (c.letters.isWhole) return "";
  const how = cellHeight(c) < SMALLEST + 3 ? "Make the rows taller and zoom in" : "Zoom in";
  return `${how} to read each task's ${c.letters.size ? "" : "kind and "}microbatch.`;
}

function size(canvas, w, h) {
  canvas.width = Math.round(w * devicePixelRatio);
  canvas.height = Math.round(h * devicePixelRatio);
  canvas.style.height = h + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.fillStyle = ink.paper; // a page in dark colours is printed on white
  pen.fillRect(0, 0, w, h);
  return pen;
}

const toX = (c, t) => c.left + ((t - view[0]) / (view[1] - view[0])) * c.wide;
const toT = (c, x) => view[0] + ((x - c.left) / c.wide) * (view[1] - view[0]);

function firstAfter(values, low, high, t) { // the first index in [low, high) whose value is above t
  while (low < high) {
    const mid = (low + high) >> 1;
    if (values[mid] > t) high = mid; else low = mid + 1;
  }
  return low;
}

// --- drawing --------------------------------------------------------------------------------------------------------

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; charts.forEach(draw); });
}

function draw(c) {
  layout(c);
  const pen = c.gantt.getContext("2d");
  axis(c, pen);
  for (let r = 0; r < c.ranks; r++) row(c, pen, r);
  marks(c, pen);
  memory(c);
}

function axis(c, pen) {
  const raw = (view[1] - view[0]) / Math.max(c.wide / 90, 2), unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((k) => k * unit >= raw);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (let k = Math.ceil(view[0] / step); k * step <= view[1] * (1 + 1e-9); k++) {
    const x = toX(c, k * step);
    pen.fillStyle = ink.soft;
    const label = k * step + step > view[1] && c.wide > 200 ? time(k * step) : inUnit(k * step);
    pen.fillText(label, Math.min(x, c.left + c.wide - pen.measureText(label).width / 2), 8);
    pen.fillRect(x, AXIS - 4, 1, 3);
  }
  pen.textAlign = "left";
  eachColumn(c, (column, x) => pen.fillText(column.name, x, 8));
}

function eachColumn(c, draw) {
  if (c.right >= COLUMN) c.columns.forEach((column, i) => draw(column, c.left + c.wide + 10 + COLUMN * i));
}

function row(c, pen, r) {
  const y = AXIS + r * c.row, h = cellHeight(c), right = c.left + c.wide;
  pen.fillStyle = ink.idle;
  pen.fillRect(c.left, y, c.wide, h);
  const i = firstAfter(c.end, c.first[r], c.first[r + 1], view[0]);
  const last = firstAfter(c.start, i, c.first[r + 1], view[1]);
  if (last - i > c.wide * 0.6) stacked(c, pen, i, last, y, h);
  else {
    pen.font = c.letters.size + "px " + MONO;
    pen.textAlign = "center";
    for (let t = i; t < last; t++) {
      const x = Math.max(toX(c, c.start[t]), c.left), w = Math.min(toX(c, c.end[t]), right) - x;
      pen.fillStyle = c.colours[c.kind[t]][chunkOf(c, t)];
      pen.fillRect(x, y, Math.max(w - (w > 4 ? 1 : 0), 0.5), h);
      const label = c.kinds[c.kind[t]] + (c.letters.isWhole ? c.mb[t] : "");
      if (!c.letters.size || w < PER_LETTER * c.letters.size * label.length + 2.99) continue;
      pen.fillStyle = c.ink;
      pen.fillText(label, x + w / 2, y + h / 2 + 0.5);
    }
  }
  const every = Math.ceil(13 / c.row);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = ink.soft;
  pen.textAlign = "right";
  if (r % every === 0) pen.fillText(r, c.left - 6, y + h / 2 + 0.5);
  eachColumn(c, (column, x) => bar(pen, x, y, h, column.shares[r], column.texts[r], r % every === 0));
}

function bar(pen, x, y, h, share, text, said) {
  pen.fillStyle = ink.fill;
  pen.fillRect(x + NUMBER, y, (COLUMN - NUMBER - 10) * share, h);
  if (!said) return;
  pen.fillStyle = ink.ink;
  pen.fillText(text, x + NUMBER - 4, y + h / 2 + 0.5);
}

// A row with more tasks than pixels: each short stretch of time becomes a stack of the shares of its kinds and chunks,
// with idle time at the bottom.
function stacked(c, pen, i, last, y, h) {
  // bins are wide enough for a few tasks each, or the shares of neighbours would flicker
  const bin = clamp(Math.ceil((3 * c.wide) / (last - i)), 1, 3), n = Math.ceil(c.wide / bin);
  const high = Math.max(Math.round(h * devicePixelRatio), 4), chunks = c.colours[0].length;
  const kinds = c.kinds.length * chunks, sums = new Float32Array(kinds * n), scale = c.wide / (view[1] - view[0]) / bin;
  for (let t = i; t < last; t++) {
    const a = Math.max((c.start[t] - view[0]) * scale, 0), b = Math.min((c.end[t] - view[0]) * scale, n);
    const k = c.kind[t] * chunks + chunkOf(c, t);
    for (let x = Math.floor(a); x < b; x++) sums[x * kinds + k] += Math.min(b, x + 1) - Math.max(a, x);
  }
  const canvas = (stacked.canvas ??= document.createElement("canvas"));
  canvas.width = n;
  canvas.height = high;
  const line = canvas.getContext("2d"), image = line.createImageData(n, high), pixels = new Uint32Array(image.data.buffer);
  for (let x = 0; x < n; x++) {
    let share = 0, from = 0;
    for (let k = 0; k <= kinds; k++) {
      share += k < kinds ? sums[x * kinds + k] : 1;
      const to = Math.min(Math.round(share * high), high), colour = k < kinds ? c.packed[k] : ink.idlePacked;
      for (; from < to; from++) pixels[from * n + x] = colour;
    }
  }
  line.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(canvas, 0, 0, c.wide / bin, high, c.left, y, c.wide, h);
}

function box(c, i) {
  const r = rankOf(c, i), x = toX(c, c.start[i]);
  return { x, y: AXIS + r * c.row, w: toX(c, c.end[i]) - x, h: cellHeight(c) };
}

function marks(c, pen) {
  if (!focus || focus.chart !== c || focus.task === null) return;
  const b = box(c, focus.task);
  pen.save();
  pen.beginPath();
  pen.rect(c.left, 0, c.wide, AXIS + c.row * c.ranks);
  pen.clip();
  pen.strokeStyle = ink.ink;
  pen.lineWidth = 2;
  pen.strokeRect(b.x, b.y, Math.max(b.w, 2), b.h);
  if (c.waits[focus.task]) {
    const a = box(c, focus.task + c.waits[focus.task]);
    pen.setLineDash([4, 3]);
    pen.strokeRect(a.x, a.y, Math.max(a.w, 2), a.h);
    pen.beginPath();
    pen.moveTo(a.x + a.w, a.y + a.h / 2);
    pen.lineTo(b.x, b.y + b.h / 2);
    pen.stroke();
  }
  pen.restore();
}

function memory(c) {
  const pen = c.memory.getContext("2d"), base = MEMORY - 6, top = 24, r = c.shown, right = c.left + c.wide;
  const toY = (v) => base - ((base - top) * v) / (c.peak || 1);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.fillStyle = ink.soft;
  const others = c.alike.peak ? ", as on every rank" : ` (largest of all ranks: ${num(c.peak)})`;
  const what = c.wide > 420 ? " activations" + others : "";
  pen.fillText(`Memory of rank ${r}: peak ${num(c.peaks[r])}${what}`, c.left, 10, c.wide);
  pen.strokeStyle = ink.line;
  pen.lineWidth = 1;
  for (const v of [0, c.peak]) {
    pen.strokeRect(c.left, toY(v), c.wide, 0.01);
    pen.textAlign = "right";
    pen.fillText(num(v), c.left - 6, toY(v));
  }
  let low = firstAfter(c.when, c.point[r], c.point[r + 1], view[0]), x = c.left, v = low > c.point[r] ? c.live[low - 1] : 0;
  const shape = new Path2D(), area = new Path2D();
  shape.moveTo(x, toY(v));
  area.moveTo(x, base);
  area.lineTo(x, toY(v));
  const to = (x1, v1) => { for (const p of [shape, area]) { p.lineTo(x1, toY(v)); p.lineTo(x1, toY(v1)); } v = v1; };
  for (; low < c.point[r + 1] && c.when[low] <= view[1]; low++) {
    if (c.when[low + 1] !== c.when[low] || low + 1 === c.point[r + 1]) to(toX(c, c.when[low]), c.live[low]);
  }
  to(right, v);
  area.lineTo(right, base);
  pen.fillStyle = ink.fill;
  pen.fill(area);
  pen.strokeStyle = ink.curve;
  pen.lineWidth = 1.5;
  pen.stroke(shape);
}
