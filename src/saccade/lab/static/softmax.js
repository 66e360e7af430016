// the online softmax, tile by tile

import { ask, colour, h, key, mix, paintCells, picture, rgb, short, svg } from './ui.js';

export const name = 'Online softmax';
export const title = 'Online softmax, tile by tile';
export const lead = 'Each row stores its largest score m, the sum l of its weights and the weighted sum acc of the values. When a larger score comes, l and acc are multiplied by exp(m_old − m).';

const own = (state) => state.example === 'own';
const scored = (state) => state.example === 'scores';
const fieldsOf = { own: ['t', 'd', 'seed', 'mask'], scores: ['scores', 'mask'] };
export const controls = () => [
  { name: 'example', label: 'Example', kind: 'select', value: 'grid', options: [
    ['grid', '8 tokens of 128 numbers'], ['weights', '4 tokens, causal, known weights'], ['scores', 'your own scores'], ['own', 'random numbers of any size']] },
  { name: 'scores', label: 'Scores, one line per query', kind: 'area', value: '1 2 3 100\n4 3 2 1', wide: 'full', when: scored },
  { name: 't', label: 'Tokens', kind: 'number', value: 12, least: 1, most: 32, when: own },
  { name: 'd', label: 'Head size', kind: 'number', value: 8, least: 1, most: 128, when: own },
  { name: 'seed', label: 'Seed', kind: 'number', value: 0, least: 0, most: 9999, when: own },
  { name: 'mask', label: 'Mask', kind: 'text', value: 'full()', when: (state) => own(state) || scored(state) },
  { name: 'bq', label: 'Queries per tile', kind: 'number', value: 2, least: 1, most: 8 },
  { name: 'bk', label: 'Keys per tile', kind: 'number', value: 2, least: 1, most: 8 },
  { name: 'step', label: 'Step', kind: 'range', value: 0, least: 0, most: 15, wide: 'wide' },
];

let timer = 0;
export const leave = () => { clearInterval(timer); timer = 0; };

export function actions(open) {
  const move = (by) => {
    const to = Number(open.state.step) + by;
    const last = Number(open.form.elements.step.max);
    open.set({ step: String(Math.max(0, Math.min(last, to))) });
    if (to >= last) stop();
  };
  const play = h('button', { type: 'button', 'data-key': 'play', onclick: () => (timer ? stop() : start()) }, 'Play');
  const start = () => {
    if (Number(open.state.step) >= Number(open.form.elements.step.max)) open.set({ step: '0' });
    timer = setInterval(() => move(1), 900);
    play.textContent = 'Pause';
  };
  const stop = () => { leave(); play.textContent = 'Play'; };
  return [h('div', { class: 'buttons' },
    h('button', { type: 'button', 'data-key': 'back', onclick: () => move(-1) }, '← Back'),
    h('button', { type: 'button', 'data-key': 'next', class: 'strong', onclick: () => move(1) }, 'Next →'), play)];
}

// every score of the head: scores so far by their weight under the final m, others faint
function grid(data, now, open) {
  const { queries, keys, tile_q: bq, tile_k: bk } = data;
  const size = Math.min(115, 460 / Math.max(queries, keys));
  const marks = [];
  data.steps.forEach((step, n) => {
    const [top, left] = [step.i * bq, step.j * bk];
    const rows = Math.min(bq, queries - top);
    const columns = Math.min(bk, keys - left);
    const [light, dark] = [rgb(colour('empty')), rgb(colour('all'))];
    for (let a = 0; a < rows; a++) {
      for (let b = 0; b < columns; b++) {
        const seen = step.s && step.s[a][b] !== null;
        const share = seen && n <= now ? 0.14 + 0.86 * step.p[a][b] : seen ? 0.05 : 0;
        marks.push(svg('rect', {
          x: (left + b) * size, y: (top + a) * size, width: size - 1.5, height: size - 1.5, rx: 2,
          fill: `rgb(${mix(light, dark, share)})`, opacity: seen ? 1 : 0.35,
        }));
      }
    }
  });
  const frames = data.steps.map((step, n) => frame(step, n, n === now, size, data, open));
  // above its neighbours
  frames.push(...frames.splice(now, 1));
  const label = 'Scores by query, downwards, and key; the tile of this step is framed';
  const drawn = svg('svg', { viewBox: `-2 -2 ${keys * size + 4} ${queries * size + 4}`, role: 'img', 'aria-label': label }, marks, frames);
  drawn.style.maxWidth = `${Math.round(keys * size + 4)}px`;
  return drawn;
}

function frame(step, n, current, size, data, open) {
  const width = Math.min(data.tile_k, data.keys - step.j * data.tile_k) * size;
  const height = Math.min(data.tile_q, data.queries - step.i * data.tile_q) * size;
  return svg('rect', {
    x: step.j * data.tile_k * size - 0.75, y: step.i * data.tile_q * size - 0.75, width, height, rx: 3, fill: 'transparent',
    stroke: colour(current ? 'accent' : 'line'), 'stroke-width': current ? 3 : 1,
    onclick: () => open.set({ step: String(n) }),
  });
}

