// One stable colour a sequence, from its number alone, and the few colours of the page itself.

// Stands for any sequence, in the legend.
export const NOBODY = -1;
const dark = matchMedia("(prefers-color-scheme: dark)");
const sequences = new Map();
export const onThemeChange = (callback) => dark.addEventListener("change", () => { sequences.clear(); callback(); });

// OKLCH (Ottosson 2020) to sRGB: equal lightness looks equal, so no sequence shouts.
function rgb(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue), b = chroma * Math.sin(hue);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((value) => {
    const linear = Math.min(1, Math.max(0, value));
    return Math.round(255 * (linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055));
  });
}

// As canvas pixels: bytes R, G, B, A in the order of memory.
const pixel = ([r, g, b]) => (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
const mix = (one, two, share) => one.map((value, i) => Math.round(value * share + two[i] * (1 - share)));

export function theme() {
  const night = dark.matches;
  const colours = night
    ? { ground: [23, 24, 27], ink: [236, 237, 238], idle: [78, 82, 88], alarm: [255, 92, 72], grey: [139, 144, 152] }
    : { ground: [255, 255, 255], ink: [24, 25, 27], idle: [182, 186, 192], alarm: [200, 36, 18], grey: [134, 140, 148] };
  return {
    ...colours,
    pixels: Object.fromEntries(Object.entries(colours).map(([name, value]) => [name, pixel(value)])),
  };
}

// Reds are kept for what goes wrong: hues run from orange round to violet.
function hueOf(sequence) {
  const turn = (sequence * 0.6180339887498949) % 1;
  return ((55 + 275 * turn) / 180) * Math.PI;
}

export function colourOf(sequence) {
  let colour = sequences.get(sequence);
  if (!colour) {
    if (sequences.size > 20000) sequences.clear();
    const shade = [0, 0.07, -0.06][sequence % 3];
    const base = sequence === NOBODY ? theme().grey : rgb((dark.matches ? 0.72 : 0.66) + shade, 0.125, hueOf(sequence));
    const { ground, ink } = theme();
    colour = {
      css: `rgb(${base.join(" ")})`,
      full: pixel(base),
      hatch: pixel(mix(base, dark.matches ? ground : ink, 0.45)),
      faint: pixel(mix(base, ground, 0.22)),
      faintHatch: pixel(mix(base, ground, 0.38)),
    };
    sequences.set(sequence, colour);
  }
  return colour;
}
