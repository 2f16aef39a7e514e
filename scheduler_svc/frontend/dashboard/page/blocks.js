// What the KV blocks of a lane hold: one small square a block, or every so-many-th one, row after row.

import { NOBODY, colourOf, theme } from "./palette.js";

export const FREE = 0, CACHED = 1, HELD = 2, SHARED = 3;
export const STATES = ["free", "cached, held by nobody", "held", "shared"];
// Who holds a block that nobody with a seat holds, as the service tells it.
const NO_SEQUENCE = 0xffffffff;
const SIZE = 7, GAP = 1;

export class BlockMap {
  // `view`: what all strips share. `on`: block(text), pick(sequence).
  constructor(view, on) {
    this.view = view;
    this.on = on;
    this.element = document.createElement("details");
    this.element.className = "blocks";
    this.summary = document.createElement("summary");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.element.append(this.summary, this.canvas);
    this.told = null;
    this.drawn = null;
    this.columns = 0;
    this.canvas.addEventListener("pointermove", (event) => this.on.block(this.#describe(this.#at(event))));
    this.canvas.addEventListener("pointerleave", () => this.on.block(null));
    this.canvas.addEventListener("click", (event) => {
      const cell = this.#at(event);
      if (cell !== null && this.sequenceOf(cell) !== null) this.on.pick(this.sequenceOf(cell));
    });
    this.element.addEventListener("toggle", () => { this.drawn = null; });
  }

  // The newest that was told of this lane; null: nothing.
  take(told) {
    this.told = told;
    this.element.hidden = !told;
    if (!told) return;
    const which = told.step > 1 ? `, one in ${told.step} is shown` : "";
    this.summary.textContent = `KV blocks${which} (coloured: held, outlined: only cached, dot: free)`;
    const counts = [0, 0, 0, 0];
    for (const state of told.states) counts[state]++;
    const text = STATES.map((name, state) => `${counts[state]} ${name}`).join(", ");
    this.canvas.setAttribute("aria-label", `${told.states.length} KV blocks: ${text}`);
  }

  sequenceOf(cell) {
    const sequence = this.told.s[cell];
    return sequence === NO_SEQUENCE ? null : sequence;
  }

  // Draw what has changed.
  frame() {
    if (!this.told || !this.element.open) return;
    const wide = this.element.clientWidth, { follow } = this.view;
    if (this.drawn && this.drawn.told === this.told && this.drawn.follow === follow && this.drawn.wide === wide) return;
    this.drawn = { told: this.told, follow, wide };
    const count = this.told.states.length, pitch = SIZE + GAP, scale = devicePixelRatio || 1;
    this.columns = Math.max(1, Math.floor(wide / pitch));
    const rows = Math.ceil(count / this.columns);
    this.canvas.width = this.columns * pitch * scale;
    this.canvas.height = rows * pitch * scale;
    this.canvas.style.width = `${this.columns * pitch}px`;
    this.canvas.style.height = `${rows * pitch}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    for (let cell = 0; cell < count; cell++) {
      const x = (cell % this.columns) * pitch, y = Math.floor(cell / this.columns) * pitch;
      this.#draw(context, x, y, Number(this.told.states[cell]), this.sequenceOf(cell));
    }
  }

  #draw(context, x, y, state, sequence) {
    const { idle, ground } = theme(), css = (rgb) => `rgb(${rgb.join(" ")})`;
    if (state === FREE) {
      context.fillStyle = css(idle);
      context.fillRect(x + SIZE / 2 - 0.5, y + SIZE / 2 - 0.5, 1, 1);
      return;
    }
    const { follow } = this.view;
    context.globalAlpha = follow === null || follow === sequence ? 1 : 0.25;
    context.fillStyle = context.strokeStyle = state === CACHED ? css(idle) : colourOf(sequence ?? NOBODY).css;
    if (state === CACHED) context.strokeRect(x + 0.5, y + 0.5, SIZE - 1, SIZE - 1);
    else context.fillRect(x, y, SIZE, SIZE);
    if (state === SHARED) {
      context.fillStyle = css(ground);
      context.fillRect(x + 2, y + 2, SIZE - 4, SIZE - 4);
    }
    context.globalAlpha = 1;
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect(), pitch = SIZE + GAP;
    const column = Math.floor((event.clientX - box.left) / pitch), row = Math.floor((event.clientY - box.top) / pitch);
    const cell = row * this.columns + column;
    return column >= 0 && column < this.columns && cell >= 0 && cell < (this.told?.states.length ?? 0) ? cell : null;
  }

  #describe(cell) {
    if (cell === null) return null;
    return { block: cell * this.told.step, state: STATES[this.told.states[cell]], sequence: this.sequenceOf(cell) };
  }
}
