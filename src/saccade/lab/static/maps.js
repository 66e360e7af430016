// attention maps of a model's layers and heads on a text

import { ask, bytes, colour, h, mix, paintCells, percent, picture, rgb } from './ui.js';

export const name = 'Attention maps';
export const title = 'What each head attends to';
export const lead = 'The weights of every layer and head of your own model on a text, computed by this library on this machine.';

const TEXT = 'def area(width, height):\n    """Area of a rectangle."""\n    return width * height\n';

export const controls = (about) => (about.model ? [
  { name: 'text', label: 'Text', kind: 'area', value: TEXT, wide: 'full' },
  { name: 'layer', label: 'Layer', kind: 'number', value: 0, least: 0, most: 999 },
  { name: 'head', label: 'Head', kind: 'number', value: 0, least: 0, most: 999 },
  { name: 'token', label: 'Query token', kind: 'number', value: '', least: 0, most: 999 },
] : []);

// the square root shows small weights too; a later token is masked, in a colour that no weight has
function map(weights, at, T, label) {
  const [masked, none, full] = [rgb(colour('masked')), rgb(colour('sheet')), rgb(colour('all'))];
  return picture(T, T, label, (context) => paintCells(context, T, T, (n) => (
    n % T > Math.floor(n / T) ? masked : mix(none, full, Math.sqrt(weights[at + n] / 65535)))));
}

const shown = (text) => (text === ' ' ? '␣' : text.replaceAll('\n', '⏎').replaceAll('\t', '⇥'));

// the text, with a bar under each token: how much the chosen token attends to it
function line(tokens, weights, at, token, open) {
  const T = tokens.length;
  const most = Math.max(...weights.subarray(at + token * T, at + (token + 1) * T), 1);
  return h('ol', { class: 'tokens', 'aria-label': 'Tokens: choose the query to show' }, tokens.map((text, n) => {
    const weight = weights[at + token * T + n] / 65535;
    const bar = h('i', { 'aria-hidden': 'true' });
    bar.style.width = `${Math.round(100 * weights[at + token * T + n] / most)}%`;
    return h('li', null, h('button', {
      type: 'button', 'data-key': `token-${n}`, 'aria-pressed': String(n === token), title: `${shown(text)}: ${percent(weight)}`,
      onclick: () => open.set({ token: String(n) }),
    }, shown(text), bar));
  }));
}

function most(tokens, weights, at, token) {
  const T = tokens.length;
  const row = Array.from({ length: T }, (_, n) => [n, weights[at + token * T + n] / 65535]);
  row.sort((a, b) => b[1] - a[1]);
  return h('dl', { class: 'narrow' }, row.slice(0, 6).filter(([, weight]) => weight > 0).map(([n, weight]) => [
    h('dt', null, h('code', null, shown(tokens[n])), ` at ${n}`), h('dd', null, percent(weight))]));
}

function heads(data, weights, layer, head, open) {
  const T = data.tokens.length;
  const buttons = [];
  for (let l = 0; l < data.layers; l++) {
    for (let n = 0; n < data.heads; n++) {
      buttons.push(h('button', {
        type: 'button', 'data-key': `head-${l}-${n}`, 'aria-pressed': String(l === layer && n === head),
        'aria-label': `layer ${l}, head ${n}`, title: `layer ${l}, head ${n}`,
        onclick: () => open.set({ layer: String(l), head: String(n) }),
      }, map(weights, (l * data.heads + n) * T * T, T, '')));
    }
  }
  const grid = h('div', { class: 'heads' }, buttons);
  grid.style.gridTemplateColumns = `repeat(${data.heads}, minmax(24px, 1fr))`;
  return h('div', { class: 'scroll' }, grid);
}

function lacking() {
  return h('div', { class: 'card' }, h('h2', null, 'No model is shown'),
    h('p', null, 'Start the lab with the folder of a model: a run of ', h('code', null, 'saccade train'),
      ', or a checkpoint with config.json, safetensors and tokenizer.json.'),
    h('pre', { tabindex: '0' }, 'saccade train\nsaccade lab --model demo'));
}

export async function draw(state, open) {
  if (!open.about.model) return { nodes: [lacking()], note: '' };
  const data = await ask('maps', { text: state.text });
  const T = data.tokens.length;
  const raw = bytes(data.weights);
  const weights = new Uint16Array(raw.buffer);
  const within = (value, below, none) => (value === '' ? none : Math.max(0, Math.min(below - 1, Math.trunc(Number(value)) || 0)));
  const layer = within(state.layer, data.layers, 0);
  const head = within(state.head, data.heads, 0);
  const token = within(state.token, T, T - 1);
  const at = (layer * data.heads + head) * T * T;
  const label = `Layer ${layer}, head ${head}: weights of ${T} queries, downwards, on ${T} keys`;
  return {
    nodes: [
      h('section', { class: 'card' }, h('h2', null, `Token ${token}`, h('small', null, `layer ${layer}, head ${head}`)),
        line(data.tokens, weights, at, token, open), most(data.tokens, weights, at, token)),
      h('div', { class: 'split below' },
        h('figure', { class: 'card' }, h('h2', null, `Layer ${layer}, head ${head}`),
          h('div', { class: 'axis', 'aria-hidden': 'true' }, h('span', null, '↓ queries'), h('span', null, 'keys →')), map(weights, at, T, label),
          h('figcaption', null, 'The square root of a weight sets its colour, so that small weights show. Later tokens are masked.')),
        h('section', { class: 'card' }, h('h2', null, 'All heads', h('small', null, 'one row per layer')), heads(data, weights, layer, head, open))),
    ],
    note: `${data.model}: ${data.layers} layers, ${data.heads} heads, ${T} tokens.`,
  };
}
