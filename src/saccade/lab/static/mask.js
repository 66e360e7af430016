// a mask: its picture, and the tiles that each backend's plan visits

import { copies, drawing } from './copy.js';
import { Stage, plan } from './visits.js';
import { ask, bytes, colour, count, field, h, key, paintCells, percent, picture, rgb, terms } from './ui.js';

export const name = 'Masks';
export const title = 'Masks and the tiles that kernels visit';
export const lead = 'A mask is an expression. Kernels visit the tiles that hold an allowed pair, test the elements of partial ones, and skip the rest.';

const PARTS = [
  'causal()', 'window(127, 0)', 'prefix(64)', 'global_tokens(8)', 'strided(16)', 'dilated(8, 16)', 'chunked(128)',
  'keys(800)', 'documents(cu_seqlens=[0, 300, 700, 1024])',
];

export const controls = (about) => [
  { name: 'mask', label: 'Mask', kind: 'text', value: 'causal() & (window(127, 0) | prefix(64))', wide: 'full' },
  { name: 'tq', label: 'Queries', kind: 'number', value: 1024, least: 1, most: 4096 },
  { name: 'tk', label: 'Keys', kind: 'number', value: 1024, least: 1, most: 4096 },
  { name: 'dtype', label: 'Dtype', kind: 'select', value: 'bfloat16', options: about.dtypes },
  { name: 'd', label: 'Head size', kind: 'number', value: 128, least: 1, most: 1024 },
  { name: 'gpu', label: 'NVIDIA GPU', kind: 'select', value: 'h100', options: of(about, 'triton') },
  { name: 'head', label: 'Head', kind: 'number', value: 0, least: 0, most: 255, when: (state) => /per_head/.test(state.mask) },
];

// the devices of a backend
const of = (about, backend) => Object.keys(about.places).filter((device) => about.places[device] === backend);

// examples, and constructors to join to the current mask
export function actions(open) {
  const play = h('button', { type: 'button', 'data-key': 'play', onclick: () => stage.press() });
  stage = new Stage(play);
  // an exported page lists its masks
  if (open.about.offered) return [play];
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
    h('button', { type: 'button', onclick: add, 'data-key': 'add' }, 'Add'), play,
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
    canvas, copies(data.python, drawing(cells, data.rows, data.columns, STATES.map(colour), data.mask), canvas), key([['empty', 'nothing allowed'], ['part', 'some of a cell'], ['all', 'all of it']]),
    h('figcaption', null, h('code', null, data.mask), h('br'), each));
}

const NAMES = { cpu: 'CPU', triton: 'Triton', metal: 'Metal', webgpu: 'WebGPU' };
const titleOf = (data) => (data.backend === 'triton' ? `${NAMES.triton}, ${data.device}` : NAMES[data.backend]);

let stage = null;
export const leave = () => stage.stop();

const shows = [];
function played(part, data) {
  const { canvas, show } = plan(part, data);
  shows.push(show);
  return canvas;
}

function card(data) {
  if (data.lacks) return h('section', { class: 'card', 'data-device': data.device }, h('h2', null, titleOf(data)), h('p', { class: 'note' }, data.lacks.join('; ')));
  const tiles = data.full + data.partial;
  const strides = data.parts.filter((part) => part.step > 1);
  const text = [data.plan, ...Object.entries(data.kernels).map(([name, value]) => `${name}: ${value}`)].join('\n');
  return h('section', { class: 'card', 'data-device': data.device },
    h('h2', null, titleOf(data), h('small', null, `tiles of ${data.tile_q} × ${data.tile_k}`)),
    h('p', { class: 'big' }, percent(Math.max(0, data.skipped)), h('small', null, ' of the pairs never visited')),
    data.parts.map((part) => [
      part.step > 1 && h('p', { class: 'note' }, `Stride ${part.step}: its ${part.classes.length} classes next to each other, each of them dense.`), played(part, data)]),
    terms([
      ['tiles', `${count(tiles)} of ${count(data.tiles)}`], ['full, partial', `${count(data.full)}, ${count(data.partial)}`],
      ['pairs visited', count(data.visited)], [`pairs allowed${data.exact ? '' : ' at most'}`, count(data.allowed)],
      ['visited / allowed', data.allowed ? (data.visited / data.allowed).toFixed(3) : '–'],
    ]), strides.length === 0 && h('details', null, h('summary', null, 'The plan as text'), h('pre', { tabindex: '0' }, text)));
}

export async function draw(state, open) {
  const fields = { mask: state.mask, tq: state.tq, tk: state.tk, head: state.head };
  const shape = { ...fields, dtype: state.dtype, d: state.d };
  const [data, ...plans] = await Promise.all([
    ask('mask', fields), ...['cpu', state.gpu, 'm3', 'webgpu'].map((device) => ask('visits', { ...shape, device })),
  ]);
  shows.length = 0;
  const cards = plans.map(card);
  stage.reset([...shows]);
  const heads = data.heads > 1 ? ` Counts are of all ${data.heads} heads.` : '';
  return {
    nodes: [h('div', { class: 'split' }, drawn(data, state), h('div', null, h('div', { class: 'cards' }, cards)))],
    note: `The tiles that each backend visits come from its plan, which needs no device: the plan that saccade explain prints. In the animation, a GPU starts all query tiles of a head at once, and a thread of the CPU takes one after the other, the last first.${heads}`,
  };
}
