// the documented and the tiled WGSL kernels on the browser's GPU, checked and timed; without a GPU, what would be submitted

import { attention, compare } from './oracle.js';
import { MISSING, gpu, run } from './device.js';
import { ask, bytes, count, h, short, table, terms } from './ui.js';

export const name = 'Your GPU';
export const title = 'The kernels on your own GPU';
export const lead = 'The same WGSL that Python submits runs here in the page. Its outputs are compared with attention in float64, by the tolerance rule of the test suite.';

const trained = (state) => state.direction !== 'decode';
export const controls = () => [
  { name: 'direction', label: 'Direction', kind: 'select', value: 'forward', options: ['forward', 'backward', 'decode'] },
  { name: 't', label: 'Tokens', kind: 'number', value: 256, least: 1, most: 8192 },
  { name: 'heads', label: 'Heads', kind: 'number', value: 4, least: 1, most: 32 },
  { name: 'kv', label: 'KV heads', kind: 'number', value: 2, least: 1, most: 32 },
  { name: 'd', label: 'Head size', kind: 'number', value: 64, least: 4, most: 256, step: 4 },
  { name: 'seed', label: 'Seed', kind: 'number', value: 0, least: 0, most: 9999 },
  { name: 'mask', label: 'Mask (the documented kernels take causal() alone)', kind: 'text', value: 'causal()', wide: 'wide', when: trained },
];

// the measured results, and the fields that they belong to
let results = null;
const keyOf = (state) => JSON.stringify(fieldsOf(state));
export const leave = () => { results = null; };

export function actions(open) {
  const button = h('button', {
    type: 'button', class: 'strong', 'data-key': 'run', onclick: async () => {
      button.disabled = true;
      button.textContent = 'Running…';
      const state = { ...open.state };
      const mine = { key: keyOf(state) };
      results = mine;
      await open.draw();
      for (const set of Object.keys(SETS)) {
        mine[set] = await measured(set, state).catch((error) => ({ error: error.message }));
        await open.draw();
      }
      button.disabled = false;
      button.textContent = 'Run again';
    },
  }, 'Run');
  return [h('div', { class: 'buttons' }, button)];
}

const SETS = {
  documented: ['Documented kernels', 'one workgroup a query; an interface for other hosts'],
  tiled: ['Tiled kernels', 'what a call of the library submits'],
};

const fieldsOf = (state) => Object.fromEntries(['direction', 't', 'heads', 'kv', 'd', 'seed', ...(trained(state) ? ['mask'] : [])].map((n) => [n, state[n]]));

async function measured(set, state) {
  const here = await gpu();
  const job = await ask('kernel', { ...fieldsOf(state), set, ...here.limits, software: here.software ? '1' : '0' });
  const numbers = (name) => new Float32Array(bytes(job.buffers[job.arrays[name].buffer].data).buffer).subarray(0, job.arrays[name].shape.reduce((a, b) => a * b, 1));
  const names = Object.keys(job.tolerance);
  const done = await run(here, job, names, here.software ? 0.3 : 1);
  const bits = bytes(job.allowed);
  const allowed = (t, j) => { const n = t * job.keys + j; return (bits[n >> 3] >> (7 - (n & 7))) & 1; };
  const grad = 'dq' in job.tolerance ? numbers('do') : null;
  const exact = attention({ ...job, allowed }, numbers('q'), numbers('k'), numbers('v'), grad);
  const met = names.map((one) => {
    const tolerance = job.tolerance[one];
    const limit = typeof tolerance === 'number' ? tolerance : new Float32Array(bytes(tolerance).buffer);
    return { name: one, ...compare(done.arrays[one], exact[one], limit) };
  });
  return { job, met, here, ...done };
}

