// Puts the page together: the stream into the store, the store onto the screen, keys and buttons into the view.

import { Store, DECODE, PREFILL, PREEMPTED, HOW } from "./store.js";
import { LaneView, WIDTHS } from "./timeline.js";
import { listen, setKey } from "./stream.js";
import { SequencePanel, showLatency, showQueue } from "./panels.js";
import { onThemeChange } from "./palette.js";
import { showLegend } from "./legend.js";

const $ = (id) => document.getElementById(id);
const store = new Store(), strips = new Map(), panel = new SequencePanel(store);
// `end`: number of the last iteration that is shown; null: the newest, whatever comes.
const view = { end: null, zoom: 3, follow: null, cursor: null };
const KINDS = ["idle", "decode", "prefill", "has its seat, not in this iteration"];
const frames = { count: 0, drawMs: [], gapMs: [], painted: 0 };
const SUMMARY_MS = 15000;

// --- the view ---

const live = () => view.end === null;

function setEnd(end) {
  view.end = end;
  $("pause").textContent = live() ? "Pause" : "Live";
  $("pause").setAttribute("aria-pressed", String(!live()));
  document.body.dataset.live = String(live());
}

function activeLane() {
  const focused = [...strips.values()].find((strip) => strip.canvas === document.activeElement);
  return focused?.lane ?? view.cursor?.lane ?? [...store.lanes.values()].sort((a, b) => b.rows.length - a.rows.length)[0];
}

function scrub(lane, place) {
  if (!lane?.rows.length) return;
  const kept = Math.min(lane.rows.length - 1, Math.max(0, place));
  setEnd(lane.rows[kept].n);
}

function step(count) {
  const lane = activeLane();
  if (!lane) return;
  const place = lane.placeOf(view.end ?? Infinity) + count;
  if (count > 0 && place >= lane.rows.length) setEnd(null);
  else scrub(lane, place);
  if (view.cursor?.lane === lane) moveCursor(0, 0);
}

function zoom(steps) {
  view.zoom = Math.min(WIDTHS.length - 1, Math.max(0, view.zoom + steps));
}

function follow(sequence) {
  view.follow = sequence;
  panel.follow(sequence);
}

// The cursor stands on a seat of the last iteration that is shown.
function moveCursor(down) {
  const lane = activeLane(), strip = lane && strips.get(lane.epoch);
  if (!strip || !(strip.last >= 0)) return;
  if (live()) setEnd(lane.rows[strip.last].n);
  const at = view.cursor?.lane === lane ? view.cursor.slot : -1;
  const slot = Math.min(lane.seats - 1, Math.max(0, at + down));
  point(strip.cell(lane.placeOf(view.end), slot));
}

function point(cell) {
  view.cursor = cell;
  $("readout").textContent = cell ? describe(cell) : " ";
}

function pointAtBlock(what) {
  if (!what) { point(null); return; }
  const holder = what.sequence === null ? "" : ` by ${store.nameOf(what.sequence)}${what.state === "shared" ? " and others" : ""}`;
  $("readout").textContent = `KV block ${what.block} · ${what.state}${holder}`;
}

function describe({ lane, row, slot, kind, sequence }) {
  const parts = [`${lane.info?.name ?? "executor"}, iteration ${row.it}`, `seat ${slot}`];
  if (sequence !== null) {
    const known = store.names.get(sequence);
    const chunk = row.chunks.get(slot);
    parts.push(known?.id ? store.nameOf(sequence) : "another tenant’s", KINDS[kind] + (chunk ? ` of ${chunk} tokens` : ""));
  } else parts.push("idle");
  const left = row.left.filter((one) => one.slot === slot);
  for (const one of left) parts.push(one.how < PREEMPTED ? `over: ${HOW[one.how]}` : `${store.nameOf(one.sequence)} ${HOW[one.how]}`);
  parts.push(`${row.tokens} tokens in ${row.ms.toFixed(1)} ms`);
  if (row.lost) parts.push("executor lost");
  return parts.join(" · ");
}

// --- keys and buttons ---

const KEYS = {
  " ": () => togglePause(),
  ArrowLeft: (event) => step(event.shiftKey ? -20 : -1),
  ArrowRight: (event) => step(event.shiftKey ? 20 : 1),
  ArrowUp: () => moveCursor(-1),
  ArrowDown: () => moveCursor(1),
  Home: () => scrub(activeLane(), 0),
  End: () => setEnd(null),
  Enter: () => view.cursor?.sequence != null && follow(view.cursor.sequence),
  Escape: () => { follow(null); point(null); },
  "+": () => zoom(1),
  "=": () => zoom(1),
  "-": () => zoom(-1),
};

const togglePause = () => setEnd(live() ? store.newest : null);

