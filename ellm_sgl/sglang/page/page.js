// The live page: asks once a second while somebody looks, and draws. All text is put in as text.
"use strict";

const EVERY_MS = 1000, KEPT_MS = 120000, ROWS = 32;
const $ = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const ms = (value) => (value >= 1000 ? `${number(value / 1000, 1)} s` : `${number(value, value < 10 ? 1 : 0)} ms`);
const percent = (share) => `${number(100 * share)} %`;
const mib = (bytes) => `${number(bytes / 2 ** 20)} MiB`;
const say = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };
const make = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};

const history = [];
const rows = new Map();
let held = false, everything = false, timer = 0, asking = false, latest = null, offered = false;

// -- the server's API key, where it has one -------------------------------------------------------

const KEPT_AS = "ellm-api-key";
let apiKey = "", locked = false;
try { apiKey = sessionStorage.getItem(KEPT_AS) ?? ""; } catch { /* the browser keeps nothing */ }

const bearer = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

function lock() {
  if (apiKey) refuseKey();
  keep("");
  locked = true;
  $("lock").hidden = false;
  $("hold").hidden = true;
  link("lost", "The server wants its API key");
  if (document.activeElement === document.body) $("api-key").focus();
}

function unlock() {
  if ($("lock").hidden) return;
  keep(apiKey);
  $("lock").hidden = true;
  $("hold").hidden = false;
  $("api-key").value = "";
}

function refuseKey() {
  say("lock-outcome", "The server does not take this key.");
}

function keep(key) {
  apiKey = key;
  try { sessionStorage.setItem(KEPT_AS, key); } catch { /* it is asked for again */ }
}

// -- asking -------------------------------------------------------------------------------------

class WantsKey extends Error {}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", headers: bearer(apiKey), signal: AbortSignal.timeout(20000) });
  if (answer.status === 401) throw new WantsKey();
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

async function look() {
  clearTimeout(timer);
  if (held || document.hidden || asking || locked) return;
  asking = true;
  try {
    const [state, seen] = (await Promise.all([ask("state"), ask("requests")])).map(ofReplica);
    latest = { state, seen };
    unlock();
    draw(state, seen);
    link("live", "Live");
    policies();
  } catch (error) {
    if (error instanceof WantsKey) lock();
    else link("lost", error.name === "TypeError" ? "No answer; trying again" : error.message);
  } finally {
    asking = false;
    clearTimeout(timer);
    timer = setTimeout(look, EVERY_MS);
  }
}

// What the chosen one of several schedulers says (--data-parallel-size).
function ofReplica(answer) {
  const every = answer.replicas ?? [], select = $("replica");
  select.hidden = !every.length;
  for (const { replica } of every.slice(select.options.length)) {
    select.append(new Option(`replica ${replica}`, replica));
  }
  while (select.options.length > every.length) select.lastChild.remove();
  return every[select.selectedIndex] ?? answer;
}

function link(state, text) {
  $("link").dataset.state = state;
  say("link-text", text);
}

// -- drawing ------------------------------------------------------------------------------------

function draw(state, seen) {
  say("policy-name", state.policy.name);
  say("mode", `mode ${state.mode}`);
  figures(state, seen);
  memory(state);
  requests(seen);
  decisions(state, seen);
  controls(state);
}

function figures(state, seen) {
  const decoding = seen.requests.filter((r) => r.state === "decoding" && r.tpot_ms !== null);
  const tpot = decoding.length ? decoding.reduce((sum, r) => sum + r.tpot_ms, 0) / decoding.length : null;
  const busy = seen.requests.length > 0, steps = seen.steps;
  const missed = decoding.filter((r) => r.tpot_ms > slo(r, seen)).length;
  const prompts = seen.counts.prefilling;
  say("decoding", number(seen.counts.decoding));
  say("batch", busy ? `batch ${number(steps.batch, 1)}` + (prompts ? `, ${number(prompts)} prompt` : "") : "");
  say("paused", number(seen.counts.paused));
  say("waiting", number(state.waiting));
  say("cached", percent(state.cached_ratio_mean));
  say("ratio", busy ? `r ${number(seen.uncached_ratio, 2)}` : "");
  say("rate", busy ? number(steps.tokens_per_s) : "–");
  say("tpot", tpot === null ? "–" : ms(tpot));
  const limits = seen.tpot_slo_ms === null ? "no SLO" : `SLO ${ms(seen.tpot_slo_ms)}`;
  say("slo", missed ? `${number(missed)} over, ${limits}` : limits);
  $("slo").classList.toggle("over", missed > 0);
  say("step", busy && steps.total ? ms(steps.mean_ms) : "–");
  say("predicted", busy && steps.total ? `predicted ${ms(steps.predicted_ms)}` : "");
}

