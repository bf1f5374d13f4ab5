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
