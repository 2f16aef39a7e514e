// One lane's strip: its header, the cells, the axes. Each frame draws only the columns that are new.

import { BlockMap } from "./blocks.js";
import { Painter } from "./paint.js";

export const WIDTHS = [1, 2, 3, 4, 6, 8, 12, 16, 24];
const MAX_HEIGHT = 480, MOST = 22;
const make = (tag, name, parent) => {
  const element = document.createElement(tag);
  element.className = name;
  parent?.append(element);
  return element;
};
const clock = (at) => new Date(at).toLocaleTimeString([], { hour12: false });

export class LaneView {
  // `view`: what all strips share. `on`: pick(cell), point(cell), scrub(lane, place), zoom(steps);
  // block(what), follow(sequence) for the map of KV blocks.
  constructor(lane, view, on) {
    this.lane = lane;
    this.view = view;
    this.on = on;
    this.element = make("section", "lane", null);
    const head = make("header", "lane-head", this.element);
    this.name = make("h2", "lane-name", head);
    this.state = make("span", "state", head);
    this.work = make("span", "work", head);
    this.pool = make("div", "pool", head);
    this.pool.setAttribute("role", "img");
    this.held = make("i", "held", this.pool);
    this.cached = make("i", "cached", this.pool);
    this.poolText = make("span", "pool-text", head);
    this.frameBox = make("div", "cells", this.element);
    this.gutter = make("canvas", "gutter", this.frameBox);
    this.plane = make("div", "plane", this.frameBox);
    this.canvas = make("canvas", "matrix", this.plane);
    this.cursor = make("div", "cursor", this.plane);
    this.cursor.hidden = true;
    this.axis = make("canvas", "axis", this.element);
    this.axis.setAttribute("aria-hidden", "true");
    this.blocks = new BlockMap(view, { block: on.block, pick: on.follow });
    this.element.append(this.blocks.element);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "iteration timeline");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.drawn = null;
    this.seats = 0;
    this.#listen();
    new ResizeObserver(() => { this.drawn = null; }).observe(this.element);
  }

  #listen() {
    let start = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      start = { x: event.clientX, place: this.last, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!start) { this.on.point(this.cellAt(event)); return; }
      const moved = event.clientX - start.x;
      start.moved ||= Math.abs(moved) > 4;
      if (start.moved) this.on.scrub(this.lane, start.place - Math.round(moved / this.width));
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (start && !start.moved) this.on.pick(this.cellAt(event));
      start = null;
    });
    this.canvas.addEventListener("pointercancel", () => { start = null; });
    this.canvas.addEventListener("pointerleave", () => { if (!start) this.on.point(null); });
    this.canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey) this.on.zoom(event.deltaY > 0 ? -1 : 1);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.on.scrub(this.lane, this.last + Math.sign(event.deltaX) * Math.max(1, Math.round(Math.abs(event.deltaX) / this.width)));
      } else return;
      event.preventDefault();
    }, { passive: false });
  }

  // --- sizes ---

  #layout() {
    const scale = devicePixelRatio || 1, seats = Math.max(1, this.lane.seats);
    const fit = Math.min(MOST, Math.max(2, Math.floor(MAX_HEIGHT / seats)));
    this.width = WIDTHS[this.view.zoom];
    this.height = Math.max(fit, this.width >= 6 ? Math.min(this.width, 16) : 0);
    const cell = { width: Math.max(1, Math.round(this.width * scale)), height: Math.max(1, Math.round(this.height * scale)) };
    this.width = cell.width / scale;
    this.height = cell.height / scale;
    this.columns = Math.max(1, Math.floor(this.plane.clientWidth / this.width));
    this.painter = new Painter(cell, this.columns, seats);
    this.seats = this.lane.seats;
    this.canvas.width = this.columns * cell.width;
    this.canvas.height = seats * cell.height;
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this.#drawGutter(scale, seats);
    this.axis.width = this.plane.clientWidth * scale;
    this.axis.height = 16 * scale;
    this.axis.style.width = `${this.plane.clientWidth}px`;
    const axis = this.axis.getContext("2d");
    axis.scale(scale, scale);
    Object.assign(axis, this.text);
  }

  #drawGutter(scale, seats) {
    const wide = 34, context = this.gutter.getContext("2d");
    this.gutter.width = wide * scale;
    this.gutter.height = this.canvas.height;
    this.gutter.style.width = `${wide}px`;
    this.gutter.style.height = this.canvas.style.height;
    const style = getComputedStyle(this.element);
    this.text = { font: `10px ${style.fontFamily}`, fillStyle: style.getPropertyValue("--muted"), textBaseline: "middle" };
    context.scale(scale, scale);
    Object.assign(context, this.text);
    context.textAlign = "right";
    const step = [1, 2, 4, 8, 16, 32, 64].find((count) => count * this.height >= 13) ?? 64;
    for (let slot = 0; slot < seats; slot += step) {
      context.fillText(String(slot), wide - 6, Math.max(6, (slot + 0.5) * this.height));
    }
  }

  // --- frames ---

  // Draw what has changed. Returns how many columns were painted.
  frame() {
    const { lane, view } = this, end = view.end ?? Infinity;
    if (!this.drawn || this.seats !== lane.seats || this.drawn.zoom !== view.zoom) {
      this.#layout();
      this.drawn = null;
    }
    this.last = lane.placeOf(end);
    const n = this.last < 0 ? 0 : lane.rows[this.last].n;
    if (this.drawn && this.drawn.n === n && this.drawn.follow === view.follow) return 0;
    const place = this.drawn?.follow === view.follow ? lane.placeOf(this.drawn.n) : -Infinity;
    const moved = this.last - place, { columns, painter } = this;
    const count = Math.min(columns, Math.abs(moved)), first = moved < 0 ? 0 : columns - count;
    painter.follow = view.follow;
    if (count < columns) painter.shift(moved);
    const oldest = this.last - columns + 1 + first;
    painter.paint(Array.from({ length: count }, (_, i) => lane.rows[oldest + i]), first);
    this.context.putImageData(painter.image, 0, 0);
    this.drawn = { n, follow: view.follow, zoom: view.zoom };
    this.#drawAxis();
    return count;
  }

  #drawAxis() {
    const context = this.axis.getContext("2d"), wide = this.columns * this.width;
    context.clearRect(0, 0, this.axis.width, 16);
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((count) => count * this.width >= 64) ?? 1000;
    for (let column = 0; column < this.columns; column++) {
      const row = this.lane.rows[this.last - this.columns + 1 + column];
      if (!row || row.it % step) continue;
      const x = (column + 0.5) * this.width;
      if (x > wide - 90 || x < 14) continue;
      context.textAlign = "center";
      context.fillRect(x, 0, 1, 3);
      context.fillText(String(row.it), x, 10);
    }
    const row = this.lane.rows[this.last];
    if (!row) return;
    context.textAlign = "right";
    context.fillText(clock(row.at), this.columns * this.width, 10);
  }

  // --- header ---

  tell() {
    const { info } = this.lane, row = this.lane.rows.at(-1);
    if (!info) return;
    this.blocks.take(this.lane.blocks);
    this.name.textContent = info.name;
    this.name.title = info.model;
    this.state.textContent = info.state;
    this.state.dataset.state = info.state;
    this.state.title = info.reason;
    const work = [`${info.running}/${info.seats} seats`];
    if (row) work.push(`${row.tokens}/${info.token_budget} tokens`, `${row.ms.toFixed(1)} ms`);
    this.work.textContent = work.join(" · ");
    const share = (blocks) => (100 * blocks) / Math.max(1, info.blocks);
    const held = share(info.blocks_referenced), cached = share(info.blocks_cached);
    this.held.style.width = `${held}%`;
    this.cached.style.width = `${cached}%`;
    const text = `KV ${held.toFixed(0)} % held, ${cached.toFixed(0)} % cached, ${Math.max(0, 100 - held - cached).toFixed(0)} % free`;
    this.poolText.textContent = text;
    this.pool.setAttribute("aria-label", text);
    this.pool.title = `${info.blocks_referenced} blocks held, ${info.blocks_cached} only cached, of ${info.blocks}, ${info.block_size} tokens each`;
    this.canvas.setAttribute("aria-label", `Iterations of ${info.name}: ${info.seats} seats down, iterations across. Arrow keys move, Enter follows a sequence.`);
  }

  // --- cells ---

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.width);
    return this.cell(this.last - this.columns + 1 + column, Math.floor((event.clientY - box.top) / this.height));
  }

  cell(place, slot) {
    const row = this.lane.rows[place];
    if (!row || slot < 0 || slot >= this.lane.seats) return null;
    return { lane: this.lane, row, slot, kind: row.kinds[slot] ?? 0, sequence: row.kinds[slot] ? row.sequences[slot] : null };
  }

  showCursor(cell) {
    const column = cell && cell.lane === this.lane ? this.columns - 1 - (this.last - this.lane.placeOf(cell.row.n)) : -1;
    this.cursor.hidden = column < 0 || column >= this.columns;
    if (this.cursor.hidden) return;
    this.cursor.style.transform = `translate(${column * this.width}px, ${cell.slot * this.height}px)`;
    this.cursor.style.width = `${this.width}px`;
    this.cursor.style.height = `${this.height}px`;
  }
}
