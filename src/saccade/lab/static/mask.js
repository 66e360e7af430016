// a mask: its picture, and the tiles that each backend's plan visits

import { ask, bytes, colour, count, field, h, key, paintCells, percent, picture, rgb, terms } from './ui.js';

export const name = 'Masks';
export const title = 'Masks and the tiles that kernels visit';
export const lead = 'A mask is a value. Kernels visit the tiles that hold an allowed pair, test the elements of partial ones, and skip the rest.';

const PARTS = [
  'causal()', 'window(127, 0)', 'prefix(64)', 'global_tokens(8)', 'strided(16)', 'dilated(8, 16)', 'chunked(128)',
  'keys(800)', 'documents(cu_seqlens=[0, 300, 700, 1024])',
];

export const controls = () => [
  { name: 'mask', label: 'Mask', kind: 'text', value: 'causal() & (window(127, 0) | prefix(64))', wide: 'full' },
  { name: 'tq', label: 'Queries', kind: 'number', value: 1024, least: 1, most: 4096 },
  { name: 'tk', label: 'Keys', kind: 'number', value: 1024, least: 1, most: 4096 },
  { name: 'head', label: 'Head', kind: 'number', value: 0, least: 0, most: 255, when: (state) => /per_head/.test(state.mask) },
];

// examples, and constructors to join to the current mask
export function actions(open) {
  const examples = [['', 'Choose…'], ...Object.entries(open.about.masks).map(([text, mask]) => [mask, text])];
  const build = { sign: '&', part: PARTS[0] };
  const keep = (name, value) => { build[name] = value; };
  const add = () => {
    const mask = open.state.mask.trim();
    const other = build.sign === '& ~' ? `~${build.part}` : build.part;
    open.set({ mask: mask ? `(${mask}) ${build.sign[0]} ${other}` : other });
  };
  return [
    field({ name: 'example', label: 'Example', kind: 'select', options: examples }, '', (_, mask) => mask && open.set({ mask })),
    field({ name: 'sign', label: 'Join', kind: 'select', options: [['&', 'and'], ['|', 'or'], ['& ~', 'and not']] }, '&', keep),
    field({ name: 'part', label: 'Constructor', kind: 'select', options: PARTS }, PARTS[0], keep),
    h('button', { type: 'button', onclick: add, 'data-key': 'add' }, 'Add'),
  ];
}

const STATES = ['empty', 'part', 'all'];

function drawn(data, state) {
  const cells = bytes(data.states);
  const colours = STATES.map((name) => rgb(colour(name)));
  const shares = [0, 1, 2].map((kind) => cells.filter((x) => x === kind).length / cells.length);
  const label = `${data.mask} over ${state.tq} queries and ${state.tk} keys: ${percent(shares[2])} of the cells full, ${percent(shares[1])} partial`;
  const scale = Math.max(1, Math.floor(1024 / Math.max(data.rows, data.columns)));
  const canvas = picture(data.columns * scale, data.rows * scale, label, (context) => {
    paintCells(context, data.rows, data.columns, (n) => colours[cells[n]]);
    context.imageSmoothingEnabled = false;
    context.drawImage(context.canvas, 0, 0, data.columns, data.rows, 0, 0, data.columns * scale, data.rows * scale);
  });
  const each = data.cell > 1 ? `A cell is ${data.cell} × ${data.cell} pairs.` : 'A cell is a pair.';
  return h('figure', { class: 'card' },
    h('h2', null, 'The mask'), h('div', { class: 'axis', 'aria-hidden': 'true' }, h('span', null, '↓ queries'), h('span', null, 'keys →')),
    canvas, key([['empty', 'nothing allowed'], ['part', 'some of a cell'], ['all', 'all of it']]),
    h('figcaption', null, h('code', null, data.mask), h('br'), each));
}

// segments of one part; the classes of a stride follow each other, as in the kernels
function plan(part, data) {
  const rows = part.classes.reduce((sum, one) => sum + one.rows, 0);
  const keys = part.classes.reduce((sum, one) => sum + one.keys, 0);
  const side = 960;
  const x = (n) => Math.round(n * side / keys);
  const y = (n) => Math.round(n * side * Math.min(1.4, rows / keys) / rows);
  const height = Math.max(24, y(rows));
  return picture(side, height, `${data.backend}: the segments of keys that every tile of ${data.tile_q} queries visits`, (context) => {
    context.fillStyle = colour('empty');
    context.fillRect(0, 0, side, height);
    let row = 0;
    let first = 0;
    for (const one of part.classes) {
      one.tiles.forEach((segments, n) => {
        const top = y(row + n * data.tile_q);
        const bottom = y(row + Math.min(one.rows, (n + 1) * data.tile_q));
        for (const [begin, end, kind] of segments) {
          context.fillStyle = colour(STATES[kind]);
          context.fillRect(x(first + begin), top, Math.max(1, x(first + end) - x(first + begin)), Math.max(1, bottom - top));
        }
      });
      row += one.rows;
      first += one.keys;
    }
    const step = side * data.tile_k / keys;
    if (part.step > 1 || step < 8) return;
    // the borders of tiles
    context.fillStyle = colour('sheet');
    context.globalAlpha = 0.35;
    for (let n = data.tile_k; n < keys; n += data.tile_k) context.fillRect(x(n) - 1, 0, 2, height);
    for (let n = data.tile_q; n < rows; n += data.tile_q) context.fillRect(0, y(n) - 1, side, 2);
  });
}

const NAMES = { cpu: 'CPU', triton: 'Triton', metal: 'Metal', webgpu: 'WebGPU' };

function card(data) {
  if (data.lacks) return h('section', { class: 'card' }, h('h2', null, NAMES[data.backend]), h('p', { class: 'note' }, data.lacks.join('; ')));
  const tiles = data.full + data.partial;
  const strides = data.parts.filter((part) => part.step > 1);
  return h('section', { class: 'card' },
    h('h2', null, NAMES[data.backend], h('small', null, `tiles of ${data.tile_q} × ${data.tile_k}`)),
    h('p', { class: 'big' }, percent(Math.max(0, data.skipped)), h('small', null, ' of the pairs never visited')),
    data.parts.map((part) => [
      part.step > 1 && h('p', { class: 'note' }, `Stride ${part.step}: its ${part.classes.length} classes next to each other, each of them dense.`), plan(part, data)]),
    terms([
      ['tiles', `${count(tiles)} of ${count(data.tiles)}`], ['full, partial', `${count(data.full)}, ${count(data.partial)}`],
      ['pairs visited', count(data.visited)], [`pairs allowed${data.exact ? '' : ' at most'}`, count(data.allowed)],
      ['visited / allowed', data.allowed ? (data.visited / data.allowed).toFixed(3) : '–'],
    ]), strides.length === 0 && h('details', null, h('summary', null, 'The plan as text'), h('pre', { tabindex: '0' }, data.plan)));
}

export async function draw(state, open) {
  const fields = { mask: state.mask, tq: state.tq, tk: state.tk, head: state.head };
  const [data, ...plans] = await Promise.all([
    ask('mask', fields), ...open.about.backends.map((backend) => ask('visits', { ...fields, backend })),
  ]);
  const heads = data.heads > 1 ? ` Counts are of all ${data.heads} heads.` : '';
  return {
    nodes: [h('div', { class: 'split' }, drawn(data, state), h('div', null, h('div', { class: 'cards' }, plans.map(card))))],
    note: `The tiles that each backend visits come from its plan, which needs no device.${heads}`,
  };
}
