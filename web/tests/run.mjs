// `npm test`: types, two builds with the same bytes, what the page does, and pictures. A word selects cases; `--short`
// leaves builds and pictures out.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { behaviour } from './behaviour.mjs';
import { pictures } from './pictures.mjs';

const root = fileURLToPath(new URL('..', import.meta.url));
const dist = fileURLToPath(new URL('../../engine/web/dist/', import.meta.url));
const run = (...words) => execFileSync('npx', words, { cwd: root, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] });

function build() {
  execFileSync('npm', ['run', 'build', '--silent'], { cwd: root, encoding: 'utf8' });
  const files = readdirSync(dist, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
  const digests = files.map((entry) => `${entry.name} ${createHash('sha256').update(readFileSync(`${entry.parentPath}/${entry.name}`)).digest('hex')}`);
  return digests.sort().join('\n');
}

const words = process.argv.slice(2);
const short = words.includes('--short');
const only = words.find((word) => !word.startsWith('--'));
let failed = 0;
if (!only) {
  run('svelte-check', '--fail-on-warnings', '--output', 'machine');
  console.log('ok    types');
}
if (!only && !short) {
  const same = build() === build();
  failed += same ? 0 : 1;
  console.log(`${same ? 'ok  ' : 'FAIL'}  two builds give the same bytes`);
}
failed += await behaviour(only);
if (!only && !short) {
  const problems = [...new Set(await pictures())];
  failed += problems.length > 0 ? 1 : 0;
  console.log(problems.length > 0 ? `FAIL  screens\n      ${problems.join('\n      ')}` : 'ok    screens at three widths in both themes: tests/pictures');
}
process.exit(failed > 0 ? 1 : 0);
