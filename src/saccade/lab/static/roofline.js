// the roofline of a shape on a named device

import { ask, count, h, short, size, svg, table } from './ui.js';

export const name = 'Roofline';
export const title = 'Compute-bound or memory-bound?';
export const lead = 'Work with few operations per byte waits for memory; work to the right of the ridge waits for arithmetic. Prefill and decode of one shape are far apart.';

export const controls = (about) => [
  { name: 'device', label: 'Device', kind: 'select', value: 'h100', options: Object.keys(about.devices) },
  { name: 'dtype', label: 'Dtype', kind: 'select', value: 'bfloat16', options: ['bfloat16', 'float16', 'float32', 'float64'] },
  { name: 'batch', label: 'Sequences', kind: 'number', value: 1, least: 1, most: 256 },
  { name: 't', label: 'Tokens', kind: 'number', value: 4096, least: 1, most: 131072 },
  { name: 'heads', label: 'Heads', kind: 'number', value: 32, least: 1, most: 256 },
  { name: 'kv', label: 'KV heads', kind: 'number', value: 8, least: 1, most: 256 },
  { name: 'd', label: 'Head size', kind: 'number', value: 128, least: 1, most: 1024 },
  { name: 'mask', label: 'Mask', kind: 'text', value: 'causal()', wide: 'wide' },
];

const NAMES = { prefill: 'prefill', backward: 'backward', decode: 'decode, one token', naive: 'prefill, scores stored' };
// a mark of its own for each kind of work, so that colour alone distinguishes none
const MARKS = {
  prefill: (x, y) => svg('circle', { cx: x, cy: y, r: 7 }),
  backward: (x, y) => svg('rect', { x: x - 6, y: y - 6, width: 12, height: 12 }),
  decode: (x, y) => svg('path', { d: `M${x} ${y - 8}l8 14h-16z` }),
  naive: (x, y) => svg('path', { d: `M${x} ${y - 8}l8 8l-8 8l-8 -8z`, 'fill-opacity': 0.001, 'stroke-width': 2.5 }),
};
const NARROW = 480;
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 14, 18, 46];

function scale(values, from, to) {
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  const at = (v) => from + (Math.log10(v) - low) / (high - low) * (to - from);
  return { at, ticks: Array.from({ length: high - low + 1 }, (_, n) => 10 ** (low + n)) };
}