addEventListener("keydown", (event) => {
  const at = event.target, control = at.closest("input, button, .scroll");
  if (event.ctrlKey || event.metaKey || event.altKey || at.closest("form")) return;
  if (control && (event.key === " " || event.key === "Enter" || event.key.startsWith("Arrow"))) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act(event);
});
$("pause").addEventListener("click", togglePause);
$("older").addEventListener("click", () => step(-1));
$("newer").addEventListener("click", () => step(1));
$("smaller").addEventListener("click", () => zoom(-1));
$("larger").addEventListener("click", () => zoom(1));
$("place").addEventListener("input", () => {
  const place = Number($("place").value), lane = activeLane();
  if (place >= Number($("place").max)) setEnd(null);
  else scrub(lane, place);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  dispatchEvent(new Event("gilir-key"));
});

// --- frames ---

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let previous = 0, movedAt = 0;

function frame(now) {
  const begun = performance.now();
  let painted = 0;
  for (const lane of store.lanes.values()) {
    if (!strips.has(lane.epoch) && (lane.rows.length || lane.info?.state !== "gone")) {
      const strip = new LaneView(lane, view, { pick, point, scrub, zoom, block: pointAtBlock, follow: toggleFollow });
      strips.set(lane.epoch, strip);
      $("lanes").append(strip.element);
      strip.tell();
    }
  }
  for (const [epoch, strip] of strips) {
    if (!store.lanes.has(epoch)) {
      strip.element.remove();
      strips.delete(epoch);
      continue;
    }
    // Who asked for little motion is shown the new iterations once a second.
    if (!calm.matches || !live() || now - movedAt > 1000) painted += strip.frame();
    strip.blocks.frame();
    strip.showCursor(view.cursor);
  }
  if (now - movedAt > 1000) movedAt = now;
  if (painted) {
    note(frames.drawMs, performance.now() - begun);
    frames.painted += painted;
  }
  if (previous) note(frames.gapMs, now - previous);
  previous = now;
  frames.count++;
  requestAnimationFrame(frame);
}

function note(list, value) {
  list.push(value);
  if (list.length > 2000) list.shift();
}

const toggleFollow = (sequence) => follow(sequence === view.follow ? null : sequence);

function pick(cell) {
  point(cell);
  if (cell?.sequence != null) toggleFollow(cell.sequence);
}

// --- status ---

function showStatus() {
  const { status } = store;
  if (!status) return;
  $("empty").hidden = strips.size > 0;
  const figure = (id, value) => { $(id).textContent = value === null || value === undefined ? "–" : value; };
  const rate = (name) => { const value = store.rate(name); return value === null ? null : value.toFixed(value < 10 ? 1 : 0); };
  const waiting = Object.values(status.num_waiting).reduce((sum, count) => sum + count, 0);
  figure("f-rate", rate("iterations"));
  figure("f-tokens", rate("tokens"));
  figure("f-running", status.lanes.reduce((sum, lane) => sum + lane.running, 0));
  figure("f-waiting", waiting);
  figure("f-preemptions", status.counters?.preemptions);
  figure("f-lost", status.counters?.lost);
  for (const strip of strips.values()) strip.tell();
  showQueue(store, follow);
  if (store.history.length) showLatency(store);
  const lane = activeLane();
  if (lane?.rows.length) {
    $("place").max = lane.rows.length - 1;
    $("place").value = lane.placeOf(view.end ?? Infinity);
    $("place").setAttribute("aria-valuetext", live() ? "live" : `iteration ${lane.rows[Number($("place").value)]?.it}`);
  }
}

function summarise() {
  if (!store.status || document.hidden) return;
  const { lanes, num_waiting: counts } = store.status;
  const waiting = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const told = lanes.map((lane) => `${lane.name}: ${lane.state}, ${lane.running} of ${lane.seats} seats taken, ` +
    `${Math.round((100 * lane.blocks_referenced) / Math.max(1, lane.blocks))} percent of the KV blocks held`);
  $("summary").textContent = `${waiting} waiting. ${told.join(". ")}.`;
}

function onState(state, text) {
  $("link").dataset.state = state;
  $("link").textContent = text;
  $("key-form").hidden = state !== "key";
  if (state === "key") $("key").focus();
}

function onEvent(kind, data) {
  if (kind === "rows") store.takeRows(data);
  else if (kind === "trouble") onState(data.message ? "wait" : "live", data.message || "live");
  else if (kind === "status") {
    store.takeStatus(data);
    showStatus();
  }
}

// What tests read: the cells as they are shown, and what the frames cost.
globalThis.gilir = {
  store, view, strips, frames, DECODE, PREFILL,
  resetFrames: () => { frames.count = frames.painted = 0; frames.drawMs.length = frames.gapMs.length = 0; },
};

onThemeChange(() => { for (const strip of strips.values()) strip.drawn = strip.blocks.drawn = null; showLegend($("legend")); });
showLegend($("legend"));
setEnd(null);
setInterval(() => panel.ask(), 1000);
setInterval(summarise, SUMMARY_MS);
setTimeout(summarise, 2500);
requestAnimationFrame(frame);
listen(onEvent, onState);