const slo = (request, seen) => Math.min(request.tpot_slo_ms ?? Infinity, seen.tpot_slo_ms ?? Infinity);

function memory(state) {
  const tokens = (units) => (units * state.block_tokens) / state.layer_groups;
  const limit = tokens(state.device_units_total), free = tokens(state.device_units_free);
  const most = Math.max(state.resize.most_tokens, limit);
  const used = limit - free;
  meter("device", [used / most, free / most, 1 - limit / most],
    `Device: ${number(used)} of ${number(limit)} tokens of KV in use`);
  say("device-text", `${number(used)} of ${number(limit)} tokens`);
  const host = tokens(state.host_units_total), kept = host - tokens(state.host_units_free);
  document.querySelectorAll(".of-host").forEach((part) => { part.hidden = host === 0; });
  meter("host", [host ? kept / host : 0, 0], `Host: copies of ${number(kept)} of ${number(host)} tokens`);
  say("host-text", `${number(kept)} of ${number(host)} tokens`);
  const outcome = state.resize.outcome;
  say("memory-note", `${mib(state.device_bytes_committed)} committed of ${mib(state.device_bytes_reserved)}`
    + `; a step takes ${mib(state.bytes.activations)}`
    + (state.bytes.left === null ? "" : `, ${mib(state.bytes.left)} left`)
    + (outcome && outcome !== "applied" ? `; resize: ${outcome}` : ""));
  const mapped = Math.max(state.pool.mapped_tokens, 1);
  history.push([limit ? used / limit : 0, host ? kept / host : null, state.uncached_tokens / mapped, performance.now()]);
  while (history.at(-1)[3] - history[0][3] > KEPT_MS) history.shift();
  plot();
}

function meter(id, shares, label) {
  [...$(id).children].forEach((part, i) => { part.style.width = `${100 * Math.max(shares[i], 0)}%`; });
  $(id).setAttribute("aria-label", label);
}

function plot() {
  const canvas = $("history"), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const style = getComputedStyle(document.documentElement), pen = canvas.getContext("2d");
  const colour = (name) => style.getPropertyValue(name).trim();
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  if (!history.length) return;
  const now = history.at(-1)[3], x = (point) => width - ((now - point[3]) * (width - 34)) / KEPT_MS;
  const y = (share) => height - 6 - share * (height - 12);
  pen.font = "11px system-ui, sans-serif";
  for (const share of [0, 0.5, 1]) {
    pen.strokeStyle = colour("--grid");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(34, y(share));
    pen.lineTo(width, y(share));
    pen.stroke();
    pen.fillStyle = colour("--muted");
    pen.fillText(number(100 * share), 0, y(share) + 4);
  }
  ["--cached", "--host", "--lost"].forEach((name, series) => {
    const points = history.map((point) => [x(point), point[series]]).filter((p) => p[1] !== null);
    if (points.length < 2) return;
    pen.strokeStyle = pen.fillStyle = colour(name);
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    pen.beginPath();
    points.forEach(([px, share], i) => (i ? pen.lineTo(px, y(share)) : pen.moveTo(px, y(share))));
    pen.stroke();
    if (series) return;
    pen.lineTo(points.at(-1)[0], y(0));
    pen.lineTo(points[0][0], y(0));
    pen.globalAlpha = 0.12;
    pen.fill();
    pen.globalAlpha = 1;
  });
  const [device, host, lacking] = history.at(-1);
  canvas.setAttribute("aria-label", `Memory over the last two minutes; now ${percent(device)} of the device`
    + (host === null ? "" : `, ${percent(host)} of the host`) + `, ${percent(lacking)} of tokens lack KV`);
}

