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
let [passed, failed] = [0, 0];
const count = (name, is_good, detail = '') => {
  is_good ? (passed += 1) : (failed += 1);
  console.log(is_good ? `ok    ${name}` : `FAILED: ${name}${detail}`);
};
if (!only) {
  run('svelte-check', '--fail-on-warnings', '--output', 'machine');
  count('types', true);
}
if (!only && !short) count('two builds give the same bytes', build() === build());
const cases = await behaviour(only);
passed += cases.passed;
failed += cases.failed;
if (!only && !short) {
  const problems = [...new Set(await pictures())];
  count('screens at three widths in both themes: tests/pictures', problems.length === 0, `\n      ${problems.join('\n      ')}`);
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed > 0 ? 1 : 0);
