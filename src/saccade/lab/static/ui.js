// elements, controls, numbers, and the one way to ask for answers

import { answer } from './server.js';

export { bytes } from './bytes.js';

const SVG = 'http://www.w3.org/2000/svg';

// h('p', {class: 'note', onclick}, 'text', child): an element; svg(...) likewise
function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'value' || name === 'checked') element[name] = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
export const h = (name, attributes, ...children) => make(document.createElement(name), attributes, children);
export const svg = (name, attributes, ...children) => make(document.createElementNS(SVG, name), attributes, children);

// numbers: few digits, thin spaces between thousands, minus as a minus
export function short(x, digits = 4) {
  if (x === null || x === undefined) return '−∞';
  if (x === 0) return '0';
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-3 ? x.toExponential(digits - 2) : String(Number(x.toPrecision(digits)));
  return text.replace(/^-/, '−').replace('e-', 'e−').replace('e+', 'e');
}
export const count = (n) => n.toLocaleString('en').replaceAll(',', '\u202f');
export const percent = (x) => `${(100 * x).toFixed(1)} %`;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// the answer of a view; the same question is asked once. an error throws with its words, and its field where it is known
const asked = new Map();
export async function ask(view, fields = {}) {
  const question = `${view}?${new URLSearchParams(fields)}`;
  if (!asked.has(question)) {
    if (asked.size > 60) asked.delete(asked.keys().next().value);
    asked.set(question, answer(view, fields).then((data) => {
      if (data.error !== undefined) throw Object.assign(new Error(data.error), { field: data.field });
      return data;
    }));
    asked.get(question).catch(() => asked.delete(question));
  }
  return asked.get(question);
}

// a labelled control; spec {name, label, kind: number | text | select | area | range, options, least, most, hidden, wide}
export function field(spec, value, changed) {
  const id = `field-${spec.name}`;
  const given = { id, name: spec.name, 'data-key': id };
  let control;
  if (spec.kind === 'select') {
    const choices = spec.options.map((o) => (Array.isArray(o) ? o : [o, o]));
    control = h('select', given, choices.map(([word, text]) => h('option', { value: word }, text)));
  } else if (spec.kind === 'area') control = h('textarea', { ...given, rows: 3, spellcheck: 'false' });
  else {
    control = h('input', {
      ...given, type: spec.kind, min: spec.least, max: spec.most, step: spec.kind === 'text' ? undefined : spec.step ?? 1,
      spellcheck: 'false', autocomplete: 'off', maxlength: spec.kind === 'text' ? 4000 : undefined,
    });
  }
  control.value = value;
  let timer = 0;
  const tell = () => changed(spec.name, control.value);
  control.addEventListener('input', () => {
    clearTimeout(timer);
    timer = setTimeout(tell, spec.kind === 'select' || spec.kind === 'range' ? 0 : 250);
  });
  const label = h('label', { for: id }, spec.label);
  return h('div', { class: `field ${spec.kind} ${spec.wide ?? ''}`, 'data-field': spec.name }, label, control);
}

export const table = (caption, head, rows) => h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption },
  h('table', null, h('caption', null, caption),
    h('thead', null, h('tr', null, head.map((text, n) => (text ? h('th', { scope: 'col', class: n ? 'n' : undefined }, text) : h('td'))))),
    h('tbody', null, rows.map((row) => h('tr', null, row.map((cell, n) => (
      n ? h('td', { class: 'n' }, cell) : h('th', { scope: 'row' }, cell))))))));

// '1.25 GiB (1.342 GB)' on two lines
export const size = (text) => {
  const [binary, decimal] = text.split(' (');
  return decimal ? [binary, h('small', null, decimal.slice(0, -1))] : text;
};

export const terms = (pairs) => h('dl', null, pairs.map(([name, value]) => [h('dt', null, name), h('dd', null, value)]));

export const key = (entries) => h('ul', { class: 'key' }, entries.map(([name, text]) => {
  const swatch = h('i', { 'aria-hidden': 'true' });
  swatch.style.background = `var(--${name})`;
  return h('li', null, swatch, text);
}));

// a canvas of width × height pixels, painted by `paint(context)`, described by `label` to those who do not see it; without a label it is decoration
export function picture(width, height, label, paint) {
  const described = label ? { role: 'img', 'aria-label': label } : { 'aria-hidden': 'true' };
  // one with more pixels than it is shown with is scaled smoothly, cells of a few are not
  const canvas = h('canvas', { width, height, class: width >= 256 ? 'fine' : null, ...described });
  paint(canvas.getContext('2d'));
  return canvas;
}

// cells [rows][columns] of colours [r, g, b] into a context, one pixel each
export function paintCells(context, rows, columns, colourOf) {
  const image = context.createImageData(columns, rows);
  for (let n = 0; n < rows * columns; n++) {
    const [r, g, b] = colourOf(n);
    image.data.set([r, g, b, 255], 4 * n);
  }
  context.putImageData(image, 0, 0);
}

// '#rrggbb' as numbers, and the colour between two of them
export const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
export const mix = (a, b, share) => a.map((x, n) => Math.round(x + (b[n] - x) * share));