const prefix = (v) => {
  for (const [unit, word] of [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M']]) if (v >= unit) return `${short(v / unit)} ${word}`;
  return short(v);
};

function chart(data, WIDTH) {
  const HEIGHT = Math.round(Math.min(420, 200 + WIDTH / 4));
  const works = data.works.filter((work) => work.intensity > 0);
  const x = scale([...data.roof.map((p) => p[0]), ...works.map((w) => w.intensity)], LEFT, WIDTH - RIGHT);
  const y = scale([...data.roof.map((p) => p[1] / 2), data.peak * 1.1, ...works.map((w) => w.rate)], HEIGHT - BOTTOM, TOP);
  const line = data.roof.map(([a, b]) => `${x.at(a)},${y.at(b)}`).join(' ');
  const label = `${data.device}: ${works.map((w) => `${NAMES[w.kind]} ${short(w.intensity)} flop per byte, ${w.bound}-bound`).join('; ')}`;
  const ridge = x.at(data.ridge);
  // a name goes to the left of its mark if another mark is close on the right; names that are close are one below another
  const placed = works.map((work) => [x.at(work.intensity), y.at(work.rate)]);
  const names = works.map((work, n) => {
    const crowd = placed.slice(0, n).filter(([a, b]) => Math.abs(a - placed[n][0]) < 130 && Math.abs(b - placed[n][1]) < 30).length;
    const close = placed.some(([a, b]) => a > placed[n][0] && a - placed[n][0] < 130 && Math.abs(b - placed[n][1]) < 45);
    const end = placed[n][0] > WIDTH - 150 || close;
    return svg('text', { x: placed[n][0] + (end ? -13 : 13), y: placed[n][1] + 20 + 17 * crowd, 'text-anchor': end ? 'end' : 'start', class: 'strong' }, NAMES[work.kind]);
  });
  return svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': label },
    x.ticks.map((v, n) => [svg('line', { x1: x.at(v), x2: x.at(v), y1: TOP, y2: HEIGHT - BOTTOM, stroke: 'var(--line)' }),
      (WIDTH > 420 || n % 2 === 0) && svg('text', { x: x.at(v), y: HEIGHT - BOTTOM + 18, 'text-anchor': 'middle' }, v >= 1e4 || v < 0.01 ? `10${exponent(v)}` : short(v))]),
    y.ticks.map((v) => [svg('line', { x1: LEFT, x2: WIDTH - RIGHT, y1: y.at(v), y2: y.at(v), stroke: 'var(--line)' }),
      svg('text', { x: LEFT - 8, y: y.at(v) + 4, 'text-anchor': 'end' }, prefix(v))]),
    svg('text', { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, 'text-anchor': 'middle' }, 'operations per byte'),
    svg('text', { x: LEFT, y: 8 }, 'flop/s'),
    svg('line', { x1: ridge, x2: ridge, y1: TOP, y2: HEIGHT - BOTTOM, stroke: 'var(--soft)', 'stroke-dasharray': '2 5' }),
    svg('text', { x: ridge + 7, y: HEIGHT - BOTTOM - 8 }, `ridge ${short(data.ridge)}`),
    svg('polyline', { points: line, fill: 'none', stroke: 'var(--ink)', 'stroke-width': 2, 'stroke-linejoin': 'round' }),
    works.map((work, n) => marked(work, ...placed[n])), WIDTH < NARROW ? [] : names);
}

function marked(work, x, y) {
  const mark = MARKS[work.kind](x, y);
  mark.setAttribute('fill', work.kind === 'naive' ? 'var(--sheet)' : work.bound === 'compute' ? 'var(--all)' : 'var(--accent)');
  mark.setAttribute('stroke', work.kind === 'naive' ? 'var(--accent)' : 'var(--sheet)');
  return mark;
}

// where names have no room next to their marks
const legend = (works) => h('ul', { class: 'key' }, works.map((work) => h('li', null,
  svg('svg', { viewBox: '0 0 20 20', 'aria-hidden': 'true' }, marked(work, 10, 10)), NAMES[work.kind])));

const exponent = (v) => [...String(Math.round(Math.log10(v)))].map((c) => (c === '-' ? '⁻' : '⁰¹²³⁴⁵⁶⁷⁸⁹'[c])).join('');

export async function draw(state, open) {
  const fields = Object.fromEntries(['device', 'dtype', 'batch', 't', 'heads', 'kv', 'd', 'mask'].map((name) => [name, state[name]]));
  const data = await ask('roofline', fields);
  const rows = data.works.map((work) => [NAMES[work.kind], `${prefix(work.flops)}flop`, size(work.moved), short(work.intensity),
    work.bound, work.time, `${prefix(work.rate)}flop/s`]);
  return {
    nodes: [
      h('figure', { class: 'card' }, h('h2', null, data.device, h('small', null, data.source)), chart(data, open.width), open.width < NARROW && legend(data.works),
        h('figcaption', null, `Peak ${prefix(data.peak)}flop/s, ${prefix(data.bandwidth)}B/s. Scores are never stored: those of all ${count(Number(state.heads) * Number(state.batch))} heads would take ${data.scores}.`)),
      h('div', { class: 'card below' }, table('Least work and time of one call', ['', 'operations', 'bytes moved', 'flop per byte', 'bound by', 'time at least', 'rate at most'], rows)),
    ],
    note: 'Only allowed pairs are counted, and each array is moved once. No kernel can be faster.',
  };
}
