// --- the page around the charts -------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function table(about, columns, rows) {
  const line = (tag, cells) => element("tr", {}, ...cells.map((cell) => element(tag, {}, String(cell))));
  const body = element("tbody", {}, ...rows.map((cells) => line("td", cells)));
  const box = { class: "scroll", tabindex: 0, role: "region", "aria-label": about };
  return element("div", box, element("table", {}, element("thead", {}, line("th", columns)), body));
}

function section(c) {
  c.gantt = element("canvas", {
    class: "gantt", tabindex: 0, role: "application",
    "aria-label": `Chart of ${c.title}: ${c.verdict}. Arrow keys go through the tasks.`,
  });
  c.memory = element("canvas", { class: "memory", role: "img", "aria-label": `Memory curve of ${c.label}` });
  c.hint = element("p", { class: "hint" });
  const reasons = c.reasons.map((text) => element("p", {}, text));
  const heading = charts.length > 1 ? [element("h2", {}, c.title)] : [];
  const verdict = element("p", { class: "verdict" }, c.verdict + alikeText(c));
  return element("section", {}, ...heading, verdict, ...reasons, c.gantt, c.hint, c.memory, ...ranksTable(c));
}

function alikeText(c) { // words on the numbers that are equal on every rank
  const names = ["bubble", "peak"].filter((name) => c.alike[name] && c.ranks > 1);
  return names.length ? `; ${names.join(" and ")} ${names.length > 1 ? "are" : "is"} the same on every rank` : "";
}

function ranksTable(c) { // empty if all numbers are equal on every rank
  if (c.alike.bubble && c.alike.peak && c.alike.tasks) return [];
  const rows = c.bubbles.map((bubble, r) => [`rank ${r}`, percent(bubble), num(c.peaks[r]), c.num_tasks[r]]);
  const ranks = element("details", {}, element("summary", {}, "Bubble and memory of each rank"));
  ranks.append(table("bubble and memory of each rank", ["", "bubble", "peak activations", "tasks"], rows));
  return [ranks];
}

function summary() {
  const rows = charts.map((c) => [
    c.label, time(c.makespan_s), time(c.lower_bound_s), time(c.period_s), time(c.period_lower_bound_s),
    percent(c.bubble_fraction), num(c.peak), num(c.peak_bound),
  ]);
  const columns = ["makespan", "at least", "period", "at least", "bubble", "peak activations", "at least"];
  return table("all schedules", ["schedule", ...columns], rows);
}

function legend() {
  const present = charts[0].kinds.filter((kind) => charts.some((c) => c.present.includes(kind)));
  for (const kind of present) {
    const k = charts[0].kinds.indexOf(kind), swatch = element("b", {}, kind);
    swatch.style.background = charts[0].colours[k][0];
    swatch.style.color = charts[0].ink;
    $("legend").append(element("span", {}, swatch, charts[0].kind_names[k]));
  }
  if (charts.some((c) => c.colours[0].length > 1)) $("legend").append(element("span", {}, "lighter: later chunk"));
}

function readInk() {
  const style = getComputedStyle(document.documentElement);
  for (const key of ["paper", "ink", "soft", "line", "idle", "curve", "fill"]) ink[key] = style.getPropertyValue("--" + key).trim();
  ink.idlePacked = packed(ink.idle);
}

async function start() {
  charts.push(...JSON.parse($("data").textContent));
  await Promise.all(charts.map(decode));
  end = Math.max(...charts.map((c) => c.makespan_s));
  view = [0, end];
  if (charts.length > 1) $("charts").append(summary());
  for (const c of charts) {
    $("charts").append(section(c));
    listen(c);
  }
  legend();
  readInk();
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => ACTIONS[button.dataset.do]());
  }
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readInk(); redraw(); });
  charts.forEach(draw);
  document.documentElement.dataset.ready = "yes";
}

start();
