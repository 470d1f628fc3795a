// --- pointer and keys ------------------------------------------------------------------------------------------------

function zoom(factor, at = (view[0] + view[1]) / 2) {
  const span = clamp((view[1] - view[0]) * factor, end / 1e5, end);
  const from = clamp(at - ((at - view[0]) / (view[1] - view[0])) * span, 0, end - span);
  view = [from, from + span];
  redraw();
}

function pan(seconds) {
  const span = view[1] - view[0], from = clamp(view[0] + seconds, 0, end - span);
  view = [from, from + span];
  redraw();
}

function tall(factor) {
  rowScale = clamp(rowScale * factor, 0.25, 16);
  redraw();
}

const ACTIONS = {
  in: () => zoom(0.5), out: () => zoom(2), fit: () => { rowScale = 1; zoom(1e9); },
  tall: () => tall(1.4), flat: () => tall(1 / 1.4),
};

function name(c, i) {
  const stage = c.stage[i];
  return `${stage}${c.kinds[c.kind[i]]}${c.mb[i]}`;
}

function describe(c, i) {
  const stage = c.stage[i], rank = rankOf(c, i), chunks = c.colours[0].length;
  const where = `rank ${rank}` + (chunks > 1 && !isOfPart(c, i) ? `, chunk ${chunkOf(c, i)}` : "");
  const lines = [
    `${c.kind_names[c.kind[i]]}${isOfPart(c, i) ? " (" : ` of stage ${stage} (`}${where}), microbatch ${c.mb[i]}`,
    `${time(c.start[i])} to ${time(c.end[i])} (${time(c.end[i] - c.start[i])})`,
  ];
  if (c.waits[i]) {
    const w = i + c.waits[i], other = rankOf(c, w);
    const hop = other !== rank && c.costs.transfer_s ? ` and ${time(c.costs.transfer_s)} of transfer` : "";
    lines.push(`waits for ${name(c, w)} ${other === rank ? "before it" : "on rank " + other}, until ${time(c.end[w])}${hop}`);
  } else lines.push("waits for nothing");
  return [name(c, i), lines.join("\n")];
}

function tip(title, text, x, y) {
  const box = $("tip"), bold = document.createElement("b");
  bold.textContent = title + "\n";
  box.replaceChildren(bold, text);
  box.hidden = false;
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = clamp(x + 14, 4, innerWidth - w - 4) + "px";
  box.style.top = (y + 18 + h > innerHeight ? Math.max(y - h - 12, 4) : y + 18) + "px";
}

function clear() {
  focus = null;
  $("tip").hidden = true;
  redraw();
}

function taskAt(c, r, t) { // the task that runs on rank r at t, or null
  const i = firstAfter(c.end, c.first[r], c.first[r + 1], t);
  return i < c.first[r + 1] && c.start[i] <= t ? i : null;
}

function point(c, event) {
  const edge = c.gantt.getBoundingClientRect(), x = event.clientX - edge.left;
  const r = Math.floor((event.clientY - edge.top - AXIS) / c.row), t = toT(c, x);
  if (r < 0 || r >= c.ranks) return clear();
  c.shown = r;
  const task = x >= c.left && x <= c.left + c.wide ? taskAt(c, r, t) : null;
  focus = { chart: c, task };
  if (task !== null) tip(...describe(c, task), event.clientX, event.clientY);
  else {
    const i = firstAfter(c.end, c.first[r], c.first[r + 1], t), none = i === c.first[r + 1];
    const from = i > c.first[r] ? c.end[i - 1] : 0, to = none ? c.makespan_s : c.start[i];
    const lines = x >= c.left && x <= c.left + c.wide && t <= c.makespan_s ? `idle ${time(from)} to ${time(to)} (${time(to - from)})\n` : "";
    tip(`rank ${r}`, `${lines}bubble ${percent(c.bubbles[r])}, peak ${num(c.peaks[r])} activations`, event.clientX, event.clientY);
  }
  redraw();
}

function go(c, task) { // focus a task: bring it into view, and show its tip
  focus = { chart: c, task };
  c.shown = rankOf(c, task);
  const span = view[1] - view[0];
  if (c.start[task] < view[0] || c.end[task] > view[1]) pan((c.start[task] + c.end[task]) / 2 - span / 2 - view[0]);
  const edge = c.gantt.getBoundingClientRect(), b = box(c, task);
  tip(...describe(c, task), edge.left + b.x, Math.min(edge.bottom - 10, innerHeight - 150)); // below the chart if there is room in the window
  redraw();
}

function key(c, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const now = focus && focus.chart === c ? focus.task : null;
  const rank = now === null ? c.shown : rankOf(c, now);
  const jump = (r, t) => {
    const i = clamp(firstAfter(c.end, c.first[r], c.first[r + 1], t), c.first[r], c.first[r + 1] - 1);
    go(c, i);
  };
  const near = now === null ? view[0] : (c.start[now] + c.end[now]) / 2;
  const steps = {
    ArrowRight: () => (now === null ? jump(rank, near) : now + 1 < c.first[rank + 1] && go(c, now + 1)),
    ArrowLeft: () => (now === null ? jump(rank, near) : now > c.first[rank] && go(c, now - 1)),
    ArrowDown: () => jump(now === null ? rank : Math.min(rank + 1, c.ranks - 1), near),
    ArrowUp: () => jump(now === null ? rank : Math.max(rank - 1, 0), near),
    w: () => now !== null && c.waits[now] && go(c, now + c.waits[now]),
    "+": () => zoom(0.5, near), "=": () => zoom(0.5, near), "-": () => zoom(2, near),
    0: ACTIONS.fit, Home: ACTIONS.fit, "[": ACTIONS.flat, "]": ACTIONS.tall, Escape: clear,
  };
  const step = steps[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!step) return;
  event.preventDefault();
  step();
}

function listen(c) {
  const down = new Map(); // pointer id -> x
  let moved = 0;
  const canvas = c.gantt;
  canvas.addEventListener("pointerdown", (event) => {
    down.set(event.pointerId, event.clientX);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) return point(c, event);
    const perPixel = (view[1] - view[0]) / c.wide, before = down.get(event.pointerId);
    moved += Math.abs(event.clientX - before);
    const others = [...down].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    down.set(event.pointerId, event.clientX);
    if (others.length) { // pinch
      const was = Math.abs(before - others[0]) + 1, is = Math.abs(event.clientX - others[0]) + 1;
      zoom(was / is, toT(c, (others[0] + event.clientX) / 2 - canvas.getBoundingClientRect().left));
    } else pan((before - event.clientX) * perPixel);
  });
  const up = (event) => { down.delete(event.pointerId); if (moved < 4 && event.type === "pointerup") point(c, event); };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && !down.size) clear(); });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, toT(c, event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("keydown", (event) => key(c, event));
  canvas.addEventListener("blur", clear);
  canvas.addEventListener("wheel", (event) => {
    const perPixel = (view[1] - view[0]) / c.wide;
    if (event.ctrlKey || event.metaKey) {
      zoom(Math.exp(event.deltaY / 200), toT(c, event.clientX - canvas.getBoundingClientRect().left));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) * perPixel);
    } else return;
    event.preventDefault();
  }, { passive: false });
}
