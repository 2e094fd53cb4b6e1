/** Acts on pools and lvols. */
import type { Act } from '../act.svelte';
import { rpc } from '../api';
import { bytes, line, plural, rpcLine } from '../format';
import type { Lvol, Pool } from '../types';
import { given, sized, or, type World, freeOptions } from './common';

export const createPool = (world: World): Act => ({
  title: 'Create a pool',
  about: 'A pool divides one bdev into lvols, with snapshots and clones.',
  label: 'Create',
  fields: [
    { key: 'name', label: 'Name', kind: 'text', hint: 'Such as pool0.' },
    { key: 'disk', label: 'Bdev', kind: 'select', options: freeOptions(world) },
  ],
  force: { lost: 'all data on the bdev', name: 'overwrite' },
  command: (v) => line('pool', 'create', or(v.name, 'NAME'), or(v.disk, 'BDEV'), v.force && '--force'),
  async run(v) {
    await rpc('pool_create', given({ name: v.name, disk: v.disk, force: v.force ? true : undefined }));
    return `Pool ${v.name} was created.`;
  },
});

export const importPool = (world: World): Act => ({
  title: 'Import a pool',
  about: 'Opens the pool on a bdev. From then on every start of the daemon opens it.',
  label: 'Import',
  fields: [{ key: 'disk', label: 'Bdev', kind: 'select', options: freeOptions(world) }],
  force: { lost: 'the whole pool, if the daemon that has it open still runs', name: 'import' },
  command: (v) => line('pool', 'import', or(v.disk, 'BDEV'), v.force && '--force'),
  async run(v) {
    const pool = await rpc<Pool>('pool_import', given({ disk: v.disk, force: v.force ? true : undefined }));
    return `Pool ${pool.name} was imported.`;
  },
});

export const checkPool = (pool: Pool): Act => ({
  title: `Check pool ${pool.name}`,
  about: 'Reads both copies of the metadata, repairs bad ones, and compares the use of space with the maps. Hosts can use the pool meanwhile.',
  label: 'Check',
  command: () => line('pool', 'check', pool.name),
  async run() {
    const found = await rpc<{ findings: unknown[]; more_findings: number; repaired: number; not_repaired: number; pages: number }>('pool_check', { pool: pool.name });
    const total = found.findings.length + found.more_findings;
    const text = total === 0 ? `Pool ${pool.name} is in order: ${plural(found.pages, 'page')} of metadata were read.` : `${plural(total, 'finding')}; ${found.repaired} repaired, ${found.not_repaired} not repaired.`;
    return { text, detail: found.findings.map((finding) => (typeof finding === 'string' ? finding : JSON.stringify(finding))) };
  },
});

export const growPool = (pool: Pool): Act => ({
  title: `Grow pool ${pool.name}`,
  about: 'Takes the rest of a bdev that has grown into the pool. Hosts can use the pool meanwhile.',
  label: 'Grow',
  command: () => line('pool', 'grow', pool.name),
  async run() {
    const now = await rpc<Pool>('pool_grow', { pool: pool.name });
    return `Pool ${pool.name} has ${bytes(now.total_bytes)}.`;
  },
});

export const renamePool = (pool: Pool): Act => ({
  title: `Rename pool ${pool.name}`,
  about: 'Hosts notice nothing.',
  label: 'Rename',
  fields: [{ key: 'new_name', label: 'New name', kind: 'text', initial: pool.name }],
  command: (v) => line('pool', 'rename', pool.name, or(v.new_name, 'NAME')),
  async run(v) {
    await rpc('pool_rename', { pool: pool.name, new_name: v.new_name });
    return `The pool is named ${v.new_name}.`;
  },
});

export const exportPool = (pool: Pool): Act => ({
  title: `Export pool ${pool.name}`,
  about: 'Closes the pool, so that another machine may import it. The pool must not be in use.',
  label: 'Export',
  danger: { lost: `access to the ${plural(pool.lvols, 'lvol')} of the pool on this machine. The data stays.`, name: pool.name },
  command: () => line('pool', 'export', pool.name),
  async run() {
    await rpc('pool_export', { pool: pool.name });
    return `Pool ${pool.name} was exported.`;
  },
});

export const deletePool = (pool: Pool): Act => ({
  title: `Delete pool ${pool.name}`,
  label: 'Delete',
  danger: { lost: `the pool on ${pool.disk}. A pool with lvols is refused.`, name: pool.name },
  command: () => line('pool', 'delete', pool.name),
  async run() {
    await rpc('pool_delete', { pool: pool.name });
    return `Pool ${pool.name} was deleted.`;
  },
});