function card(set, found) {
  const [label, what] = SETS[set];
  const head = [h('h2', null, label), h('p', { class: 'note' }, what)];
  if (!found) return h('section', { class: 'card' }, head, h('p', { class: 'note' }, results ? 'Waiting for its turn…' : 'Not run yet.'));
  if (found.error) return h('section', { class: 'card' }, head, h('p', { class: 'error' }, found.error));
  const ok = found.met.every((one) => one.ok);
  const middle = found.milliseconds[Math.floor(found.milliseconds.length / 2)];
  return h('section', { class: 'card', 'data-set': set, 'data-ok': String(ok) }, head,
    h('p', { class: 'big' }, `${short(middle, 3)} ms`, h('small', null, `${short(found.job.flops / middle / 1e6, 3)} GFLOP/s`)),
    h('p', { class: ok ? 'good' : 'bad' }, ok ? '✓ equal to float64 within the rule' : '✗ outside the tolerance rule'),
    table('Largest difference from float64', ['', 'error', 'allowed', ''], found.met.map((one) => [one.name, short(one.error, 3), short(one.allowed, 3), one.ok ? '✓' : '✗'])),
    terms([
      ['timed', `${found.milliseconds.length} runs, ${found.byClock ? 'device clock' : 'wall clock'}`], ['compiled in', `${short(found.compile, 3)} ms`],
    ]),
    recorded(found.job));
}

// 0, 1, 2 and 5 as 0–2 5
const ranges = (numbers) => numbers.map((n, i) => (numbers[i - 1] !== n - 1 ? ` ${n}` : numbers[i + 1] === n + 1 ? '' : `–${n}`)).join('').trim();

// the dispatches of a job, its buffers, and its shaders
function recorded(job) {
  const named = Object.entries(job.arrays);
  const roleOf = (n) => named.filter(([, array]) => array.buffer === n).map(([name, array]) => `${name} [${array.shape.join(', ')}]`).join(', ');
  const steps = job.steps.map((step) => [step.entry,
    [step.grid.join(' × '), h('small', null, `of ${step.threads.filter((n) => n > 1).join(' × ') || '1'} threads, ${count(step.memory)} B`)],
    ranges(step.bindings.map(([buffer]) => buffer))]);
  const buffers = job.buffers.map((buffer, n) => [String(n), roleOf(n) || 'internal', `${count(buffer.size)} B`, buffer.data ? 'numbers' : 'zeros']);
  return [
    table('Dispatches; threads and memory are of one workgroup', ['', 'workgroups', 'buffers'], steps),
    h('details', null, h('summary', null, `${buffers.length} buffers`), table('Buffers before the first dispatch', ['', 'array', 'size', 'content'], buffers)),
    job.texts.map((text, n) => h('details', null, h('summary', null, `WGSL of ${job.steps.find((step) => step.text === n).entry}`), h('pre', { tabindex: '0' }, text))),
  ];
}

// where nothing can run: what a call would submit to a device with these limits
const LIMITS = { 'max-storage-buffers-per-shader-stage': 10 };

async function unrun(state) {
  return Promise.all(Object.entries(SETS).map(async ([set, [label, what]]) => {
    const job = await ask('kernel', { ...fieldsOf(state), set, software: '0', ...LIMITS }).catch((error) => error);
    if (job.field && set === 'tiled') throw job;
    return h('section', { class: 'card', 'data-recorded': set }, h('h2', null, label), h('p', { class: 'note' }, what),
      job instanceof Error ? h('p', { class: 'error' }, job.message) : recorded(job));
  }));
}

export async function draw(state) {
  if (results && results.key !== keyOf(state)) results = null;
  let here;
  try {
    here = await gpu();
  } catch (error) {
    return {
      nodes: [h('div', { class: 'error', role: 'alert' }, error.message),
        h('p', null, 'This is what a call would submit: its dispatches, its buffers and its shaders.'), h('div', { class: 'split even' }, await unrun(state))],
      note: error.message === MISSING ? 'All other views work without it.' : '',
    };
  }
  const note = here.software ? 'This is a software adapter: results are correct, but slow.' : '';
  return {
    nodes: [h('p', null, 'Adapter: ', h('strong', null, here.name), `. ${note}`), h('div', { class: 'split even' }, Object.keys(SETS).map((set) => card(set, results?.[set])))],
    note: results ? 'The library draws one set of inputs from the seed for both.' : 'Press Run. Both sets of kernels get the same inputs.',
  };
}
