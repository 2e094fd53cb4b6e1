/** What is wrong, worst first, in sentences. */
import { date, plural } from './format';
import type { Event, Key, Listeners, NvmeController, Pool, Stored, Volume } from './types';
import type { Tone } from './words';
import { url, volumeWord } from './words';

export interface Problem {
  tone: Tone;
  rank: number;
  text: string;
  path: string[];
  screen: string;
}

export interface Facts {
  volumes?: Volume[];
  pools?: Pool[];
  listeners?: Listeners;
  controllers?: NvmeController[];
  stored?: Stored;
  events?: Event[];
  keys?: Key[];
}

const SOON_MS = 14 * 86_400_000;
/** Time to give the hosts another key. */
export const expiresSoon = (key: Key) => key.expires !== undefined && new Date(key.expires).getTime() - Date.now() < SOON_MS;

export function problems(facts: Facts): Problem[] {
  const list: Problem[] = [];
  const add = (rank: number, tone: Tone, text: string, ...path: string[]) => list.push({ rank, tone, text, path, screen: path[0] });
  for (const volume of facts.volumes ?? []) {
    const { tone, word } = volumeWord(volume.state);
    const because = volume.why ? `: ${volume.why}` : '';
    if (tone === 'bad') add(0, 'bad', `Volume ${volume.name} is ${word}${because}`, 'volumes', volume.name);
    else if (tone === 'warn') add(3, 'warn', `Volume ${volume.name} is ${word}${because}`, 'volumes', volume.name);
    const found = volume.verify?.different_blocks ?? 0;
    if (found > (volume.verify?.repaired_blocks ?? 0)) {
      add(1, 'bad', `Replicas of volume ${volume.name} differ in ${plural(found, 'block')}`, 'volumes', volume.name);
    }
  }
  for (const pool of facts.pools ?? []) {
    if (pool.state !== 'online') add(1, 'bad', `Pool ${pool.name} is ${pool.state.replaceAll('_', ' ')}`, 'pools', pool.name);
    if (pool.lost_pages > 0) add(1, 'bad', `Pool ${pool.name} lost ${plural(pool.lost_pages, 'page')} of metadata`, 'pools', pool.name);
    const free = pool.free_bytes / Math.max(1, pool.total_bytes);
    if (free < 0.1) add(free < 0.02 ? 2 : 4, free < 0.02 ? 'bad' : 'warn', `Pool ${pool.name} has ${(100 * free).toFixed(1)} % of its space free`, 'pools', pool.name);
  }
  for (const controller of facts.controllers ?? []) {
    for (const path of controller.ctrlrs) {
      if (path.state === 'enabled') continue;
      const what = path.trid.trtype === 'PCIe' ? `Drive ${controller.name}` : `Remote controller ${controller.name} at ${url(path.trid)}`;
      add(2, path.state === 'failed' ? 'bad' : 'warn', `${what} is ${path.state.replaceAll('_', ' ')}`, 'disks');
    }
  }
  for (const listener of facts.listeners?.listeners ?? []) {
    if (listener.actual !== 'absent') continue;
    const bad = listener.wanted === 'require';
    add(bad ? 2 : 5, bad ? 'bad' : 'warn', `Listener ${url(listener.address)} is absent${listener.reason ? `: ${listener.reason}` : ''}`, 'network');
  }
  for (const selector of facts.listeners?.unmatched ?? []) add(5, 'warn', `No interface matches listener ${selector}`, 'network');
  // The SMART log of each drive is not read here: the daemon reads it, and tells of changes.
  const warned = new Map<string, Event>();
  for (const event of facts.events ?? []) {
    if (event.type === 'nvme_health_warning') warned.set(event.ctx, event);
    if (event.type === 'nvme_health_good' || event.type === 'nvme_removed') warned.delete(event.ctx);
  }
  for (const event of warned.values()) add(2, 'warn', event.text[0].toUpperCase() + event.text.slice(1), 'disks');
  for (const key of facts.keys ?? []) {
    if (key.used_by.length === 0) continue;
    const whose = plural(key.used_by.length, 'user');
    if (key.state !== 'ok') add(2, 'bad', `Key ${key.name} is ${key.state}, and has ${whose}`, 'keys');
    else if (expiresSoon(key)) add(5, 'warn', `Key ${key.name} expires on ${date(key.expires!)}, and has ${whose}`, 'keys');
  }
  const failed = (facts.stored?.objects ?? []).filter((object) => object.state !== 'live');
  if (failed.length > 0) {
    const names = failed.map((object) => object.key).slice(0, 3).join(', ');
    add(2, 'warn', `${plural(failed.length, 'configured object')} not restored: ${names}`, 'disks');
  }
  return list.sort((a, b) => a.rank - b.rank);
}

export function sentence(facts: Facts, list: Problem[]): string {
  if (list.length > 0) {
    const rest = list.length - 1;
    return `${list[0].text}.${rest > 0 ? ` ${plural(rest, 'more problem')} below.` : ''}`;
  }
  const volumes = facts.volumes?.length ?? 0;
  if (volumes === 0) return 'Nothing is wrong. There is no volume yet.';
  return `Nothing is wrong: ${volumes === 1 ? 'the volume is' : `all ${volumes} volumes are`} healthy.`;
}
