// What the page knows: rows by lane, the sequences' names, and the newest status.

export const IDLE = 0, DECODE = 1, PREFILL = 2, ASIDE = 3;
export const ENDED = 4, PREEMPTED = 5, MOVED = 6, FAILED_OVER = 7;
export const HOW = ["", "end of sequence", "stop token", "length", "ended early", "preempted", "moved", "failed over"];
const MAX_ROWS = 4096;
const MAX_NAMES = 20000;
const RATE_MS = 5000;

class Lane {
  constructor(epoch) {
    this.epoch = epoch;
    this.rows = [];
    this.seats = 0;
    this.occupants = [];
    this.info = null;
    this.blocks = null;
  }

  // The place of the last row whose number is at most `n`; -1 for none.
  placeOf(n) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].n <= n) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  grow(seats) {
    if (seats > this.seats) this.seats = seats;
  }
}

export class Store {
  constructor() {
    this.lanes = new Map();
    this.names = new Map();
    this.ends = new Map();
    this.newest = 0;
    this.status = null;
    this.history = [];
  }

  get oldest() {
    const firsts = [...this.lanes.values()].filter((lane) => lane.rows.length).map((lane) => lane.rows[0].n);
    return firsts.length ? Math.min(...firsts) : 0;
  }

  takeRows({ sequences, rows }) {
    for (const sequence of sequences) {
      this.names.delete(sequence.s);
      this.names.set(sequence.s, sequence);
    }
    for (const name of this.names.keys()) {
      if (this.names.size <= MAX_NAMES) break;
      this.names.delete(name);
      this.ends.delete(name);
    }
    for (const row of rows) if (row.n > this.newest) this.#takeRow(row);
  }

  takeStatus(status) {
    this.status = status;
    const seen = new Set(), blocks = new Map((status.blocks ?? []).map((told) => [told.epoch, told]));
    for (const info of status.lanes) {
      const lane = this.#lane(info.epoch);
      lane.info = info;
      lane.blocks = blocks.get(info.epoch) ?? null;
      lane.grow(info.seats);
      seen.add(info.epoch);
    }
    for (const [epoch, lane] of this.lanes) {
      if (!seen.has(epoch) && (!lane.rows.length || lane.rows.at(-1).n < this.newest - MAX_ROWS)) this.lanes.delete(epoch);
      else if (!seen.has(epoch) && lane.info) lane.info = { ...lane.info, state: "gone", running: 0 };
    }
    const now = performance.now();
    this.history.push({ now, latency: status.latency ?? {}, counters: status.counters ?? {} });
    while (this.history.length > 1 && now - this.history[1].now > 60000) this.history.shift();
  }

  // What a counter rose by a second, of late.
  rate(name) {
    const last = this.history.at(-1);
    if (!last) return null;
    const first = this.history.find((one) => last.now - one.now <= RATE_MS);
    const seconds = (last.now - first.now) / 1000;
    return seconds > 0.4 ? ((last.counters[name] ?? 0) - (first.counters[name] ?? 0)) / seconds : null;
  }

  #lane(epoch) {
    let lane = this.lanes.get(epoch);
    if (!lane) this.lanes.set(epoch, (lane = new Lane(epoch)));
    return lane;
  }

  #takeRow(row) {
    this.newest = row.n;
    const lane = this.#lane(row.lane);
    lane.grow(Math.max(0, ...row.d, ...row.p, ...row.l) + 1);
    const { occupants } = lane;
    const left = row.l.map((slot, i) => ({ slot, sequence: row.ls[i], how: row.lh[i] }));
    const before = left.filter(({ how }) => how >= ENDED && how <= MOVED);
    for (const { slot } of before) occupants[slot] = undefined;
    row.d.forEach((slot, i) => { occupants[slot] = row.ds[i]; });
    row.p.forEach((slot, i) => { occupants[slot] = row.ps[i]; });
    const kinds = new Uint8Array(lane.seats), sequences = new Uint32Array(lane.seats), chunks = new Map();
    occupants.forEach((sequence, slot) => {
      if (sequence !== undefined) { kinds[slot] = ASIDE; sequences[slot] = sequence; }
    });
    for (const slot of row.d) kinds[slot] = DECODE;
    row.p.forEach((slot, i) => { kinds[slot] = PREFILL; chunks.set(slot, row.pl[i]); });
    for (const { slot, sequence, how } of left) {
      if (occupants[slot] === sequence) occupants[slot] = undefined;
      if (how <= ENDED) this.ends.set(sequence, { how, at: row.at, it: row.it });
    }
    const previous = lane.rows.at(-1);
    let tokens = row.d.length;
    for (const length of row.pl) tokens += length;
    lane.rows.push({
      n: row.n, it: row.it, at: row.at, ms: row.ms, lost: row.lost, kinds, sequences, chunks, left, tokens,
      gap: previous !== undefined && row.it > previous.it + 1,
    });
    if (lane.rows.length > MAX_ROWS + 256) lane.rows.splice(0, 256);
  }

  // Short text for a sequence; others' have no name here.
  nameOf(sequence) {
    const known = this.names.get(sequence);
    if (!known?.id) return `#${sequence}`;
    return known.index ? `${known.id}/${known.index}` : known.id;
  }
}
