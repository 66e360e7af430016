// the page: one view at a time, its controls, and its state in the address

import { ask, field, h } from './ui.js';
import * as mask from './mask.js';
import * as softmax from './softmax.js';
import * as maps from './maps.js';
import * as roofline from './roofline.js';
import * as caches from './caches.js';
import * as kernels from './kernels.js';

const VIEWS = { mask, softmax, maps, roofline, caches, kernels };
const main = document.querySelector('main');
// the ids of the views that this page has; an exported page lacks some
let shown = Object.keys(VIEWS);
let open = null;

// '#mask?tq=64' as {id: 'mask', fields: {tq: '64'}}
function address() {
  const [id, query] = location.hash.slice(1).split(/\?(.*)/s);
  return { id: shown.includes(id) ? id : 'mask', fields: Object.fromEntries(new URLSearchParams(query ?? '')) };
}

// an exported page has answers for some values of a field, and offers them alone
function narrowed(spec, values) {
  if (!values) return spec;
  const options = (spec.options ?? values.map((value) => [value, value])).filter((o) => values.includes(Array.isArray(o) ? o[0] : o));
  return { ...spec, kind: 'select', options, value: values.includes(String(spec.value)) ? spec.value : values[0] };
}

class Open {
  constructor(id, about) {
    this.id = id;
    this.view = VIEWS[id];
    this.about = about;
    this.specs = this.view.controls(about).map((spec) => narrowed(spec, about.offered?.[id]?.[spec.name]));
    this.defaults = Object.fromEntries(this.specs.map((spec) => [spec.name, String(spec.value)]));
    this.form = h('form', { 'aria-label': 'What is shown', onsubmit: (event) => event.preventDefault() });
    this.wrong = h('div');
    this.out = h('div', { class: 'out' });
    this.note = h('p', { class: 'note', role: 'status' });
    this.turn = 0;
    main.replaceChildren(
      h('h1', null, this.view.title), h('p', { class: 'lead' }, this.view.lead), this.form, this.wrong, this.out, this.note,
    );
    document.title = `${this.view.title} · Saccade lab`;
  }

  // takes the fields of an address; controls are made again, because other ones may be needed
  load(fields) {
    this.state = { ...this.defaults, ...fields };
    const extra = this.view.actions?.(this) ?? [];
    this.form.replaceChildren(
      ...this.specs.map((spec) => field(spec, this.state[spec.name], (name, value) => this.set({ [name]: value }))), ...extra,
    );
    return this.draw();
  }

  // changes fields, the address, and what is drawn
  set(fields) {
    Object.assign(this.state, fields);
    for (const [name, value] of Object.entries(fields)) {
      const control = this.form.elements[name];
      if (control && control.value !== value) control.value = value;
    }
    const kept = Object.entries(this.state).filter(([name, value]) => value !== this.defaults[name] && value !== '');
    const query = new URLSearchParams(kept);
    // a text that is emptied on purpose differs from its default
    for (const name in this.defaults) if (this.state[name] === '' && this.defaults[name] !== '') query.set(name, '');
    history.replaceState(null, '', `#${this.id}${query.size ? `?${query}` : ''}`);
    return this.draw();
  }

  // width that a picture may take, inside its card
  get width() {
    return Math.max(280, Math.min(900, this.out.clientWidth - 38));
  }

  // an error above the last good picture, which is dimmed, and the field that it is about; null takes them away
  mark(error) {
    this.wrong.replaceChildren(...(error ? [h('p', { class: 'error', role: 'alert' }, error.message)] : []));
    this.out.classList.toggle('stale', error !== null);
    for (const control of this.form.elements) {
      if (error && control.name === error.field) control.setAttribute('aria-invalid', 'true');
      else control.removeAttribute('aria-invalid');
    }
  }

  async draw() {
    const turn = ++this.turn;
    const focused = document.activeElement?.dataset?.key;
    for (const spec of this.specs) {
      this.form.querySelector(`[data-field="${spec.name}"]`).hidden = spec.when ? !spec.when(this.state) : false;
    }
    this.out.setAttribute('aria-busy', 'true');
    let drawn = null;
    let wrong = null;
    try {
      drawn = await this.view.draw(this.state, this);
    } catch (error) {
      wrong = error;
    }
    // a later change has overtaken this one
    if (turn !== this.turn || open !== this) return;
    this.mark(wrong);
    if (drawn) {
      this.out.replaceChildren(...drawn.nodes);
      this.note.textContent = drawn.note ?? '';
    }
    this.out.removeAttribute('aria-busy');
    if (focused && !this.form.contains(document.activeElement)) main.querySelector(`[data-key="${focused}"]`)?.focus();
  }
}

async function show(about) {
  const { id, fields } = address();
  const moved = open !== null && open.id !== id;
  open?.view.leave?.();
  open = new Open(id, about);
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === `#${id}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  await open.load(fields);
  if (moved) main.focus({ preventScroll: true });
}

function themed(theme) {
  document.documentElement.dataset.theme = theme;
  open?.draw();
}

// pictures with text in them are drawn for their width
let wide = innerWidth;
addEventListener('resize', () => {
  if (Math.abs(innerWidth - wide) < 24) return;
  wide = innerWidth;
  open?.draw();
});

const prefers = matchMedia('(prefers-color-scheme: dark)');
themed(prefers.matches ? 'dark' : 'light');
prefers.addEventListener('change', () => themed(prefers.matches ? 'dark' : 'light'));
document.querySelector('#theme').addEventListener('click', () => (
  themed(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark')));
try {
  const about = await ask('about');
  if (about.offered) shown = shown.filter((id) => id in about.offered);
  document.querySelector('nav').append(...shown.map((id) => h('a', { href: `#${id}` }, VIEWS[id].name)));
  document.querySelector('footer').append(`Saccade ${about.version}. The library computed all numbers; nothing leaves this machine.`);
  addEventListener('hashchange', () => show(about));
  await show(about);
} catch (error) {
  main.replaceChildren(h('p', { class: 'error', role: 'alert' }, error.message));
}
