/** Numbers, sizes and times as people read them. Every number has its unit. */

const BYTES = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

function scaled(value: number, base: number, units: string[]): string {
  let at = 0;
  while (value >= base && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  const digits = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${trimmed(value.toFixed(digits))} ${units[at]}`;
}

const trimmed = (text: string) => (text.includes('.') ? text.replace(/\.?0+$/, '') : text);

export const bytes = (n: number) => scaled(n, 1024, BYTES);
export const byteRate = (n: number) => `${bytes(n)}/s`;
export const count = (n: number) => Math.round(n).toLocaleString('en-GB');
export const ops = (n: number) => `${count(n)} IOPS`;
export const percent = (part: number, whole: number) => `${whole > 0 ? trimmed(((100 * part) / whole).toFixed(part * 10 < whole ? 1 : 0)) : 0} %`;

export function micros(us: number | null | undefined): string {
  if (us == null) return '–';
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${trimmed((us / 1000).toFixed(us < 10000 ? 2 : 1))} ms`;
  return `${trimmed((us / 1e6).toFixed(1))} s`;
}

export function seconds(s: number): string {
  s = Math.round(s);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const plural = (n: number, one: string, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

const two = (n: number) => String(n).padStart(2, '0');

/** Local time; with the date unless it is today. */
export function time(at: string | number, now = new Date()): string {
  const t = new Date(at);
  const clock = `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
  return t.toDateString() === now.toDateString() ? clock : `${date(at)} ${clock}`;
}

export function date(at: string | number): string {
  const t = new Date(at);
  return `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())}`;
}

/** Bytes of a text such as "10 GiB"; null if it is none. A number alone counts GiB. */
export function parseSize(text: string): number | null {
  const match = /^\s*(\d+(?:\.\d+)?)\s*(?:([kmgtp])(?:i?b)?)?\s*$/i.exec(text);
  if (!match) return null;
  const power = match[2] ? 'kmgtp'.indexOf(match[2].toLowerCase()) + 1 : 3;
  return Math.round(Number(match[1]) * 1024 ** power);
}

/** A size as the command line takes it. */
export function sizeWord(n: number): string {
  for (let power = 4; power > 0; power -= 1) {
    if (n >= 1024 ** power && n % 1024 ** power === 0) return `${n / 1024 ** power}${BYTES[power]}`;
  }
  return String(n);
}

/** A word as a shell takes it. */
export const quoted = (word: string) =>
  /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;

/** A command line of words, without those that are left out. */
export const line = (...words: (string | false | null | undefined)[]) =>
  ['nacre', ...words.filter((word): word is string => typeof word === 'string').map(quoted)].join(' ');

/** The command for any method. */
export const rpcLine = (method: string, params: Record<string, unknown>) =>
  Object.keys(params).length ? line('rpc', method, JSON.stringify(params)) : line('rpc', method);