function requests(seen) {
  const shown = everything ? seen.requests : seen.requests.slice(0, ROWS);
  const longest = Math.max(1, ...shown.map((r) => r.tokens));
  const list = $("list"), now = new Set();
  shown.forEach((request, place) => {
    let key = request.rid;
    while (now.has(key)) key += "+";
    now.add(key);
    if (!rows.has(key)) rows.set(key, row());
    const parts = rows.get(key);
    fill(parts, request, seen, longest);
    if (list.children[place] !== parts.item) list.insertBefore(parts.item, list.children[place] ?? null);
  });
  for (const [key, parts] of rows) {
    if (!now.has(key)) { parts.item.remove(); rows.delete(key); }
  }
  $("none").hidden = seen.requests.length > 0;
  $("all").hidden = seen.requests.length <= ROWS;
  say("all", everything ? `Show the first ${ROWS}` : `Show all ${number(seen.requests.length)}`);
  say("left-out", seen.left_out ? `and ${number(seen.left_out)} more that are not shown` : "");
}

function row() {
  const item = make("li"), track = make("div", "track"), bar = make("div", "bar");
  const [rid, state, amount, pace] = ["rid code", "state", "amount", "pace"].map((name) => make("span", name));
  bar.setAttribute("role", "img");
  track.append(bar);
  item.append(rid, state, track, amount, pace);
  return { item, rid, state, bar, amount, pace };
}

function fill(parts, request, seen, longest) {
  const of = (kind) => request.spans.reduce((sum, [n, k]) => sum + (seen.kinds[k] === kind ? n : 0), 0);
  const cached = of("cached"), host = of("host"), lost = of("lost");
  parts.rid.textContent = request.rid.slice(0, 12);
  parts.rid.title = `${request.rid}, priority ${request.priority}`;
  parts.state.textContent = request.state;
  parts.state.dataset.state = request.state;
  parts.bar.style.width = `${(100 * request.tokens) / longest}%`;
  while (parts.bar.children.length > request.spans.length) parts.bar.lastChild.remove();
  request.spans.forEach(([tokens, kind], i) => {
    const span = parts.bar.children[i] ?? parts.bar.appendChild(make("i"));
    span.className = seen.kinds[kind];
    span.style.flexGrow = tokens;
  });
  const whole = request.spans.length ? `${number(cached)} of ${number(request.tokens)} tokens cached` : "not begun";
  parts.bar.setAttribute("aria-label", whole + (host ? `, ${number(host)} on the host` : "")
    + (lost ? `, ${number(lost)} to recompute` : ""));
  parts.amount.textContent = request.spans.length
    ? `${number(cached)} / ${number(request.tokens)} cached` : `${number(request.tokens)} tokens`;
  const limit = slo(request, seen), over = request.tpot_ms !== null && request.tpot_ms > limit;
  const prompt = request.prompt;
  if (prompt) parts.pace.textContent = `${percent(prompt.done / request.tokens)} of prompt, ${ms(prompt.left_ms)} left`;
  else parts.pace.textContent = request.tpot_ms === null ? "" : ms(request.tpot_ms)
    + (Number.isFinite(limit) ? ` ${over ? ">" : "≤"} ${ms(limit)}` : "");
  parts.pace.classList.toggle("over", over);
  parts.pace.title = prompt ? `${number(prompt.done)} tokens done`
    + (prompt.tokens_per_s === null ? "" : `, ${number(prompt.tokens_per_s)} a second`)
    : "time per output token" + (Number.isFinite(limit) ? ", and its SLO" : "");
}

