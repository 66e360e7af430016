// the page in a headless browser: node browse.mjs <folder of node_modules> <browser>
// reads and writes lines of JSON: {limits} first, then {read} or {error} for every job
import fs from 'fs';
import http from 'http';
import readline from 'readline';
import { fileURLToPath, pathToFileURL } from 'url';

const [, , modules, executablePath] = process.argv;
const { chromium } = await import(pathToFileURL(`${modules}/node_modules/playwright-core/index.mjs`));

let job = '';
const kinds = { html: 'text/html', js: 'text/javascript', json: 'application/json' };
const server = http.createServer((request, response) => {
  const name = request.url.slice(1) || 'index.html';
  const found = name === 'job.json' || ['index.html', 'page.js'].includes(name);
  response.writeHead(found ? 200 : 404, { 'content-type': kinds[name.split('.').pop()] ?? 'text/plain' });
  response.end(name === 'job.json' ? job : found ? fs.readFileSync(fileURLToPath(new URL(name, import.meta.url))) : '');
}).listen(0, '127.0.0.1');
await new Promise((listening) => server.once('listening', listening));

const browser = await chromium.launch({ executablePath, headless: true, args: ['--no-sandbox', '--enable-unsafe-webgpu'] });
try {
  const page = await browser.newPage();
  const say = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
  page.on('pageerror', (error) => say({ error: String(error) }));
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  await page.waitForFunction('window.ready', null, { timeout: 30000 });
  say({ limits: await page.evaluate('window.limits()') });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    job = line;
    try {
      say({ read: await page.evaluate('window.runJob()') });
    } catch (error) {
      say({ error: String(error) });
    }
  }
} finally {
  await browser.close();
  server.close();
}