export const createLvol = (pool: Pool): Act => ({
  title: `Create an lvol in ${pool.name}`,
  about: `The pool has ${bytes(pool.free_bytes)} free. An lvol takes space as it is written, and may be larger than the pool.`,
  label: 'Create',
  fields: [
    { key: 'name', label: 'Name', kind: 'text' },
    { key: 'size', label: 'Size', kind: 'size', hint: 'Such as 100 GiB.' },
    { key: 'thick', label: 'Keep room for the whole size', kind: 'check' },
  ],
  command: (v) => line('lvol', 'create', `${pool.name}/${or(v.name, 'NAME')}`, '--size', sized(v.size) ?? 'SIZE', v.thick && '--thick'),
  async run(v) {
    await rpc('lvol_create', { pool: pool.name, name: v.name, size: v.size, thick: v.thick });
    return `Lvol ${pool.name}/${v.name} was created.`;
  },
});

export const snapshot = (lvol: Lvol): Act => ({
  title: `Make a snapshot of ${lvol.alias}`,
  about: 'Hosts can write meanwhile. The snapshot takes space as the lvol changes.',
  label: 'Make snapshot',
  fields: [{ key: 'name', label: 'Name', kind: 'text', initial: `${lvol.name}@${new Date().toISOString().slice(0, 10)}`, hint: `Such as ${lvol.name}@monday.` }],
  command: (v) => {
    const name = or(v.name, `${lvol.name}@NAME`);
    const short = name.startsWith(`${lvol.name}@`);
    return short ? line('lvol', 'snapshot', `${lvol.pool}/${name}`) : rpcLine('lvol_snapshot', { snapshots: [{ lvol: lvol.alias, name }] });
  },
  async run(v) {
    await rpc('lvol_snapshot', { snapshots: [{ lvol: lvol.alias, name: v.name }] });
    return `Snapshot ${lvol.pool}/${v.name} was made.`;
  },
});

export const cloneLvol = (lvol: Lvol): Act => ({
  title: `Clone snapshot ${lvol.alias}`,
  about: 'The new lvol has the contents of the snapshot. Both share space until one is written.',
  label: 'Clone',
  fields: [{ key: 'name', label: 'Name of the new lvol', kind: 'text' }],
  command: (v) => line('lvol', 'clone', lvol.alias, `${lvol.pool}/${or(v.name, 'NAME')}`),
  async run(v) {
    await rpc('lvol_clone', { snapshot: lvol.alias, name: v.name });
    return `Lvol ${lvol.pool}/${v.name} was made.`;
  },
});

export const restoreLvol = (lvol: Lvol, all: Lvol[]): Act => {
  const snapshots = all.filter((one) => one.snapshot && one.pool === lvol.pool);
  return {
    title: `Restore ${lvol.alias}`,
    about: 'Gives an lvol that is not in use the contents and size of a snapshot.',
    label: 'Restore',
    fields: [{ key: 'snapshot', label: 'Snapshot', kind: 'select', options: snapshots.map((one) => [one.alias, `${one.alias} (${bytes(one.size_bytes)})`]) }],
    danger: { lost: `the present contents of ${lvol.alias}, ${bytes(lvol.used_bytes)}. Snapshots stay.`, name: lvol.name },
    command: (v) => line('lvol', 'restore', lvol.alias, or(v.snapshot, 'SNAPSHOT')),
    async run(v) {
      await rpc('lvol_restore', { lvol: lvol.alias, snapshot: v.snapshot });
      return `${lvol.alias} has the contents of ${v.snapshot}.`;
    },
  };
};

export const resizeLvol = (lvol: Lvol): Act => ({
  title: `Resize ${lvol.alias}`,
  about: `It has ${bytes(lvol.size_bytes)} now. Hosts see a larger size at once. Data beyond a smaller size is lost, and a host in use refuses it.`,
  label: 'Resize',
  fields: [{ key: 'size', label: 'New size', kind: 'size', initial: bytes(lvol.size_bytes) }],
  command: (v) => line('lvol', 'resize', lvol.alias, sized(v.size) ?? 'SIZE'),
  async run(v) {
    await rpc('lvol_resize', { lvol: lvol.alias, size: v.size });
    return `${lvol.alias} has ${bytes(v.size)}.`;
  },
});

export const deleteLvol = (lvol: Lvol): Act => ({
  title: `Delete ${lvol.snapshot ? 'snapshot' : 'lvol'} ${lvol.alias}`,
  label: 'Delete',
  danger: { lost: lvol.snapshot ? `the snapshot: ${bytes(lvol.exclusive_bytes)} that only it has. Lvols and clones keep their contents.` : `all data in ${lvol.alias}: ${bytes(lvol.used_bytes)} written of ${bytes(lvol.size_bytes)}.`, name: lvol.name },
  command: () => line('lvol', 'delete', lvol.alias),
  async run() {
    await rpc('lvol_delete', { lvol: lvol.alias });
    return `${lvol.alias} was deleted.`;
  },
});
