// key-value caches: one kv head per query head, groups, one for all

import { ask, count, h, size, svg, table } from './ui.js';

export const name = 'Cache sizes';
export const title = 'How large is the cache?';
export const lead = 'Every layer stores the keys and values of every token. Query heads that share key heads make the cache smaller.';

export const controls = (about) => [
  { name: 'model', label: 'Model', kind: 'select', value: about.models[0], options: about.models },
  { name: 'device', label: 'Device', kind: 'select', value: 'h100', options: Object.keys(about.devices) },
  { name: 'tokens', label: 'Tokens each', kind: 'number', value: 4096, least: 1, most: 16777216 },
  { name: 'batch', label: 'Sequences', kind: 'number', value: 64, least: 1, most: 65536 },
];

const FULL = { MHA: 'multi-head', GQA: 'grouped', MQA: 'multi-query', MLA: 'latent' };
const [ROW, LEFT, RIGHT] = [62, 92, 12];

function bars(data, WIDTH) {
  const most = Math.max(data.memory, ...data.groupings.map((g) => g.bytes)) * 1.04;
  const x = (v) => LEFT + v / most * (WIDTH - LEFT - RIGHT);
  const height = ROW * data.groupings.length + 34;
  const edge = x(data.memory);
  const label = data.groupings.map((g) => `${FULL[g.grouping]}: ${g.all}, ${g.fits ? 'fits' : 'does not fit'}`).join('; ');
  return svg('svg', { viewBox: `0 0 ${WIDTH} ${height}`, role: 'img', 'aria-label': `${label}; ${data.device} has ${data.memory_text}` },
    svg('line', { x1: edge, x2: edge, y1: 4, y2: height - 24, stroke: 'var(--ink)', 'stroke-width': 1.5, 'stroke-dasharray': '3 4' }),
    data.groupings.map((g, n) => {
      const width = Math.max(2, x(g.bytes) - LEFT);
      const text = `${g.all}${g.fits ? '' : ', does not fit'}`;
      return [
        svg('text', { x: LEFT - 12, y: 26 + ROW * n, 'text-anchor': 'end', class: g.own ? 'strong' : '' }, FULL[g.grouping]),
        svg('text', { x: LEFT - 12, y: 42 + ROW * n, 'text-anchor': 'end' }, g.kv_heads === null ? 'no heads' : `${g.kv_heads} kv`),
        svg('rect', { x: LEFT, y: 14 + ROW * n, width, height: 18, rx: 3, fill: g.fits ? 'var(--all)' : 'var(--accent)' }),
        svg('text', { x: LEFT, y: 48 + ROW * n }, text),
      ];
    }),
    svg('text', { x: edge > WIDTH / 2 ? edge - 4 : edge + 4, y: height - 8, 'text-anchor': edge > WIDTH / 2 ? 'end' : 'start', class: 'strong' }, `${data.device}: ${data.memory_text}`));
}

const formula = (m, projections) => (m.latent
  ? `The model stores a latent of ${m.latent} numbers per token and layer, not keys and values; its projection is [${projections.latent.join(', ')}].`
  : `2 · layers · kv heads · head size · bytes per token. The model itself has ${m.kv_heads} kv heads; its key projection is [${projections.k.join(', ')}].`);

export async function draw(state, open) {
  const data = await ask('caches', { model: state.model, device: state.device, tokens: state.tokens, batch: state.batch });
  const m = data.model;
  const row = (first, g) => [first, g.kv_heads ?? '–', `${Number(g.smaller.toPrecision(3))} ×`, size(g.token), size(g.sequence), size(g.all), g.fits ? 'fits' : 'no', g.read, count(g.most_tokens)];
  const head = ['', 'kv heads', 'times smaller', 'per token', 'per sequence', 'all sequences', data.device, 'read once', 'tokens that fit'];
  return {
    nodes: [
      h('figure', { class: 'card' },
        h('h2', null, `${m.name}: ${count(data.batch)} sequences of ${count(data.tokens)} tokens`, h('small', null, `${m.layers} layers, ${m.heads} heads of ${m.head_dim}, ${m.dtype}`)),
        bars(data, open.width), h('figcaption', null, `${formula(m, data.projections)}${m.window ? ` ${m.local_layers} of the ${m.layers} layers store at most ${count(m.window)} tokens.` : ''}`, m.source && ` Dimensions: ${m.source}.`)),
      h('div', { class: 'card below' }, table(`Groupings of ${m.name}`, head, data.groupings.map((g) => row(`${FULL[g.grouping]}${g.own ? ' (its own)' : ''}`, g)))),
      h('div', { class: 'card below' }, table('Published models', head, data.models.map((g) => row(g.name, g)))),
    ],
    note: 'Weights and activations need more memory.',
  };
}
