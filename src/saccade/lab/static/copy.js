// copies of a mask: as Python, as an SVG drawing, as a PNG picture

import { h } from './ui.js';

// cells [rows][columns] of 0, 1 or 2 as a drawing: one path per state, of runs of equal cells; colours by state
export function drawing(cells, rows, columns, colours, title) {
  const paths = ['', '', ''];
  for (let row = 0; row < rows; row++) {
    for (let from = 0, to; from < columns; from = to) {
      const state = cells[row * columns + from];
      for (to = from + 1; to < columns && cells[row * columns + to] === state; to++);
      if (state) paths[state] += `M${from} ${row}h${to - from}v1h${from - to}z`;
    }
  }
  const escaped = title.replace(/[&<>]/g, (sign) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' }[sign]));
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${columns} ${rows}" shape-rendering="crispEdges"><title>${escaped}</title>`
    + `<rect width="${columns}" height="${rows}" fill="${colours[0]}"/>`
    + paths.map((path, state) => (path ? `<path fill="${colours[state]}" d="${path}"/>` : '')).join('') + '</svg>\n';
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // without the permission, or from a folder in some browsers
    const area = h('textarea', { value: text, 'aria-hidden': 'true' });
    document.body.append(area);
    area.select();
    const copied = document.execCommand('copy');
    area.remove();
    if (!copied) throw new Error('the browser does not let this page copy');
  }
  return 'copied';
}

async function copyPicture(canvas) {
  const blob = await new Promise((resolve) => { canvas.toBlob(resolve, 'image/png'); });
  try {
    await navigator.clipboard.write([new ClipboardItem({ 'image/png': blob })]);
    return 'copied';
  } catch {
    const link = h('a', { href: URL.createObjectURL(blob), download: 'mask.png' });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    return 'saved as mask.png';
  }
}

// buttons for each kind of copy; python, svg: texts; canvas: the picture
export function copies(python, svg, canvas) {
  const said = h('span', { class: 'note', role: 'status' });
  const button = (name, copy) => h('button', {
    type: 'button', 'data-key': `copy-${name}`, onclick: async () => {
      said.textContent = await copy().then((what) => `${name} ${what}`, (error) => `${name} not copied: ${error.message}`);
    },
  }, `Copy ${name}`);
  return h('div', { class: 'buttons below' }, python && button('Python', () => copyText(python)), button('SVG', () => copyText(svg)),
    button('PNG', () => copyPicture(canvas)), said);
}
