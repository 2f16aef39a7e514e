// The legend, painted as the cells are.

import { ASIDE, DECODE, ENDED, FAILED_OVER, IDLE, PREEMPTED, PREFILL } from "./store.js";
import { Painter } from "./paint.js";
import { NOBODY } from "./palette.js";

const CELL = { width: 10, height: 14 };
const row = (kind, fields = {}) => ({
  kinds: Uint8Array.of(kind), sequences: [NOBODY], chunks: new Map(), it: 0, left: [],
  lost: false, gap: false, ...fields,
});
const left = (how) => [{ slot: 0, sequence: NOBODY, how }];
const ENTRIES = [
  ["prefill chunk", [row(PREFILL), row(PREFILL), row(PREFILL)]],
  ["decode", [row(DECODE), row(DECODE), row(DECODE)]],
  ["seated, sits out", [row(ASIDE), row(ASIDE), row(ASIDE)]],
  ["idle seat", [row(IDLE), row(IDLE), row(IDLE)]],
  ["finished", [row(DECODE), row(DECODE, { left: left(1) }), row(IDLE)]],
  ["ended early", [row(DECODE), row(DECODE, { left: left(ENDED) }), row(IDLE)]],
  ["preempted", [row(DECODE), row(IDLE, { left: left(PREEMPTED) }), row(IDLE)]],
  ["executor lost", [row(DECODE), row(DECODE, { lost: true, left: left(FAILED_OVER) }), row(IDLE)]],
];

export function showLegend(list) {
  const scale = devicePixelRatio || 1;
  const cell = { width: Math.round(CELL.width * scale), height: Math.round(CELL.height * scale) };
  list.replaceChildren(...ENTRIES.map(([text, rows]) => {
    const entry = document.createElement("li"), canvas = document.createElement("canvas");
    canvas.width = cell.width * rows.length;
    canvas.height = cell.height;
    canvas.style.width = `${canvas.width / scale}px`;
    canvas.style.height = `${canvas.height / scale}px`;
    canvas.setAttribute("aria-hidden", "true");
    const painter = new Painter(cell, rows.length, 1);
    painter.paint(rows, 0);
    canvas.getContext("2d").putImageData(painter.image, 0, 0);
    entry.append(canvas, text);
    return entry;
  }));
}
