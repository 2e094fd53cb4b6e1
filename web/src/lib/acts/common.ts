/** What acts share: values, choices of bdevs, and addresses. */
import type { Act, Values } from '../act.svelte';
import { bytes, sizeWord } from '../format';
import type { Address, Bdev, Pool, Subsystem, Volume } from '../types';
import { connectLine, isVolume, kind, shownName, size, users, type User } from '../words';

export const MIB = 1024 * 1024;
export const mib = (n?: number) => (n === undefined ? undefined : Math.floor(n / MIB));
/** Without the values that were left out. */
export const given = (v: Values) => Object.fromEntries(Object.entries(v).filter(([, value]) => value !== undefined && value !== '' && !(Array.isArray(value) && value.length === 0)));
export const sized = (n?: number) => (n === undefined ? null : sizeWord(n));
export const or = (text: unknown, instead: string) => (text ? String(text) : instead);

export interface World {
  bdevs: Bdev[];
  volumes: Volume[];
  pools: Pool[];
  subsystems: Subsystem[];
}

export function usersOf(world: World): Map<string, User[]> {
  return users(world.bdevs, world.volumes, world.pools, world.subsystems);
}

const choice = (bdev: Bdev) => ({ name: bdev.name, label: shownName(bdev), detail: `${bytes(size(bdev))}, ${kind(bdev)}` });

/** Bdevs without a user. */
export function free(world: World, withVolumes = false) {
  const used = usersOf(world);
  return world.bdevs.filter((b) => !b.claimed && !used.has(b.name) && (withVolumes || !isVolume(b)) && !b.driver_specific.lvol?.snapshot).map(choice);
}

export const freeOptions = (world: World, withVolumes = false): [string, string][] => {
  const all = free(world, withVolumes).map((b): [string, string] => [b.name, `${b.label} (${b.detail})`]);
  return all.length > 0 ? all : [['', 'No free bdev exists']];
};


export const LISTENER = (optional: boolean): Act['fields'] => [
  { key: 'trtype', label: 'Transport', kind: 'select', options: [['TCP', 'TCP'], ['RDMA', 'RDMA']] },
  { key: 'traddr', label: 'Address', kind: 'text', optional, initial: /^[\d.]+$/.test(location.hostname) && !location.hostname.startsWith('127.') ? location.hostname : '', hint: optional ? 'An IP address of this machine. Every listener of the configuration file unless given.' : 'An IP address of this machine. 0.0.0.0 is every IPv4 address.' },
  { key: 'trsvcid', label: 'Port', kind: 'number', initial: '4420' },
];

export const address = (v: Values) => ({ trtype: v.trtype as string, traddr: v.traddr as string, adrfam: v.traddr?.includes(':') ? 'IPv6' : 'IPv4', trsvcid: String(v.trsvcid ?? 4420) });

/** One line per listener, for each host or for any. */
export const connectLines = (nqn: string, at: Address[], hosts: string[]) => (hosts.length > 0 ? hosts : [undefined]).flatMap((host) => at.map((listener) => connectLine(nqn, listener, host)));
