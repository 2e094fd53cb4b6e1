/** Words for states and reasons, each with the tone in which it is shown. */
import type { Address, Bdev, Pool, Subsystem, Volume } from './types';

export type Tone = 'good' | 'warn' | 'bad' | 'off' | 'busy';

export interface Shown {
  tone: Tone;
  word: string;
  about: string;
}

const words = (rows: [string, Tone, string, string][]): Record<string, Shown> =>
  Object.fromEntries(rows.map(([key, tone, word, about]) => [key, { tone, word, about }]));

const VOLUME = words([
  ['healthy', 'good', 'healthy', 'Hosts are served, and all replicas are in sync.'],
  ['degraded', 'warn', 'degraded', 'Hosts are served. A replica that is out returns by itself if it can.'],
  ['writes_held', 'bad', 'writes held', 'Hosts can read; their writes wait. Fewer replicas than the required number are in sync.'],
  ['frozen', 'bad', 'frozen', 'No replica is in sync. Commands of hosts wait.'],
  ['failing', 'bad', 'failing', 'An operator had the waiting I/O fail. Hosts get errors until the volume is thawed.'],
  ['fenced', 'bad', 'fenced', 'Another daemon has opened the volume. Use it there.'],
  ['store_lost', 'bad', 'store lost', 'The data directory is full, read-only or broken. The volume continues when the store is back.'],
  ['opening', 'warn', 'opening', 'The volume has not opened yet. Bring a device with a replica in sync.'],
  ['closed', 'off', 'closed', 'The volume is closed.'],
]);

const REPLICA = words([
  ['in_sync', 'good', 'in sync', 'It has every acknowledged write.'],
  ['reconciling', 'busy', 'reconciling', 'In sync, except for regions with writes in flight when the daemon died.'],
  ['syncing', 'busy', 'syncing', 'A resync copies the missed regions to it.'],
  ['out', 'warn', 'out', 'It misses the dirty regions, and gets only those when it is back.'],
  ['filling', 'busy', 'filling', 'It is new, or not to be trusted. It has the data below its watermark.'],
]);

const SNAPSHOT = words([
  ['making', 'busy', 'making', 'The nodes make it.'],
  ['ready', 'good', 'ready', 'Volumes can begin with it.'],
  ['unavailable', 'warn', 'unavailable', 'No volume can begin with it until one of its nodes and pools is back.'],
  ['failed', 'bad', 'failed', 'It was not made, and nothing is left of it.'],
  ['deleting', 'off', 'deleting', 'It goes when its nodes have deleted it. A node that is away does so when it returns.'],
]);

const ANA = words([
  ['optimized', 'good', 'optimized', 'Hosts prefer this path.'],
  ['non_optimized', 'busy', 'non-optimized', 'Hosts use this path when no optimized one works.'],
  ['inaccessible', 'off', 'inaccessible', 'Hosts do not use this path.'],
  ['persistent_loss', 'bad', 'persistent loss', 'The namespace is lost on this path.'],
  ['change', 'busy', 'change', 'The state is changing.'],
]);

const unknown = (word: string): Shown => ({ tone: 'off', word: word.replaceAll('_', ' '), about: '' });
export const volumeWord = (state: string) => VOLUME[state] ?? unknown(state);
export const replicaWord = (state: string) => REPLICA[state] ?? unknown(state);
export const snapshotWord = (state: string) => SNAPSHOT[state] ?? unknown(state);
export const anaWord = (state: string) => ANA[state] ?? unknown(state);

export const REASONS: Record<string, string> = {
  no_rdma_dev: 'No RDMA device is behind the interface.',
  port_down: 'The port of the RDMA device is down.',
  no_gid_for_ip: 'The port has no GID for the address.',
  iwarp_port: 'iWARP uses the ports of TCP, and TCP has this one. Give each transport a listener with its own port.',
  unsupported_link: 'The device lacks a needed capability.',
  no_uverbs: 'The kernel modules, device nodes or libraries of RDMA are missing.',
  no_rdma_cm: 'The RDMA connection manager is missing.',
  memlock: 'The limit on locked memory is too low.',
  no_subsystem: 'No subsystem of the configuration file is served there.',
  refused: 'The address cannot be opened. Nacre tries again.',
};

const KINDS: Record<string, string> = {
  'AIO disk': 'file or block device',
  'URING bdev': 'file or block device',
  'Malloc disk': 'RAM disk',
  'Null disk': 'null',
  'NVMe disk': 'NVMe drive',
  'Replicated volume': 'volume',
  'Logical Volume': 'lvol',
};