function matrix(label, rows, shade) {
  const body = rows.map((row) => h('tr', null, row.map((x) => {
    const cell = h('td', { class: x === null ? 'none' : undefined }, x === null ? '·' : short(x));
    if (shade && x) cell.style.background = `rgba(${colour('shade')}, ${0.06 + 0.24 * x})`;
    return cell;
  })));
  return h('table', { class: 'matrix', 'aria-label': label }, h('tbody', null, body));
}

// acc as numbers where they are few, else as a strip: blue above 0, red below
function values(label, rows) {
  if (rows[0].length <= 8) return matrix(label, rows, false);
  const most = Math.max(...rows.flat().map(Math.abs), 1e-9);
  const [none, cool, warm] = ['empty', 'cool', 'warm'].map((name) => rgb(colour(name)));
  const flat = rows.flat();
  const canvas = picture(rows[0].length, rows.length, `${label}: ${rows.length} rows of ${rows[0].length} numbers, the largest ${short(most)}`,
    (context) => paintCells(context, rows.length, rows[0].length, (n) => mix(none, flat[n] > 0 ? cool : warm, Math.abs(flat[n]) / most)));
  canvas.style.height = `${Math.min(112, 28 * rows.length)}px`;
  return canvas;
}

const part = (formula, ...content) => h('div', null, h('p', { class: 'formula' }, formula), content);

// the page of the documentation, where it is next to this one
const derivation = (docs) => ['Why they differ only by exp(m): ', docs ? h('a', { href: `${docs}inside/derivation.html` }, 'the derivation') : h('code', null, 'docs/inside/derivation.md'), '.'];

function numbers(step, data, docs) {
  const row = (n) => `query ${step.i * data.tile_q + n}`;
  const state = h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'State of each row' }, h('table', null,
    h('thead', null, h('tr', null, ['', 'm_old', 'm', 'factor', 'l_old', 'l', 'naive'].map((text, n) => (n ? h('th', { scope: 'col', class: 'n' }, text) : h('td', null))))),
    h('tbody', null, step.m.map((m, n) => h('tr', null, h('th', { scope: 'row' }, row(n)),
      [step.m_old[n], m, step.correction[n], step.l_old[n], step.l[n], step.naive[n]].map((x) => (
        h('td', { class: x === 'overflow' ? 'n bad' : 'n' }, typeof x === 'string' ? x : short(x)))))))));
  return [
    h('div', { class: 'flow' },
      part(`S = ${short(data.scale)} · Q Kᵀ`, matrix('Scores', step.s, false)), part('P = exp(S − m)', matrix('Weights before division', step.p, true))),
    part('m = max(m_old, max S)    l = l_old · exp(m_old − m) + Σ P', state, h('p', { class: 'note' },
      'The factor is exp(m_old − m). The naive sum Σ exp(S) does not subtract m: it is l · exp(m), and in float32 it overflows from a score of 89 on. ', derivation(docs))),
    part('acc = acc · exp(m_old − m) + P V', values('acc', step.acc), step.acc[0].length > 8 && h('p', { class: 'note' }, 'One column per dimension: blue above 0, red below.')),
    step.o && part('o = acc / l', values('o', step.o)),
    step.o && part('lse = m + log l', matrix('lse', [step.lse], false)),
  ].filter(Boolean).map((node) => h('div', { class: 'card below' }, node));
}

export async function draw(state, open) {
  const fields = { example: state.example, bq: state.bq, bk: state.bk };
  for (const name of fieldsOf[state.example] ?? []) fields[name] = state[name];
  const data = await ask('softmax', fields);
  const last = data.steps.length - 1;
  const slider = open.form.elements.step;
  slider.max = last;
  const now = Math.max(0, Math.min(last, Math.trunc(Number(state.step)) || 0));
  slider.value = now;
  const step = data.steps[now];
  const where = `Step ${now + 1} of ${last + 1}: query tile ${step.i}, key tile ${step.j}`;
  const content = step.s ? numbers(step, data, open.about.docs) : [h('div', { class: 'card' }, h('p', null, 'The plan skips this tile: none of its queries may attend to any of its keys, so it is not loaded.'))];
  return {
    nodes: [h('div', { class: 'split' },
      h('figure', { class: 'card' }, h('h2', null, where), grid(data, now, open),
        key([['all', 'weight exp(s − m) as the step found it, paler where smaller'], ['empty', 'masked or not reached'], ['accent', 'this step']]),
        h('figcaption', null, `${data.queries} queries, ${data.keys} keys, head size ${data.head_dim}, ${data.mask || 'all keys allowed'}. Queries go down, keys to the right.`)),
      h('div', null, content))],
    note: step.o ? `${where}. This is the last tile of these queries: after one division, o and lse are complete.` : `${where}.`,
  };
}
