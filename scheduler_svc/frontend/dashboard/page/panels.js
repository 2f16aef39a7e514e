// The panels beside the timeline: the followed sequence, the queue, latency.

import { HOW } from "./store.js";
import { colourOf } from "./palette.js";
import { headers } from "./stream.js";

const $ = (id) => document.getElementById(id);
const REASONS = {
  seats: "a seat", token_budget: "token budget", kv_blocks: "KV blocks", policy: "policy",
  no_executor: "an executor", paused: "a paused executor",
};
export const reasonText = (reason) => REASONS[reason] ?? reason;

export function seconds(value) {
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
}

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

function swatch(sequence) {
  const made = element("i", "", "swatch");
  made.style.background = colourOf(sequence).css;
  return made;
}

// --- queue ---

export function showQueue(store, onPick) {
  const { waiting, num_waiting: counts } = store.status;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  $("queue-count").textContent = total || "";
  $("reasons").textContent = total
    ? Object.entries(counts).map(([reason, count]) => `${count} for ${reasonText(reason)}`).join(", ")
    : "Nobody waits.";
  $("queue").hidden = !total;
  const rows = waiting.map((one) => {
    const row = element("tr"), name = element("td", "", "name");
    const button = element("button", one.id ? one.id + (one.index ? `/${one.index}` : "") : "another tenant’s", "plain");
    button.type = "button";
    button.title = one.id ?? "";
    button.addEventListener("click", () => { store.names.set(one.s, one); onPick(one.s); });
    name.append(swatch(one.s), button);
    const why = element("td", reasonText(one.reason));
    if (one.preemptions) {
      const often = element("small", ` ${one.preemptions}×`);
      often.title = `preempted ${one.preemptions} times`;
      often.append(element("span", " preempted", "unseen"));
      why.append(often);
    }
    row.append(name, why, element("td", seconds(one.waited), "n"));
    return row;
  });
  const focused = document.activeElement?.closest("#queue tr")?.rowIndex;
  $("queue").tBodies[0].replaceChildren(...rows);
  if (focused) $("queue").rows[Math.min(focused, rows.length)]?.querySelector("button")?.focus();
  if (total > waiting.length) $("reasons").textContent += `; the first ${waiting.length} are shown`;
}

// --- latency ---

const KINDS = { ttft: "First token", itl: "Next token", queue: "In queue", e2e: "Answer" };

// The quantile of bucket counts, linear within a bucket, as Prometheus' histogram_quantile has it.
function quantile(share, bounds, counts, total) {
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (below + counts[i] >= share * total) {
      if (i >= bounds.length) return bounds.at(-1);
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (share * total - below)) / counts[i];
    }
    below += counts[i];
  }
  return bounds.at(-1);
}

export function showLatency(store) {
  const last = store.history.at(-1), first = store.history[0];
  const rows = Object.entries(KINDS).map(([kind, title]) => {
    const now = last.latency[kind], before = first.latency[kind];
    const row = element("tr"), head = element("th", title);
    head.scope = "row";
    row.append(head);
    const added = (now?.counts ?? []).map((count, i) => count - (before?.counts[i] ?? 0));
    const counts = added.map((count, i) => count - (i ? added[i - 1] : 0));
    const total = added.at(-1) ?? 0, most = Math.max(1, ...counts);
    const bars = element("td", "", "bars");
    for (const count of counts) {
      const bar = element("i");
      bar.style.height = count ? `${Math.max(8, (100 * count) / most)}%` : "0";
      bars.append(bar);
    }
    row.append(bars);
    for (const share of [0.5, 0.9, 0.99]) {
      row.append(element("td", total ? seconds(quantile(share, now.bounds, counts, total)) : "–", "n"));
    }
    return row;
  });
  $("latency").tBodies[0].replaceChildren(...rows);
  const span = Math.round((last.now - first.now) / 1000);
  $("latency-span").textContent = span > 0 ? `last ${span} s` : "";
}

// --- the followed sequence ---

export class SequencePanel {
  constructor(store) {
    this.store = store;
    this.sequence = null;
    this.account = null;
    this.number = 0;
  }

  async follow(sequence) {
    this.sequence = sequence;
    this.account = null;
    this.number++;
    this.show();
    await this.ask();
  }

  // What the core says of it now; an ended one is known no more, and the last answer stays.
  async ask() {
    const number = this.number, known = this.store.names.get(this.sequence);
    if (this.sequence === null || !known?.id || this.store.ends.has(this.sequence)) return;
    try {
      const answer = await fetch(`/dashboard/request?id=${encodeURIComponent(known.id)}`, { headers: headers(), cache: "no-store" });
      if (!answer.ok || number !== this.number) return;
      const account = await answer.json();
      const mine = account.sequences.find((one) => one.index === known.index);
      if (mine) this.account = { ...mine, model: account.model };
    } catch {
      return; // the stream tells of broken connections
    }
    this.show();
  }

  show() {
    const box = $("sequence"), { sequence, account, store } = this;
    if (sequence === null) {
      box.replaceChildren(element("p", "Click a cell, or choose one with the arrow keys and Enter, to follow its sequence.", "quiet"));
      return;
    }
    const known = store.names.get(sequence), end = store.ends.get(sequence);
    const title = element("p", "", "followed");
    title.append(swatch(sequence), element("code", known?.id ? store.nameOf(sequence) : "another tenant’s sequence"));
    const list = element("dl", "", "facts");
    const fact = (name, value) => {
      const pair = element("div");
      pair.append(element("dt", name), element("dd", value));
      list.append(pair);
    };
    fact("State", end ? `over: ${HOW[end.how]}` : account ? stateText(account) : known?.id ? "…" : "not told");
    if (account) {
      fact("Model", account.model);
      if (account.executor) fact("Executor", account.executor);
      const tokens = `${account.prompt_tokens} prompt, ${account.generated_tokens} generated`;
      fact("Tokens", tokens + (account.cached_tokens ? `, ${account.cached_tokens} from the cache` : ""));
      fact("KV of", `${account.computed_tokens} tokens`);
      fact("Age", seconds(account.age_s));
      fact("Preempted", `${account.num_preemptions}×`);
      const waited = Object.entries(account.waited_s);
      fact("Waited", waited.length ? waited.map(([reason, s]) => `${seconds(s)} for ${reasonText(reason)}`).join(", ") : "not at all");
      if (known.tenant) fact("Tenant", known.tenant);
    } else if (known?.id) fact("Prompt", `${known.prompt} tokens`);
    if (end) fact("Ended", `${new Date(end.at).toLocaleTimeString([], { hour12: false })}, iteration ${end.it}`);
    box.replaceChildren(title, list);
  }
}

function stateText(account) {
  if (account.state === "waiting") return `waits for ${reasonText(account.reason)}`;
  return account.reason === "none" ? "running" : `running, aside for ${reasonText(account.reason)}`;
}
