// what a plan visits, as a picture and as an animation in the order of the kernels

import { colour, picture } from './ui.js';

const STATES = ['empty', 'part', 'all'];
const SIDE = 960;

// segments of one part; the classes of a stride follow each other, as in the kernels
export function plan(part, data) {
  const rows = part.classes.reduce((sum, one) => sum + one.rows, 0);
  const keys = part.classes.reduce((sum, one) => sum + one.keys, 0);
  const x = (n) => Math.round(n * SIDE / keys);
  const y = (n) => Math.round(n * SIDE * Math.min(1.4, rows / keys) / rows);
  const height = Math.max(24, y(rows));
  const shape = { rows, keys, x, y, height };
  const all = pieces(part, data, shape);
  const paint = (context) => {
    clear(context, height);
    all.forEach((piece) => fill(context, piece, STATES[piece.kind]));
    if (part.step === 1) borders(context, data, shape);
  };
  const canvas = picture(SIDE, height, `${data.backend}: the segments of keys that every tile of ${data.tile_q} queries visits`, paint);
  return { canvas, show: player(canvas.getContext('2d'), all, height, paint) };
}

// key tiles in the order of the kernels: turn n of every query tile at once, or one query tile after the other from the last
function pieces(part, data, { x, y }) {
  const tiles = [];
  let row = 0;
  let first = 0;
  for (const one of part.classes) {
    one.tiles.forEach((segments, n) => {
      const top = y(row + n * data.tile_q);
      const bottom = y(row + Math.min(one.rows, (n + 1) * data.tile_q));
      tiles.push(segments.flatMap(([begin, end, kind]) => Array.from({ length: Math.ceil((end - begin) / data.tile_k) }, (_, m) => {
        const from = begin + m * data.tile_k;
        const to = Math.min(end, from + data.tile_k);
        return { kind, left: x(first + from), top, width: Math.max(1, x(first + to) - x(first + from)), height: Math.max(1, bottom - top) };
      })));
    });
    row += one.rows;
    first += one.keys;
  }
  if (data.at_once) return tiles.flatMap((tile) => tile.map((piece, turn) => ({ ...piece, turn }))).sort((a, b) => a.turn - b.turn);
  return tiles.reverse().flat().map((piece, turn) => ({ ...piece, turn }));
}

function clear(context, height) {
  context.fillStyle = colour('empty');
  context.fillRect(0, 0, SIDE, height);
}

function fill(context, piece, name) {
  context.fillStyle = colour(name);
  context.fillRect(piece.left, piece.top, piece.width, piece.height);
}

function borders(context, data, { rows, keys, x, y, height }) {
  if (SIDE * data.tile_k / keys < 8) return;
  context.fillStyle = colour('sheet');
  context.globalAlpha = 0.35;
  for (let n = data.tile_k; n < keys; n += data.tile_k) context.fillRect(x(n) - 1, 0, 2, height);
  for (let n = data.tile_q; n < rows; n += data.tile_q) context.fillRect(0, y(n) - 1, SIDE, 2);
  context.globalAlpha = 1;
}

// shows the first visits, up to a share of all; those of the latest turns in another colour
function player(context, all, height, paint) {
  const turns = all.length ? all[all.length - 1].turn + 1 : 0;
  let drawn = 0;
  let latest = 0;
  return (share) => {
    if (share >= 1) {
      drawn = 0;
      latest = 0;
      paint(context);
      return;
    }
    if (drawn === 0) clear(context, height);
    for (let n = latest; n < drawn; n++) fill(context, all[n], STATES[all[n].kind]);
    latest = drawn;
    for (; drawn < all.length && all[drawn].turn < share * turns; drawn++) fill(context, all[drawn], 'accent');
  };
}

const SECONDS = 6;
const STEPS = 8;

// a button that plays all pictures together; with reduced motion, each press shows the next of a few still pictures
export class Stage {
  constructor(button) {
    this.button = button;
    this.reset([]);
  }

  reset(shows) {
    this.stop();
    this.shows = shows;
    this.share = 1;
  }

  press() {
    if (this.timer) this.stop();
    else if (matchMedia('(prefers-reduced-motion: reduce)').matches) this.show(this.share >= 1 ? 1 / STEPS : this.share + 1 / STEPS);
    else this.start();
  }

  start() {
    const from = this.share >= 1 ? 0 : this.share;
    const begin = performance.now();
    this.timer = setInterval(() => this.show(Math.min(1, from + (performance.now() - begin) / 1000 / SECONDS)), 60);
    this.button.textContent = 'Pause';
  }

  show(share) {
    this.share = share;
    this.shows.forEach((show) => show(share));
    this.button.dataset.share = share.toFixed(3);
    if (share >= 1) this.stop();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.button.textContent = 'Play the visits';
  }
}
