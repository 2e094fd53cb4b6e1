// Turns the files of Vite into what the server embeds: each file compressed, and a list of them for Rust.
// The compressor is written in JavaScript, so that its bytes are the same on every machine.
import { readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { extname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'fflate';

const dist = fileURLToPath(new URL('../../engine/web/dist/', import.meta.url));
const BUDGET = 200 * 1024;
const TYPES = {
  '.html': 'text/html; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.svg': 'image/svg+xml',
  '.txt': 'text/plain; charset=utf-8',
};

const files = readdirSync(dist, { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile() && !entry.name.endsWith('.gz'))
  .map((entry) => relative(dist, join(entry.parentPath, entry.name)))
  .sort();

let total = 0;
const rows = files.map((name) => {
  const type = TYPES[extname(name)];
  if (!type) throw new Error(`${name}: no content type for this kind of file`);
  const packed = gzipSync(readFileSync(join(dist, name)), { level: 9, mtime: 0 });
  total += packed.length;
  console.log(`${name.padEnd(20)} ${packed.length} bytes`);
  writeFileSync(join(dist, `${name}.gz`), packed);
  rmSync(join(dist, name));
  return `    ("${name}", "${type}", include_bytes!("${name}.gz")),\n`;
});
writeFileSync(join(dist, 'list.rs'), `&[\n${rows.join('')}]\n`);
console.log(`${'total'.padEnd(20)} ${total} bytes of ${BUDGET}`);
if (total > BUDGET) throw new Error(`the page has ${total} bytes, more than ${BUDGET}`);