export const kind = (bdev: Bdev) =>
  bdev.product_name === 'NVMe disk' && bdev.driver_specific.nvme?.[0]?.trid?.trtype !== 'PCIe'
    ? 'remote namespace'
    : (KINDS[bdev.product_name] ?? bdev.product_name);
export const isVolume = (bdev: Bdev) => bdev.product_name === 'Replicated volume';
export const isLvol = (bdev: Bdev) => bdev.product_name === 'Logical Volume';
export const size = (bdev: Bdev) => bdev.block_size * bdev.num_blocks;
/** The name that people gave: lvols are named by UUID, and have `pool/name` as an alias. */
export const shownName = (bdev: Bdev) => (isLvol(bdev) ? (bdev.aliases.find((alias) => alias.includes('/')) ?? bdev.name) : bdev.name);
/** Where it is: the file, the PCI address, or the address of the target. */
export function place(bdev: Bdev): string {
  const facts = bdev.driver_specific;
  const trid = facts.nvme?.[0]?.trid;
  if (trid) return trid.trtype === 'PCIe' ? trid.traddr : url(trid);
  return facts.aio?.filename ?? facts.uring?.filename ?? '';
}

export function url(at: Partial<Address> & { trtype: string; traddr: string }): string {
  const ip = at.traddr.includes(':') && at.trsvcid ? `[${at.traddr}]` : at.traddr;
  return `${at.trtype.toLowerCase()}://${ip}${at.trsvcid ? `:${at.trsvcid}` : ''}`;
}

/** The command for a Linux host. */
export function connectLine(nqn: string, at: Address, hostnqn?: string): string {
  const any = at.traddr === '0.0.0.0' || at.traddr === '::';
  const here = location.hostname.replace(/^\[|\]$/g, '');
  const address = any ? (/^[\d.]+$|:/.test(here) ? here : 'ADDRESS-OF-THIS-MACHINE') : at.traddr;
  const host = hostnqn ? ` --hostnqn ${hostnqn}` : '';
  return `nvme connect -t ${at.trtype.toLowerCase()} -a ${address} -s ${at.trsvcid} -n ${nqn}${host}`;
}

export interface User {
  text: string;
  path: string[];
}

/** Who uses each bdev: a replica, a pool, a namespace, or another bdev on it. */
export function users(bdevs: Bdev[], volumes: Volume[], pools: Pool[], subsystems: Subsystem[]): Map<string, User[]> {
  const map = new Map<string, User[]>();
  const add = (name: string, user: User) => {
    const bdev = bdevs.find((b) => b.name === name || b.uuid === name || b.aliases.includes(name));
    const key = bdev?.name ?? name;
    map.set(key, [...(map.get(key) ?? []), user]);
  };
  for (const volume of volumes) {
    for (const replica of volume.replicas) add(replica.device, { text: `replica of ${volume.name}`, path: ['volumes', volume.name] });
  }
  for (const pool of pools) add(pool.disk, { text: `pool ${pool.name}`, path: ['pools', pool.name] });
  for (const subsystem of subsystems) {
    for (const ns of subsystem.namespaces ?? []) {
      add(ns.bdev_name, { text: `namespace ${ns.nsid} of ${subsystem.nqn}`, path: ['subsystems', subsystem.nqn] });
    }
  }
  for (const bdev of bdevs) {
    for (const part of Object.values(bdev.driver_specific)) {
      const base = part?.base_bdev_name ?? part?.base_bdev;
      if (typeof base === 'string' && !isLvol(bdev)) add(base, { text: `bdev ${bdev.name}`, path: ['disks', bdev.name] });
    }
  }
  return map;
}

/** Where the object of an event is shown. */
export function subject(event: { category: string; ctx: string; type: string }): string[] | null {
  const { category, ctx, type } = event;
  if (!ctx) return null;
  if (category === 'volume' || category === 'replica') return ['volumes', ctx];
  if (category === 'target') return ctx.startsWith('nqn.') ? ['subsystems', ctx] : null;
  // These name a controller, which the list of disks has.
  if (type.startsWith('nvme_') || type.startsWith('remote_')) return ['disks'];
  if (category === 'device') return type.startsWith('pool_') ? ['pools', ctx] : ['disks', ctx];
  if (category === 'transport') return ['network'];
  return null;
}
