// Paints columns of cells as pixels: one column an iteration, one row a seat. What a cell is shows by its shape:
// a decode is a band, a prefill chunk a hatched block of full height, a sequence that stands aside a thin line.

import { ASIDE, DECODE, FAILED_OVER, ENDED, PREEMPTED, PREFILL } from "./store.js";
import { colourOf, theme } from "./palette.js";

export class Painter {
  // An image of `columns` times `seats` cells. `cell`: width and height in device pixels.
  constructor(cell, columns, seats) {
    this.cell = cell;
    this.columns = columns;
    this.seats = seats;
    this.theme = theme();
    this.follow = null;
    this.image = new ImageData(columns * cell.width, seats * cell.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.stride = this.image.width;
    this.colours = [];
  }

  // Move all columns by so many to the left (below 0: to the right); those that come in are to be painted.
  shift(count) {
    const { pixels, stride } = this, by = count * this.cell.width;
    for (let start = 0; start < pixels.length; start += stride) {
      if (by > 0) pixels.copyWithin(start, start + by, start + stride);
      else pixels.copyWithin(start - by, start, start + stride + by);
    }
  }

  // Paint rows from a column on; undefined rows are left empty.
  paint(rows, column) {
    const { width } = this.cell, first = column * width;
    for (let start = first; start < this.pixels.length; start += this.stride) {
      this.pixels.fill(this.theme.pixels.ground, start, start + rows.length * width);
    }
    rows.forEach((row, place) => row && this.#column(row, first + place * width));
  }

  // Mostly a seat has the same sequence as in the column before.
  #colour(slot, sequence) {
    const last = this.colours[slot];
    if (last?.sequence === sequence) return last;
    return (this.colours[slot] = { sequence, ...colourOf(sequence) });
  }

  #fill(x, y, width, height, colour) {
    const { pixels, stride } = this;
    for (let line = y * stride + x; height > 0; height--, line += stride) {
      for (let place = line; place < line + width; place++) pixels[place] = colour;
    }
  }

  #column(row, x) {
    const { width, height } = this.cell, { seats } = this;
    const gap = height >= 4 ? Math.max(1, Math.round(height / 10)) : 0;
    for (let slot = 0; slot < Math.min(seats, row.kinds.length); slot++) this.#cell(row, slot, x, slot * height, width, height - gap);
    const { alarm, idle, ink } = this.theme.pixels;
    for (const { slot, sequence, how } of row.left) {
      const faint = this.follow !== null && this.follow !== sequence;
      if (faint && how < PREEMPTED) continue;
      if (how <= ENDED) this.#end(x, slot * height, width, height - gap, ink, how === ENDED);
      else if (how < FAILED_OVER) this.#notch(x, slot * height, width, height - gap, faint ? idle : how === PREEMPTED ? alarm : ink);
    }
    if (row.lost) this.#loss(x, seats * height);
    if (row.gap) for (let y = 0; y < seats * height; y += 4) this.#fill(x, y, 1, 2, ink);
  }

  #cell(row, slot, x, y, width, height) {
    const kind = row.kinds[slot];
    if (!kind) {
      // An idle seat: a dot every few pixels on its middle.
      if (height >= 3 && row.it % Math.max(1, Math.round(6 / width)) === 0) {
        this.#fill(x, y + (height >> 1), 1, 1, this.theme.pixels.idle);
      }
      return;
    }
    const sequence = row.sequences[slot], colour = this.#colour(slot, sequence);
    const faint = this.follow !== null && this.follow !== sequence;
    const full = faint ? colour.faint : colour.full;
    if (kind === PREFILL) this.#hatch(x, y, width, height, full, faint ? colour.faintHatch : colour.hatch);
    else if (kind === DECODE) {
      // Where seats are too low for a gap, their colours alone keep them apart.
      const inset = height < 4 ? 0 : Math.round(height * 0.22);
      this.#fill(x, y + inset, width, height - 2 * inset, full);
    } else if (kind === ASIDE) this.#fill(x, y + (height >> 1), width, 1, full);
  }

  // Diagonal stripes; the last pixels of the block stay free, so that chunks can be counted.
  #hatch(x, y, width, height, colour, stripe) {
    const wide = width >= 4 ? width - 1 : width, period = height >= 6 && width >= 4 ? 4 : 2;
    for (let line = y; line < y + height; line++) {
      const start = line * this.stride;
      for (let place = x; place < x + wide; place++) {
        this.pixels[start + place] = (place + line) % period < period >> 1 ? stripe : colour;
      }
    }
  }

  // The end of a sequence: a bar at the right edge; where it ended early, from outside, only half of one.
  #end(x, y, width, height, colour, half) {
    const thick = width >= 6 ? 2 : 1;
    this.#fill(x + width - thick, y, thick, half ? Math.max(1, height >> 1) : height, colour);
  }

  // Gave up its seat before this iteration: a notch that points back.
  #notch(x, y, width, height, colour) {
    const depth = Math.max(2, Math.min(width, height) - 1);
    for (let line = 0; line < height; line++) {
      const reach = Math.max(1, Math.round(depth * (1 - Math.abs((2 * line + 1) / height - 1))));
      this.#fill(x, y + line, Math.min(width, reach), 1, colour);
    }
  }

  // The executor was lost: the column is crossed out.
  #loss(x, height) {
    const { width } = this.cell, { alarm } = this.theme.pixels;
    for (let y = 0; y < height; y++) {
      for (let place = 0; place < width; place++) {
        if ((place + y) % 5 < 2 || place >= width - 1) this.pixels[y * this.stride + x + place] = alarm;
      }
    }
  }
}
