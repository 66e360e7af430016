// answers of an exported page: tables next to it, one per view, computed by `saccade lab --export`

import { bytes } from './bytes.js';

const MORE = "For any other: pip install '.[lab]' in a clone of Saccade, then saccade lab.";
const tables = new Map();
let labels = {};

// a script, because a page opened from a folder may not read other files
function load(view) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script');
    script.src = `tables/${view}.js`;
    script.onload = resolve;
    script.onerror = () => reject(new Error(`tables/${view}.js is missing next to this page: export the lab again.`));
    document.head.append(script);
  });
}

async function read(view) {
  await load(view);
  const packed = bytes(globalThis.saccadeTables[view]);
  delete globalThis.saccadeTables[view];
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'))).json();
}

const tidy = (text) => String(text).trim().replace(/\s+/g, ' ');

// the grid that has these fields, and at least what its other fields need
const grid = (table, fields) => table.grids.find(({ names, least }) => (
  names.every((name) => name in fields) && Object.keys(fields).every((name) => names.includes(name) || name in least)));

export async function answer(view, fields) {
  if (!tables.has(view)) tables.set(view, read(view));
  const table = await tables.get(view);
  if (view === 'about') labels = table.answers[0].labels;
  const found = grid(table, fields);
  if (!found) return { error: `This copy of the lab has no such answers. ${MORE}` };
  for (const [name, least] of Object.entries(found.least)) {
    if (Number(fields[name] ?? least) < least) return { error: `The answers need ${name} of ${least}; here it is ${fields[name]}. ${MORE}` };
  }
  let at = 0;
  for (const [n, name] of found.names.entries()) {
    const place = found.values[n].indexOf(tidy(fields[name]));
    if (place < 0) return { error: refusal(name, fields[name], found.values[n]), field: name };
    at = at * found.values[n].length + place;
  }
  return table.answers[found.index[at]];
}

function refusal(name, value, values) {
  const some = values.length > 8 ? `${values.length} others, such as ${values.slice(0, 2).join(' and ')}` : values.join(', ');
  return `${labels[name] ?? name} is ${JSON.stringify(value)}; this copy of the lab has answers for ${some}. ${MORE}`;
}