function decisions(state, seen) {
  const body = $("decisions"), lines = seen.decisions.slice(0, 10);
  while (body.children.length > lines.length) body.lastChild.remove();
  lines.forEach((made, i) => {
    const line = body.children[i] ?? body.appendChild(make("tr"));
    const cells = [ms(made.ago_ms), ms(made.took_ms) + (made.replaced ? " *" : ""), made.running, made.waiting, made.admitted, made.paused,
      number(made.uncached_ratio, 2), `${made.swap_layers}:${made.recompute_layers}`, percent(made.delta)];
    cells.forEach((text, c) => { (line.children[c] ?? line.appendChild(make("td"))).textContent = text; });
    line.className = made.replaced ? "replaced" : "";
    line.title = made.replaced ? "the policy's answer was replaced" : "";
  });
  const kinds = Object.entries(state.policy.fallbacks ?? {});
  say("decided", `${number(state.policy.decisions ?? 0)} since it was chosen`);
  say("fallbacks", kinds.length ? kinds.map(([kind, n]) => `${kind}: ${number(n)}`).join(", ") + " (* above)" : "none");
  const totals = {
    "evicted units": state.evicted_units_total, "fetched units": state.fetched_units_total,
    "recomputed tokens": state.recomputed_tokens_total, "back to stay": state.restored_units_total,
    "pauses": state.pauses_total, "retractions": state.retractions_total,
    "stalled": ms(state.swap_stall_ms_total), "steps": state.steps_total,
  };
  Object.entries(totals).forEach(([name, value], i) => {
    const part = $("totals").children[i] ?? $("totals").appendChild(make("div"));
    if (!part.children.length) part.append(make("dt", "", name), make("dd"));
    part.lastChild.textContent = typeof value === "number" ? number(value) : value;
  });
}

// -- changing it --------------------------------------------------------------------------------

function controls(state) {
  const pool = $("pool"), { most_tokens: most, wanted_tokens: wanted } = state.resize;
  pool.min = state.block_tokens;
  // The server rounds down to whole blocks.
  pool.step = 1;
  pool.max = most;
  say("pool-most", `(at most ${number(most)})`);
  if (document.activeElement !== pool && !pool.dataset.touched) pool.value = wanted;
  const select = $("policy");
  if (!select.dataset.touched && document.activeElement !== select) select.value = state.policy.name;
}

async function policies() {
  if (offered) return;
  offered = true;
  try {
    for (const name of await ask("policies")) $("policy").append(new Option(name, name));
    controls(latest.state);
  } catch { offered = false; }
}

async function send(form, path, body, done) {
  const button = form.querySelector("button"), key = $("key").value || apiKey;
  button.disabled = true;
  let ok = false, text;
  try {
    const headers = { "Content-Type": "application/json", ...bearer(key) };
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    const found = await answer.json();
    ok = answer.ok && found !== false && !(Array.isArray(found) && found.includes(false));
    text = ok ? done : answer.status === 401 ? "Refused: give the admin key." :
      `Refused: ${found.error ?? "the server's log says why"}`;
  } catch (error) {
    text = `No answer: ${error.message}`;
  }
  button.disabled = false;
  $("outcome").dataset.ok = ok;
  $("outcome").textContent = text;
  for (const field of form.querySelectorAll("[data-touched]")) delete field.dataset.touched;
  look();
}

$("policy-form").addEventListener("submit", (event) => {
  event.preventDefault();
  let options;
  try { options = JSON.parse($("options").value || "{}"); } catch (error) {
    $("outcome").dataset.ok = false;
    $("outcome").textContent = `Options: ${error.message}`;
    return;
  }
  const name = $("policy").value;
  send(event.target, "policy", { name, options }, `The policy is ${name} from now on.`);
});
$("pool-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const tokens = Number($("pool").value);
  send(event.target, "../set_internal_state", { server_args: { ellm_device_kv_tokens: tokens } },
    `The pool goes to ${number(tokens)} tokens.`);
});
$("replica").addEventListener("change", () => { history.length = 0; look(); });
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("lock-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("api-key").value.trim();
  say("lock-outcome", "");
  // No other can be sent in a header.
  if (!/^[ -~]+$/.test(given)) { refuseKey(); return; }
  apiKey = given;
  locked = false;
  if (held) $("hold").click(); else look();
});
for (const id of ["policy", "pool"]) $(id).addEventListener("input", () => { $(id).dataset.touched = "yes"; });
$("all").addEventListener("click", () => { everything = !everything; if (latest) requests(latest.seen); });
$("hold").addEventListener("click", () => {
  held = !held;
  $("hold").setAttribute("aria-pressed", held);
  say("hold", held ? "Go on" : "Pause");
  if (held) link("held", "Paused");
  look();
});
document.addEventListener("visibilitychange", look);
window.addEventListener("resize", () => { if (latest) plot(); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (latest) plot(); });

look();
