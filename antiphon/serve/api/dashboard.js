// Drawings of the dashboard: SVG made anew from each reading, as wide as its place. Colours and style are those of the
// planner's pages: Okabe and Ito's palette, kept apart by colour-blind readers, on white and on dark grey.
"use strict";

const COLOURS = ["#0088cc", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#999999"];
const HEAT = ["#2c7bb6", "#6baed6", "#abd9e9", "#d5ecd4", "#ffffbf", "#fed98e", "#fdae61", "#ea633e", "#d7191c"];
const MARK = "#d62728", IDLE = "rgba(150,150,150,0.25)", SENDING = "#7f7f7f", SAMPLING = "#56b4e9";
const CHARACTER = 6.9;  // pixels, on average and generously

function element(name, attributes, words) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

function picture(place, height, title) {
  const width = Math.max(300, place.clientWidth);
  const svg = element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  place.replaceChildren(svg);
  return [svg, width];
}

function number(value) {
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 1 ? 1 : 2;
  return value.toLocaleString("en", {maximumFractionDigits: digits});
}

function plural(count, word) { return `${number(count)} ${word}${count === 1 ? "" : "s"}`; }

function percent(value) { return `${number(100 * value)}%`; }

function duration(us) { return us < 1000 ? `${number(us)} µs` : us < 1e6 ? `${number(us / 1000)} ms` : `${number(us / 1e6)} s`; }

function legend(place, named) {
  place.replaceChildren(...Object.entries(named).map(([name, colour]) => {
    const words = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = colour;
    words.append(swatch, name);
    return words;
  }));
}

function ticks(most, count) {  // round numbers from 0 to at least `most`
  const step = most / count, power = 10 ** Math.floor(Math.log10(step));
  const round = [1, 2, 5, 10].find(factor => factor * power >= step * (1 - 1e-9)) * power;
  return Array.from({length: Math.ceil(most / round - 1e-9) + 1}, (_, index) => index * round);
}

// Curves over the last minutes: `series` is name -> [colour, values]; `marks` are [seconds ago, words].
function drawHistory(place, title, ago, series, words, most, marks) {
  const height = 200, bottom = height - 30, top = 12, left = 52;
  const [svg, width] = picture(place, height, title);
  const values = Object.values(series).flatMap(([, list]) => list);
  const heights = ticks(most || Math.max(1, ...values), 4), highest = heights[heights.length - 1];
  const x = seconds => left + (width - left - 8) * (1 - seconds / 300), y = value => bottom - (bottom - top) * value / highest;
  for (const value of heights) {
    svg.append(element("line", {x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid"}));
    svg.append(element("text", {x: left - 8, y: y(value) + 4, "text-anchor": "end", class: "soft"}, words(value)));
  }
  for (const minutes of [5, 4, 3, 2, 1, 0]) {
    const text = minutes ? `−${minutes} min` : "now";
    svg.append(element("text", {x: x(60 * minutes), y: bottom + 20, "text-anchor": minutes ? "middle" : "end", class: "soft"}, text));
  }
  for (const [seconds, tip] of marks) if (seconds < 300) {
    const at = {x1: x(seconds), x2: x(seconds), y1: top, y2: bottom};
    svg.append(element("line", {...at, stroke: MARK, "stroke-dasharray": "6 4"}));
    svg.append(element("line", {...at, stroke: "transparent", "stroke-width": 12, "data-tip": tip}));
  }
  for (const [colour, list] of Object.values(series).reverse()) {  // the first one on top
    const points = list.map((value, index) => `${x(ago[index]).toFixed(1)},${y(Math.min(value, highest)).toFixed(1)}`);
    svg.append(element("polyline", {points: points.join(" "), fill: "none", stroke: colour, "stroke-width": 2, "stroke-linejoin": "round"}));
  }
}

// The part of the last steps that is to be drawn, in microseconds.
function stepWindow(steps, zoom) {
  const last = steps.steps[steps.steps.length - 1];
  if (zoom === "steps") return [0, steps.length_us];
  const [start, end] = [last.start_us, last.start_us + last.length_us];
  if (zoom === "step") return [start, end];
  const spans = steps.workers.flatMap(worker => worker.kinds.map((kind, index) =>
    [worker.layers[index], worker.starts_us[index], worker.starts_us[index] + worker.lengths_us[index], kind]));
  const inside = spans.filter(([layer, from, , kind]) => layer >= 0 && from >= start && kind !== "waiting");
  if (!inside.length) return [start, end];
  const highest = Math.max(...inside.map(span => span[0])), first = Math.max(0, Math.floor(highest / 2) - 1);
  const shown = inside.filter(([layer]) => layer >= first && layer < first + 4);
  return shown.length ? [Math.min(...shown.map(span => span[1])), Math.max(...shown.map(span => span[2]))] : [start, end];
}

function colourOf(kind, microBatch) {
  return kind === "waiting" ? IDLE : kind === "sampling" ? SAMPLING : kind.startsWith("to ") ? SENDING : COLOURS[microBatch % 5];
}

// Who did what when. Numbers in bars are layers.
function drawSteps(place, steps, zoom) {
  const [from, to] = stepWindow(steps, zoom), row = 30, top = 4;
  const height = top + row * steps.workers.length + 28, bottom = height - 28;
  const [svg, width] = picture(place, height, "What each worker did in the last steps");
  const left = 14 + CHARACTER * Math.max(...steps.workers.map(worker => worker.name.length));
  const x = us => left + (width - left - 8) * (us - from) / (to - from);
  for (const value of ticks(to - from, Math.max(2, Math.floor(width / 130))).filter(value => value <= to - from)) {
    const at = x(from + value);
    svg.append(element("line", {x1: at, x2: at, y1: top, y2: bottom, class: "grid"}));
    svg.append(element("text", {x: at, y: bottom + 18, "text-anchor": value ? "middle" : "start", class: "soft"}, duration(value)));
  }
  steps.workers.forEach((worker, line) => {
    const y = top + row * line + 4;
    svg.append(element("text", {x: left - 8, y: y + 16, "text-anchor": "end"}, worker.name));
    worker.kinds.forEach((kind, index) => {
      const start = Math.max(from, worker.starts_us[index]), end = Math.min(to, worker.starts_us[index] + worker.lengths_us[index]);
      if (end > start) drawSpan(svg, worker, index, x(start), x(end), y, row - 8);
    });
  });
}

function drawSpan(svg, worker, index, start, end, y, height) {
  const kind = worker.kinds[index], layer = worker.layers[index], batch = worker.micro_batches[index];
  const where = layer < 0 ? "" : `\nlayer ${layer}, micro-batch ${batch + 1}, ${number(worker.rows[index])} rows`;
  const tip = `${worker.name}: ${kind}, ${duration(worker.lengths_us[index])}${where}`;
  const size = {x: start, y, width: Math.max(0.6, end - start), height};
  svg.append(element("rect", {...size, fill: colourOf(kind, Math.max(0, batch)), "data-tip": tip}));
  const words = String(layer);
  if ((kind === "attention" || kind === "experts") && layer >= 0 && end - start > CHARACTER * words.length + 4) {
    svg.append(element("text", {x: (start + end) / 2, y: y + height / 2 + 4, "text-anchor": "middle", class: "on"}, words));
  }
}

function stepsLegend(steps) {
  const batches = new Set(steps.workers.flatMap(worker => worker.micro_batches.filter(batch => batch >= 0)));
  const kinds = new Set(steps.workers.flatMap(worker => worker.kinds)), named = {};
  for (const batch of [...batches].sort((a, b) => a - b)) named[`micro-batch ${batch + 1}`] = COLOURS[batch % 5];
  if (kinds.has("to experts") || kinds.has("to attention")) named.sending = SENDING;
  if (kinds.has("waiting")) named["waiting for experts"] = IDLE;
  if (kinds.has("sampling")) named["head and sampling"] = SAMPLING;
  return named;
}

// Cells of `values[row][column]` from 0 to 2 times the mean; null leaves a cell empty.
function drawHeat(place, title, rows, columns, values, tip, rowName, columnName) {
  const left = 14 + CHARACTER * Math.max(rowName.length, ...rows.map(row => row.length)), top = 22;
  const high = Math.max(7, Math.min(30, 420 / rows.length)), height = top + high * rows.length + 56;
  const [svg, width] = picture(place, height, title);
  const wide = (width - left - 8) / columns.length;
  svg.append(element("text", {x: left - 8, y: 14, "text-anchor": "end", class: "soft"}, rowName));
  const every = Math.ceil(16 / high), widest = CHARACTER * (1 + Math.max(...columns.map(column => column.length)));
  rows.forEach((row, line) => {
    if (line % every === 0) svg.append(element("text", {x: left - 8, y: top + high * (line + 0.5) + 4, "text-anchor": "end"}, row));
    values[line].forEach((value, column) => {
      if (value === null) return;
      const shade = HEAT[Math.min(HEAT.length - 1, Math.floor(value / 2 * HEAT.length))];
      const size = {x: left + wide * column, y: top + high * line, width: Math.max(0.5, wide - 0.6), height: high - 0.6};
      svg.append(element("rect", {...size, fill: shade, "data-tip": tip(line, column)}));
    });
  });
  const skip = Math.ceil(widest / wide);
  columns.forEach((column, index) => {
    if (index % skip === 0) svg.append(element("text", {x: left + wide * (index + 0.5), y: 14, "text-anchor": "middle", class: "soft"}, column));
  });
  scaleBar(svg, left, top + high * rows.length + 30);
  svg.append(element("text", {x: left + wide * columns.length / 2, y: top + high * rows.length + 16, "text-anchor": "middle", class: "soft"}, columnName));
}

function scaleBar(svg, left, top) {
  svg.append(element("text", {x: left, y: top + 13, class: "soft"}, "0"));
  HEAT.forEach((colour, index) => svg.append(element("rect", {x: left + 14 + 15 * index, y: top + 2, width: 15, height: 13, fill: colour})));
  svg.append(element("text", {x: left + 20 + 15 * HEAT.length, y: top + 13, class: "soft"}, "2 × mean"));
}

// The dashboard: asks for a reading once a second, fills the page from it, and says when the server does not answer.

const EVERY_MS = 1000, PATIENCE_MS = 6000;
const EVENT_COLOURS = {ready: "#009e73", "going on": "#009e73", lost: MARK, failed: "#d55e00", standstill: "#e69f00", placement: "#0088cc"};
const place = name => document.getElementById(name);
let latest = null, answeredAt = null, zoom = null;

function cards(now, history, reading) {
  const last = list => list.length ? list[list.length - 1] : 0;
  const share = value => value === null ? "–" : percent(value);
  const shown = [
    [number(now.num_requests_running), "requests running"],
    [number(now.num_requests_waiting), "requests waiting"],
    [number(last(history.answers_per_s)), "answers/s"],
    [number(last(history.generation_tokens_per_s)), "tokens/s generated"],
    [number(last(history.prompt_tokens_per_s)), "prompt tokens/s"],
    [percent(now.attention_idle_ratio), "attention waits"],
    [share(now.expert_idle_ratio), "experts wait"],
    [percent(last(history.exposed_ratio)), "exposed communication"],
    [percent(now.kv_cache_usage_ratio), "KV cache in use"],
    [share(now.prefix_cache_hit_ratio), "prompts from the cache"],
  ];
  for (const pool of reading.pools) {
    shown.push([`${number(pool.num_requests_running)} + ${number(pool.num_requests_waiting)}`, `${pool.name} runs + waits`]);
    shown.push([percent(pool.kv_cache_usage_ratio), `KV cache of ${pool.name}`]);
    if (pool.name === "decode") shown.push([number(pool.num_requests_arriving), "requests arriving from prefill"]);
  }
  if (reading.handovers !== null) {
    shown.push([number(reading.handovers.num_done), "hand-overs"]);
    shown.push([`${number(reading.handovers.num_failed)} / ${number(reading.handovers.num_recomputed)}`, "failed / computed by decode"]);
  }
  place("cards").replaceChildren(...shown.map(([value, name]) => {
    const card = document.createElement("div"), strong = document.createElement("b"), words = document.createElement("span");
    card.className = "card";
    strong.textContent = value;
    words.textContent = name;
    card.append(strong, words);
    return card;
  }));
}

function histories(reading) {
  const history = reading.history, hasExperts = reading.now.expert_idle_ratio !== null;
  const marks = reading.events.filter(event => event.kind === "lost" || event.kind === "placement")
    .map(event => [reading.time_s - event.time_s, `${event.worker} ${event.kind}: ${event.text}`.trim()]);
  const tokens = {generated: [COLOURS[0], history.generation_tokens_per_s], "of prompts": [COLOURS[1], history.prompt_tokens_per_s]};
  const idle = {"attention waits": [COLOURS[0], history.attention_idle_ratio]};
  if (hasExperts) idle["experts wait"] = [COLOURS[1], history.expert_idle_ratio];
  if (hasExperts) idle["exposed communication"] = [COLOURS[4], history.exposed_ratio];
  for (const [name, series, words, most] of [["tokens", tokens, number, 0], ["idle", idle, percent, 1]]) {
    legend(place(`${name}-legend`), Object.fromEntries(Object.entries(series).map(([key, [colour]]) => [key, colour])));
    drawHistory(place(name), name, history.ago_s, series, words, most, marks);
  }
}

function lastSteps(reading) {
  const steps = reading.last_steps;
  place("zoom").hidden = steps === null;
  if (steps === null) {
    place("steps-words").textContent = "No step yet. The drawing comes with the first request.";
    place("steps").replaceChildren();
    place("steps-legend").replaceChildren();
    return;
  }
  if (zoom === null) {
    const highest = Math.max(...steps.workers.flatMap(worker => worker.layers));
    place("zoom").value = zoom = highest * reading.num_micro_batches > 24 ? "layers" : "step";
  }
  const last = steps.steps[steps.steps.length - 1], gone = steps.left_out.join(", ");
  const ended = steps.ended_s_ago < 2 ? "just now" : `${number(Math.round(steps.ended_s_ago))} s ago`;
  place("steps-words").textContent = `Step ${number(last.number)} took ${duration(last.length_us)} and ended ${ended}. ` +
    `Numbers are layers, colours micro-batches.${gone ? ` Not drawn: ${gone}.` : ""}`;
  legend(place("steps-legend"), stepsLegend(steps));
  drawSteps(place("steps"), steps, zoom);
}

function chosenLayer(layers) {
  const names = layers.map(layer => String(layer.layer)), select = place("layer");
  if (names.join() !== [...select.options].map(option => option.value).join()) {
    const before = select.value;
    select.replaceChildren(...names.map(name => new Option(`layer ${name}`, name)));
    if (names.includes(before)) select.value = before;
  }
  select.hidden = !names.length;
  return layers[Math.max(0, select.selectedIndex)];
}

function load(reading) {
  const layers = reading.load, words = place("load-words"), layer = chosenLayer(layers);
  if (layer === undefined) {
    const apart = reading.now.expert_idle_ratio !== null;
    words.textContent = apart ? "No rows yet. The drawing comes with the first requests." : "Each worker holds all experts here, so there is nothing to balance.";
    place("load").replaceChildren();
    return;
  }
  const lowest = layers.reduce((low, each) => each.balancedness < low.balancedness ? each : low);
  words.textContent = `Rows of each expert lately, beside the mean of the layer's experts. Balancedness of the layer ` +
    `(mean / maximum of its workers): ${number(layer.balancedness)}; lowest: ${number(lowest.balancedness)} in layer ${lowest.layer}.`;
  const experts = [...new Set(layer.workers.flatMap(worker => worker.experts))].sort((a, b) => a - b);
  const total = list => list.reduce((sum, rows) => sum + rows, 0);
  const mean = total(layer.workers.map(worker => total(worker.rows))) / experts.length;
  const rowsOf = layer.workers.map(worker => new Map(worker.experts.map((expert, index) => [expert, worker.rows[index]])));
  const phases = layer.phases.map(each => ({name: each.phase === "prefill" ? "prompts" : "answers", rows: each.rows, mean: total(each.rows) / each.rows.length || 1}));
  const ofPhase = (each, expert) => `layer ${layer.layer}, expert ${expert}: ${number(each.rows[expert])} rows of ${each.name}, ${number(each.rows[expert] / each.mean)} × the mean of ${each.name}`;
  const tip = (row, column) => row >= rowsOf.length ? ofPhase(phases[row - rowsOf.length], experts[column]) : `layer ${layer.layer}, expert ${experts[column]} on ${layer.workers[row].name}: ` +
    `${number(rowsOf[row].get(experts[column]))} rows, ${number(rowsOf[row].get(experts[column]) / (mean || 1))} × the mean\nall of this worker: ${number(total(layer.workers[row].rows))} rows`;
  drawHeat(place("load"), "Rows of each expert on each worker", [...layer.workers, ...phases].map(each => each.name), experts.map(String),
    [...rowsOf.map(held => experts.map(expert => held.has(expert) ? held.get(expert) / (mean || 1) : null)),
      ...phases.map(each => experts.map(expert => each.rows[expert] / each.mean))], tip, "", "expert");
}

function workersAndEvents(reading) {
  const missing = reading.workers.filter(worker => worker.state !== "ready");
  place("workers-words").textContent = `${reading.workers.length - missing.length} of ${reading.workers.length} workers are ready` +
    (missing.length ? `: ${missing.map(worker => `${worker.name} ${worker.state}`).join("; ")}.` : ".") +
    ` ${plural(reading.now.num_worker_restarts, "restart")} and ${plural(reading.now.num_placement_changes, "placement change")} since the start.`;
  place("events").replaceChildren(...reading.events.slice(-12).reverse().map(event => {
    const row = document.createElement("tr"), dot = document.createElement("i");
    const when = new Date(1000 * event.time_s).toLocaleTimeString("en-GB");
    dot.style.background = EVENT_COLOURS[event.kind];
    for (const words of [when, event.worker || event.kind, event.worker ? `${event.kind}: ${event.text}` : event.text]) {
      const cell = document.createElement("td");
      cell.textContent = words;
      row.append(cell);
    }
    row.firstChild.prepend(dot);
    return row;
  }));
}

function draw() {
  const reading = latest;
  if (reading === null) return;
  place("main").hidden = false;
  document.title = place("title").textContent = `Antiphon: ${reading.model}`;
  const hours = reading.up_s / 3600;
  place("facts").textContent = `Version ${reading.version}, layout ${reading.layout}, up ${hours < 1 ? `${number(Math.floor(reading.up_s / 60))} min` : `${number(hours)} h`}, ${number(reading.now.num_steps)} steps`;
  place("status").textContent = reading.status === "ok" ? "Serving" : reading.status;
  place("status").className = reading.status === "ok" ? "status" : "status bad";
  cards(reading.now, reading.history, reading);
  histories(reading);
  lastSteps(reading);
  load(reading);
  workersAndEvents(reading);
}

function say(words) {
  place("alert").hidden = !words;
  place("alert").textContent = words;
  document.body.classList.toggle("stale", Boolean(words));
}

function askForKey(wasWrong) {
  place("login").hidden = false;
  place("login-words").textContent = wasWrong ? "The server does not know this key." : "This server asks for an API key.";
}

async function poll() {
  const key = sessionStorage.getItem("key");
  try {
    const headers = key ? {authorization: `Bearer ${key}`} : {};
    const answer = await fetch("dashboard/data", {headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
    if (answer.status === 401) return askForKey(Boolean(key));
    if (!answer.ok) throw new Error(`it answers ${answer.status}`);
    latest = await answer.json();
    answeredAt = new Date();
    place("login").hidden = true;
    say("");
  } catch (error) {
    const since = answeredAt ? `since ${answeredAt.toLocaleTimeString("en-GB")}. The page shows what it said then` : "yet";
    return say(`The server at ${location.host} has not answered ${since}. Asking again every second.`);
  }
  draw();
}

async function pollForEver() {
  for (;;) {
    if (!document.hidden && place("login").hidden) await poll();
    await new Promise(done => setTimeout(done, EVERY_MS));
  }
}

place("login").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("key", place("key").value);
  place("login").hidden = true;
  poll();
});
place("layer").addEventListener("change", draw);
place("zoom").addEventListener("change", event => { zoom = event.target.value; draw(); });
addEventListener("resize", draw);
document.addEventListener("pointermove", event => {
  const tip = place("tip");
  tip.textContent = (event.target.dataset || {}).tip || "";
  tip.style.display = tip.textContent ? "block" : "none";
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 12)}px`;
});
pollForEver();
