/** Every act of the page: its form, its command, and its call. */
import type { Act, Values } from './act.svelte';
import { rpc } from './api';
import { bytes, line, plural, rpcLine, seconds, sizeWord } from './format';
import type { Account, Address, Bdev, Lvol, Pool, Replica, Subsystem, Volume } from './types';
import { connectLine, isVolume, kind, shownName, size, url, users, type User } from './words';

const MIB = 1024 * 1024;
const mib = (n?: number) => (n === undefined ? undefined : Math.floor(n / MIB));
/** Without the values that were left out. */
const given = (v: Values) => Object.fromEntries(Object.entries(v).filter(([, value]) => value !== undefined && value !== '' && !(Array.isArray(value) && value.length === 0)));
const sized = (n?: number) => (n === undefined ? null : sizeWord(n));
const or = (text: unknown, instead: string) => (text ? String(text) : instead);

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

const freeOptions = (world: World, withVolumes = false): [string, string][] => {
  const all = free(world, withVolumes).map((b): [string, string] => [b.name, `${b.label} (${b.detail})`]);
  return all.length > 0 ? all : [['', 'No free bdev exists']];
};

// Bdevs

export const createFile = (): Act => ({
  title: 'Create a file bdev',
  about: 'A file or a block device of this machine becomes a bdev. A missing file is created if a size is given.',
  label: 'Create',
  fields: [
    { key: 'name', label: 'Name', kind: 'text', hint: 'Such as disk0.' },
    { key: 'filename', label: 'Path', kind: 'text', hint: 'Such as /dev/disk/by-id/… or /srv/nacre/disk0.img.' },
    { key: 'size', label: 'Size', kind: 'size', optional: true, hint: 'Only for a file that does not exist yet, such as 100 GiB.' },
  ],
  command: (v) => line('bdev', 'create', 'file', or(v.name, 'NAME'), or(v.filename, 'PATH'), ...(v.size ? ['--size', sizeWord(v.size)] : [])),
  async run(v) {
    await rpc('bdev_aio_create', given({ name: v.name, filename: v.filename, block_size: 0, size: v.size }));
    return `Bdev ${v.name} was created.`;
  },
});

export const createRam = (): Act => ({
  title: 'Create a RAM disk',
  about: 'Its contents end with the daemon. Use it for tests.',
  label: 'Create',
  fields: [
    { key: 'name', label: 'Name', kind: 'text' },
    { key: 'size', label: 'Size', kind: 'size', initial: '64 MiB' },
  ],
  command: (v) => line('bdev', 'create', 'malloc', or(v.name, 'NAME'), '--size', sized(v.size) ?? 'SIZE'),
  async run(v) {
    await rpc('bdev_malloc_create', { name: v.name, block_size: 512, num_blocks: Math.floor(v.size / 512) });
    return `RAM disk ${v.name} was created.`;
  },
});

export const attachDrive = (): Act => ({
  title: 'Attach an NVMe drive',
  about: 'The drive must be given to userspace first: nacre nvme bind ADDRESS, on this machine. That command refuses a drive in use.',
  label: 'Attach',
  fields: [
    { key: 'name', label: 'Name of the controller', kind: 'text', initial: 'Nvme0', hint: 'Its namespaces become bdevs named Nvme0n1, Nvme0n2 and so on.' },
    { key: 'traddr', label: 'PCI address', kind: 'text', hint: 'Such as 0000:5e:00.0; nacre nvme list shows all.' },
  ],
  command: (v) => line('bdev', 'attach', `pcie://${or(v.traddr, 'BDF')}`, '--name', or(v.name, 'NAME')),
  async run(v) {
    const names = await rpc<string[]>('bdev_nvme_attach_controller', { name: v.name, trtype: 'PCIe', traddr: v.traddr });
    return `Attached: ${names.join(', ')}.`;
  },
});

export const attachRemote = (): Act => ({
  title: 'Attach remote namespaces',
  about: 'Connects to a subsystem of another target. Its namespaces become bdevs, for replicas on another machine.',
  label: 'Attach',
  fields: [
    { key: 'name', label: 'Name of the controller', kind: 'text' },
    { key: 'trtype', label: 'Transport', kind: 'select', options: [['AUTO', 'as the configuration says'], ['TCP', 'TCP'], ['RDMA', 'RDMA']] },
    { key: 'traddr', label: 'Address', kind: 'text' },
    { key: 'trsvcid', label: 'Port', kind: 'number', initial: '4420' },
    { key: 'subnqn', label: 'NQN of the subsystem', kind: 'text' },
  ],
  command: (v) => line('bdev', 'attach', `${url({ trtype: or(v.trtype, 'auto'), traddr: or(v.traddr, 'ADDRESS'), trsvcid: String(v.trsvcid ?? 4420) })}/${or(v.subnqn, 'NQN')}`, '--name', or(v.name, 'NAME')),
  async run(v) {
    const params = { name: v.name, trtype: v.trtype, traddr: v.traddr, trsvcid: String(v.trsvcid), subnqn: v.subnqn };
    const names = await rpc<string[]>('bdev_nvme_attach_controller', params);
    return `Attached: ${names.join(', ')}.`;
  },
});

export const detach = (name: string, bdevs: string[]): Act => ({
  title: `Detach controller ${name}`,
  label: 'Detach',
  danger: { lost: `the ${bdevs.length === 1 ? 'bdev' : 'bdevs'} ${bdevs.join(', ') || 'of the controller'}, and all bdevs on top. The data stays on the device.`, name },
  command: () => line('bdev', 'detach', name),
  async run() {
    await rpc('bdev_nvme_detach_controller', { name });
    return `Controller ${name} was detached.`;
  },
});

const DELETE: Record<string, string> = {
  'AIO disk': 'bdev_aio_delete',
  'URING bdev': 'bdev_uring_delete',
  'Malloc disk': 'bdev_malloc_delete',
  'Null disk': 'bdev_null_delete',
};
export const deleteMethod = (bdev: Bdev): string | undefined => DELETE[bdev.product_name];

export const deleteBdev = (bdev: Bdev, used: User[]): Act => ({
  title: `Delete bdev ${bdev.name}`,
  label: 'Delete',
  danger: {
    lost: `${used.length > 0 ? `its use as ${used.map((user) => user.text).join(', ')}, and all bdevs on top` : 'the bdev, and all bdevs on top'}. ${bdev.product_name === 'Malloc disk' ? `All ${bytes(size(bdev))} of data in it are lost.` : 'The file stays.'}`,
    name: bdev.name,
  },
  command: () => line('bdev', 'delete', bdev.name),
  async run() {
    await rpc(deleteMethod(bdev)!, { name: bdev.name });
    return `Bdev ${bdev.name} was deleted.`;
  },
});

export const rescan = (bdev: Bdev): Act => ({
  title: `Rescan bdev ${bdev.name}`,
  about: 'Takes over the present size of the file or block device, and notifies hosts.',
  label: 'Rescan',
  force: { lost: 'data past the new, smaller end, which connected hosts still use', name: bdev.name },
  command: (v) => line('bdev', 'rescan', bdev.name, v.force && '--force'),
  async run(v) {
    const method = bdev.product_name === 'URING bdev' ? 'bdev_uring_rescan' : 'bdev_aio_rescan';
    await rpc(method, given({ name: bdev.name, force: v.force ? true : undefined }));
    return `Bdev ${bdev.name} has its present size.`;
  },
});

export const limit = (bdev: Bdev): Act => {
  const now = bdev.assigned_rate_limits;
  const flags = (v: Values) => [
    ['--iops', v.rw_ios_per_sec, ''],
    ['--total', v.rw_mbytes_per_sec, 'MiB'],
    ['--read', v.r_mbytes_per_sec, 'MiB'],
    ['--write', v.w_mbytes_per_sec, 'MiB'],
  ];
  return {
    title: `Limit the I/O of ${shownName(bdev)}`,
    about: 'I/O above a limit waits. 0 ends a limit.',
    label: 'Set limits',
    fields: [
      { key: 'rw_ios_per_sec', label: 'Reads and writes', kind: 'number', unit: 'IOPS', initial: String(now.rw_ios_per_sec ?? 0) },
      { key: 'rw_mbytes_per_sec', label: 'Reads and writes together', kind: 'number', unit: 'MiB/s', initial: String(now.rw_mbytes_per_sec ?? 0) },
      { key: 'r_mbytes_per_sec', label: 'Reads', kind: 'number', unit: 'MiB/s', initial: String(now.r_mbytes_per_sec ?? 0) },
      { key: 'w_mbytes_per_sec', label: 'Writes', kind: 'number', unit: 'MiB/s', initial: String(now.w_mbytes_per_sec ?? 0) },
    ],
    command: (v) => line('bdev', 'limit', bdev.name, ...flags(v).flatMap(([flag, value, unit]) => (value === undefined ? [] : [flag, `${value}${value === 0 ? '' : unit}`]))),
    async run(v) {
      await rpc('bdev_set_qos_limit', { name: bdev.name, ...given(v) });
      return `Limits of ${shownName(bdev)} were set.`;
    },
  };
};

// Pools and lvols

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

// Volumes

const capacity = (volume: Volume) => volume.block_size * volume.num_blocks;

export const createVolume = (world: World): Act => ({
  title: 'Create a volume',
  about: 'A volume keeps the same data on one to five bdevs. Each replica should be on a device of its own.',
  label: 'Create',
  fields: [
    { key: 'name', label: 'Name', kind: 'text', hint: 'Such as vol0.' },
    { key: 'devices', label: 'Bdevs, one per replica', kind: 'bdevs', bdevs: free(world), most: 5 },
    { key: 'size', label: 'Size', kind: 'size', optional: true, hint: 'As large as the smallest bdev allows unless given.' },
    { key: 'min', label: 'Replicas that a write needs', kind: 'number', initial: '1', hint: 'Writes wait while fewer replicas are in sync.' },
  ],
  force: { lost: 'all data on the chosen bdevs', name: 'overwrite' },
  command: (v) => line('volume', 'create', or(v.name, 'NAME'), ...(v.devices?.length ? v.devices : ['BDEV']), ...(v.size ? ['--size', sizeWord(v.size)] : []), ...(v.min > 1 ? ['--min-in-sync', String(v.min)] : []), v.force && '--force'),
  async run(v) {
    const settings = v.min > 1 ? { min_in_sync: v.min } : undefined;
    await rpc('volume_create', given({ name: v.name, devices: v.devices, size_mb: mib(v.size), settings, force: v.force ? true : undefined }));
    return `Volume ${v.name} was created.`;
  },
});

export const addReplica = (volume: Volume, world: World): Act => ({
  title: `Add a replica to ${volume.name}`,
  about: `The bdev needs ${bytes(capacity(volume) + MIB)}. It is filled while hosts use the volume.`,
  label: 'Add replica',
  fields: [{ key: 'device', label: 'Bdev', kind: 'select', options: freeOptions(world) }],
  force: { lost: 'all data on the bdev', name: volume.name },
  command: (v) => line('volume', 'add-replica', volume.name, or(v.device, 'BDEV'), v.force && '--force'),
  async run(v) {
    await rpc('volume_add_replica', given({ name: volume.name, device: v.device, force: v.force ? true : undefined }));
    return `${v.device} is being filled.`;
  },
});

export const replaceReplica = (volume: Volume, replica: Replica, world: World): Act => {
  const move = replica.state === 'in_sync';
  return {
    title: `${move ? 'Move' : 'Replace'} replica ${replica.device} of ${volume.name}`,
    about: move ? 'The present replica is used until the new one is in sync, so redundancy is never reduced.' : 'The present replica goes when the new one is in sync.',
    label: move ? 'Move' : 'Replace',
    fields: [{ key: 'device', label: 'Bdev of the new replica', kind: 'select', options: freeOptions(world) }],
    force: { lost: 'all data on the new bdev', name: volume.name },
    command: (v) => line('volume', move ? 'move' : 'replace', volume.name, replica.device, or(v.device, 'BDEV'), v.force && '--force'),
    async run(v) {
      const params = given({ name: volume.name, replica: replica.id, device: v.device, force: v.force ? true : undefined });
      await rpc(move ? 'volume_move_replica' : 'volume_replace_replica', params);
      return `${v.device} is being filled.`;
    },
  };
};

const lastGood = (volume: Volume, replica: Replica) => ({ lost: `the last good copy of volume ${volume.name}, ${bytes(capacity(volume))}: ${replica.device}`, name: volume.name });

export const removeReplica = (volume: Volume, replica: Replica): Act => ({
  title: `Remove replica ${replica.device} of ${volume.name}`,
  about: 'The replica is taken out for good, and its bdev is free.',
  label: 'Remove',
  danger: { lost: `one of ${plural(volume.replicas.length, 'copy', 'copies')} of volume ${volume.name}`, name: replica.device },
  force: lastGood(volume, replica),
  command: (v) => line('volume', 'remove-replica', volume.name, replica.device, ...(v.force ? ['--force', v.force] : [])),
  async run(v) {
    await rpc('volume_remove_replica', given({ name: volume.name, replica: replica.id, force: v.force }));
    return `${replica.device} is no replica of ${volume.name} any more.`;
  },
});

export const offline = (volume: Volume, replica: Replica): Act => ({
  title: `Take replica ${replica.device} offline`,
  about: 'The replica is not used until it is brought online. Missed writes are counted, and only these are copied then.',
  label: 'Take offline',
  force: lastGood(volume, replica),
  command: (v) => line('volume', 'offline', volume.name, replica.device, ...(v.force ? ['--force', v.force] : [])),
  async run(v) {
    await rpc('volume_offline_replica', given({ name: volume.name, replica: replica.id, force: v.force }));
    return `${replica.device} is offline.`;
  },
});

export const online = (volume: Volume, replica: Replica): Act => ({
  title: `Bring replica ${replica.device} online`,
  about: 'The regions that it missed are copied to it.',
  label: 'Bring online',
  command: () => line('volume', 'online', volume.name, replica.device),
  async run() {
    await rpc('volume_online_replica', { name: volume.name, replica: replica.id });
    return `${replica.device} is online.`;
  },
});

export const resync = (volume: Volume): Act => ({
  title: `Resync ${volume.name} now`,
  about: 'Tries to bring the replicas in sync now, without waiting for the next turn.',
  label: 'Resync',
  command: () => line('volume', 'resync', volume.name),
  async run() {
    await rpc('volume_resync', { name: volume.name });
    return `A resync of ${volume.name} was started.`;
  },
});

export const verify = (volume: Volume): Act => ({
  title: `Verify ${volume.name}`,
  about: 'Compares the replicas that are in sync, while hosts use the volume.',
  label: 'Verify',
  fields: [{ key: 'repair', label: 'Repair differences', kind: 'check', hint: 'Writes the content that most replicas have to the others. In a tie, the first replica in sync wins.' }],
  command: (v) => line('volume', 'verify', volume.name, v.repair && '--repair'),
  async run(v) {
    await rpc('volume_verify', given({ name: volume.name, repair: v.repair || undefined }));
    return `The verification of ${volume.name} has started.`;
  },
});

export const stopVerify = (volume: Volume): Act => ({
  title: `Stop the verification of ${volume.name}`,
  label: 'Stop',
  command: () => line('volume', 'verify', volume.name, '--stop'),
  async run() {
    await rpc('volume_verify', { name: volume.name, stop: true });
    return 'The verification was stopped.';
  },
});

export const growVolume = (volume: Volume): Act => ({
  title: `Grow ${volume.name}`,
  about: `It has ${bytes(capacity(volume))} now. Its bdevs must have grown before. Hosts see the new size at once.`,
  label: 'Grow',
  fields: [{ key: 'size', label: 'New size', kind: 'size', optional: true, hint: 'As large as the smallest bdev allows unless given.' }],
  command: (v) => line('volume', 'grow', volume.name, sized(v.size)),
  async run(v) {
    const now = await rpc<Volume>('volume_grow', given({ name: volume.name, size_mb: mib(v.size) }));
    return now?.num_blocks && now.block_size ? `${volume.name} has ${bytes(capacity(now))}.` : `${volume.name} has grown.`;
  },
});

export const renameVolume = (volume: Volume, then: (name: string) => void): Act => ({
  title: `Rename ${volume.name}`,
  about: 'Hosts know the volume by its UUID and notice nothing. The subsystem keeps its name.',
  label: 'Rename',
  fields: [{ key: 'new_name', label: 'New name', kind: 'text', initial: volume.name }],
  command: (v) => line('volume', 'rename', volume.name, or(v.new_name, 'NAME')),
  async run(v) {
    await rpc('volume_rename', { name: volume.name, new_name: v.new_name });
    then(v.new_name);
    return `The volume is named ${v.new_name}.`;
  },
});

export const setVolume = (volume: Volume): Act => {
  const now = volume.settings;
  const shownSettings = (v: Values): Values => {
    const c = changed(v);
    return Object.keys(c).length > 0 ? c : now;
  };
  const changed = (v: Values): Values =>
    Object.fromEntries(Object.entries({
      description: v.description !== now.description ? (v.description ?? '') : undefined,
      min_in_sync: v.min_in_sync !== now.min_in_sync ? v.min_in_sync : undefined,
      resync_bytes_per_s: v.rate !== undefined && v.rate * MIB !== now.resync_bytes_per_s ? Math.round(v.rate * MIB) : undefined,
      read_policy: v.read_policy !== now.read_policy ? v.read_policy : undefined,
      transport_policy: v.transport_policy !== now.transport_policy ? v.transport_policy : undefined,
      verify_hours: v.verify_hours !== now.verify_hours ? v.verify_hours : undefined,
    }).filter(([, value]) => value !== undefined));
  return {
    title: `Settings of ${volume.name}`,
    label: 'Change',
    fields: [
      { key: 'description', label: 'Description', kind: 'text', initial: now.description, optional: true },
      { key: 'min_in_sync', label: 'Replicas that a write needs', kind: 'number', initial: String(now.min_in_sync), hint: 'Writes wait while fewer replicas are in sync.' },
      { key: 'rate', label: 'Limit of a resync', kind: 'number', unit: 'MiB/s', initial: String(Number(now.resync_bytes_per_s) / MIB), hint: '0: no limit. I/O of hosts has priority in any case.' },
      { key: 'read_policy', label: 'Reads', kind: 'select', initial: now.read_policy, options: [['local-first', 'local replica first'], ['least-outstanding', 'replica with the least I/O in flight'], ['round-robin', 'replicas in turn']] },
      { key: 'transport_policy', label: 'Transports of hosts', kind: 'select', initial: now.transport_policy, options: [['inherit', 'every listener (inherit)'], ['any', 'every listener (any)'], ['rdma-only', 'RDMA only'], ['tcp-only', 'TCP only']] },
      { key: 'verify_hours', label: 'Verify every', kind: 'number', unit: 'hours', initial: String(now.verify_hours), hint: '0: not by itself.' },
    ],
    command: (v) => {
      const c = shownSettings(v);
      const flags: [string, unknown][] = [['--description', c.description], ['--min-in-sync', c.min_in_sync], ['--resync-rate', c.resync_bytes_per_s === undefined ? undefined : sizeWord(c.resync_bytes_per_s)], ['--read-policy', c.read_policy], ['--transport-policy', c.transport_policy], ['--verify-hours', c.verify_hours]];
      return line('volume', 'set', volume.name, ...flags.flatMap(([flag, value]) => (value === undefined ? [] : [flag, String(value)])));
    },
    async run(v) {
      const settings = changed(v);
      if (Object.keys(settings).length === 0) return 'Nothing was changed.';
      await rpc('volume_set', { name: volume.name, settings });
      return `Settings of ${volume.name} were changed.`;
    },
  };
};

export const deleteVolume = (volume: Volume, then: () => void): Act => ({
  title: `Delete volume ${volume.name}`,
  about: volume.subsystems.length > 0 ? 'Hosts have the volume: unpublish it first. The daemon refuses to delete a volume in use.' : undefined,
  label: 'Delete',
  danger: { lost: `all data of volume ${volume.name}, ${bytes(capacity(volume))}, on ${plural(volume.replicas.length, 'replica')}. The bdevs are free then.`, name: volume.name },
  force: { lost: `all data of volume ${volume.name}, although some replicas cannot be reached; their labels stay`, name: volume.name },
  command: (v) => line('volume', 'delete', volume.name, ...(v.force ? ['--force', v.force] : [])),
  async run(v) {
    await rpc('volume_delete', given({ name: volume.name, force: v.force }));
    then();
    return `Volume ${volume.name} was deleted.`;
  },
});

const LISTENER = (optional: boolean): Act['fields'] => [
  { key: 'trtype', label: 'Transport', kind: 'select', options: [['TCP', 'TCP'], ['RDMA', 'RDMA']] },
  { key: 'traddr', label: 'Address', kind: 'text', optional, initial: /^[\d.]+$/.test(location.hostname) && !location.hostname.startsWith('127.') ? location.hostname : '', hint: optional ? 'An IP address of this machine. Every listener of the configuration file unless given.' : 'An IP address of this machine. 0.0.0.0 is every IPv4 address.' },
  { key: 'trsvcid', label: 'Port', kind: 'number', initial: '4420' },
];

const address = (v: Values) => ({ trtype: v.trtype as string, traddr: v.traddr as string, adrfam: v.traddr?.includes(':') ? 'IPv6' : 'IPv4', trsvcid: String(v.trsvcid ?? 4420) });

/** One line per listener, for each host or for any. */
export const connectLines = (nqn: string, at: Address[], hosts: string[]) => (hosts.length > 0 ? hosts : [undefined]).flatMap((host) => at.map((listener) => connectLine(nqn, listener, host)));

export const publish = (volume: Volume): Act => ({
  title: `Publish ${volume.name} to hosts`,
  about: 'Makes a subsystem with the volume as its one namespace. A host finds its NQN in /etc/nvme/hostnqn.',
  label: 'Publish',
  fields: [
    { key: 'any', label: 'Allow any host', kind: 'check', hint: 'Every machine that reaches the listener can read and write the volume.' },
    { key: 'hosts', label: 'NQNs of hosts', kind: 'lines', hint: 'One per line.', when: (v) => !v.any },
    ...LISTENER(true)!,
  ],
  command: (v) => line('volume', 'publish', volume.name, v.any && '--allow-any-host', ...(v.hosts ?? []).flatMap((host: string) => ['--host', host]), ...(v.traddr ? ['--listen', url(address(v))] : [])),
  async run(v) {
    const params = given({ name: volume.name, allow_any_host: v.any || undefined, hosts: v.hosts, listeners: v.traddr ? [address(v)] : undefined });
    const answer = await rpc<{ nqn: string; listen_addresses: Address[] }>('volume_publish', params);
    return { text: `Volume ${volume.name} is published as ${answer.nqn}.`, lines: connectLines(answer.nqn, answer.listen_addresses, v.hosts ?? []) };
  },
});

export const unpublish = (volume: Volume): Act => ({
  title: `Unpublish ${volume.name}`,
  label: 'Unpublish',
  danger: { lost: `the access of all hosts to volume ${volume.name}; their file systems on it fail. The data stays.`, name: volume.name },
  command: () => line('volume', 'unpublish', volume.name),
  async run() {
    await rpc('volume_unpublish', { name: volume.name });
    return `Volume ${volume.name} is not published any more.`;
  },
});

export const thaw = (volume: Volume): Act => ({
  title: `Thaw ${volume.name}`,
  about: volume.state === 'failing' ? 'Ends fail-io: the volume serves again.' : 'The volume serves again, from the replicas that are there.',
  label: 'Thaw',
  fields: volume.state === 'failing' ? [] : [{ key: 'replica', label: 'Replica to serve from', kind: 'select', options: [['', 'the present replica that left last'], ...volume.replicas.map((r): [string, string] => [r.device, `${r.device} (${r.state.replaceAll('_', ' ')}${r.attached ? '' : ', missing'})`])] }],
  danger: volume.state === 'failing' ? undefined : { lost: `writes that hosts know as done, acknowledged after that replica left volume ${volume.name}`, name: volume.name },
  command: (v) => line('volume', 'thaw', volume.name, ...(volume.state === 'failing' ? [] : ['--force', volume.name]), ...(v.replica ? ['--replica', v.replica] : [])),
  async run(v) {
    await rpc('volume_thaw', given({ name: volume.name, force: volume.state === 'failing' ? undefined : volume.name, replica: v.replica }));
    return `Volume ${volume.name} serves again.`;
  },
});

export const failIo = (volume: Volume): Act => ({
  title: `Fail the I/O of ${volume.name}`,
  about: 'Hosts get errors at once, so that they can continue without the volume. Thaw ends it.',
  label: 'Fail the I/O',
  danger: { lost: `all I/O that waits for volume ${volume.name}, and all that comes: applications on hosts see errors`, name: volume.name },
  command: () => line('volume', 'fail-io', volume.name),
  async run() {
    await rpc('volume_fail_io', { name: volume.name });
    return `I/O of ${volume.name} fails until it is thawed.`;
  },
});

// Subsystems

export const createSubsystem = (): Act => ({
  title: 'Create a subsystem',
  about: 'To give hosts one volume, publish the volume: that makes its subsystem.',
  label: 'Create',
  fields: [
    { key: 'nqn', label: 'NQN', kind: 'text', hint: 'Such as nqn.2026-01.com.example:disk0.' },
    { key: 'any', label: 'Allow any host', kind: 'check' },
    { key: 'ana', label: 'Report ANA states, so that hosts prefer a path', kind: 'check', initial: true },
  ],
  command: (v) => line('subsystem', 'create', or(v.nqn, 'NQN'), v.any && '--allow-any-host', v.ana && '--ana'),
  async run(v) {
    await rpc('nvmf_create_subsystem', { nqn: v.nqn, allow_any_host: v.any, ana_reporting: v.ana });
    return `Subsystem ${v.nqn} was created.`;
  },
});

export const deleteSubsystem = (s: Subsystem, then: () => void): Act => ({
  title: 'Delete a subsystem',
  label: 'Delete',
  danger: { lost: `subsystem ${s.nqn} with ${plural(s.namespaces?.length ?? 0, 'namespace')}: its hosts are disconnected. The bdevs and their data stay.`, name: s.nqn.split(':').at(-1)! },
  command: () => line('subsystem', 'delete', s.nqn),
  async run() {
    await rpc('nvmf_delete_subsystem', { nqn: s.nqn });
    then();
    return `Subsystem ${s.nqn} was deleted.`;
  },
});

export const addNamespace = (s: Subsystem, world: World): Act => ({
  title: 'Add a namespace',
  label: 'Add',
  fields: [{ key: 'bdev', label: 'Bdev', kind: 'select', options: freeOptions(world, true) }],
  command: (v) => line('subsystem', 'add-namespace', s.nqn, or(v.bdev, 'BDEV')),
  async run(v) {
    const nsid = await rpc<number>('nvmf_subsystem_add_ns', { nqn: s.nqn, namespace: { bdev_name: v.bdev } });
    return `Namespace ${nsid} was added.`;
  },
});

export const removeNamespace = (s: Subsystem, nsid: number, bdev: string): Act => ({
  title: `Remove namespace ${nsid}`,
  label: 'Remove',
  danger: { lost: `the access of hosts to ${bdev} through ${s.nqn}. The bdev and its data stay.`, name: bdev },
  command: () => line('subsystem', 'remove-namespace', s.nqn, String(nsid)),
  async run() {
    await rpc('nvmf_subsystem_remove_ns', { nqn: s.nqn, nsid });
    return `Namespace ${nsid} was removed.`;
  },
});

export const allowHost = (s: Subsystem): Act => ({
  title: 'Allow a host',
  about: 'A host finds its NQN in /etc/nvme/hostnqn. The name is a claim unless the host has a key: see nacre host allow --generate-key.',
  label: 'Allow',
  fields: [
    { key: 'host', label: 'NQN of the host', kind: 'text' },
    { key: 'dhchap_key', label: 'Name of its key', kind: 'text', optional: true, hint: 'For authentication, from nacre key list.' },
  ],
  command: (v) => line('host', 'allow', s.nqn, or(v.host, 'HOSTNQN'), ...(v.dhchap_key ? ['--dhchap-key', v.dhchap_key] : [])),
  async run(v) {
    await rpc('nvmf_subsystem_add_host', given({ nqn: s.nqn, host: v.host, dhchap_key: v.dhchap_key }));
    return { text: `Host ${v.host} may connect.`, lines: s.listen_addresses.length > 0 ? connectLines(s.nqn, s.listen_addresses, [v.host]) : undefined };
  },
});

export const removeHost = (s: Subsystem, host: string): Act => ({
  title: 'Stop allowing a host',
  label: 'Remove',
  danger: { lost: `the access of host ${host} to ${s.nqn}: it is disconnected unless any host is allowed`, name: host.slice(-8) },
  command: () => line('host', 'remove', s.nqn, host),
  async run() {
    await rpc('nvmf_subsystem_remove_host', { nqn: s.nqn, host });
    return `Host ${host} may not connect any more.`;
  },
});

export const allowAny = (s: Subsystem): Act =>
  s.allow_any_host
    ? {
        title: 'Allow only the hosts of the list',
        label: 'Allow only these',
        danger: { lost: `the access of every host that is not in the list of ${s.nqn}: they are disconnected`, name: s.nqn.split(':').at(-1)! },
        command: () => line('host', 'allow-any', s.nqn, '--off'),
        async run() {
          await rpc('nvmf_subsystem_allow_any_host', { nqn: s.nqn, allow_any_host: false });
          return 'Only the hosts of the list may connect.';
        },
      }
    : {
        title: 'Allow any host',
        about: 'Every machine that reaches a listener can read and write all namespaces of the subsystem.',
        label: 'Allow any host',
        command: () => line('host', 'allow-any', s.nqn),
        async run() {
          await rpc('nvmf_subsystem_allow_any_host', { nqn: s.nqn, allow_any_host: true });
          return 'Any host may connect.';
        },
      };

export const addListener = (s: Subsystem): Act => ({
  title: 'Add a listener',
  label: 'Add',
  fields: LISTENER(false),
  command: (v) => line('listener', 'add', s.nqn, url({ ...address(v), traddr: or(v.traddr, 'ADDRESS') })),
  async run(v) {
    await rpc('nvmf_subsystem_add_listener', { nqn: s.nqn, listen_address: address(v) });
    return { text: `The subsystem listens on ${url(address(v))}.`, lines: connectLines(s.nqn, [address(v)], []) };
  },
});

export const removeListener = (s: Subsystem, at: Address): Act => ({
  title: `Remove listener ${url(at)}`,
  label: 'Remove',
  danger: { lost: `the connections of all hosts through ${url(at)} to ${s.nqn}`, name: at.traddr },
  command: () => line('listener', 'remove', s.nqn, url(at)),
  async run() {
    await rpc('nvmf_subsystem_remove_listener', { nqn: s.nqn, listen_address: at });
    return `Listener ${url(at)} was removed.`;
  },
});

export const setAna = (s: Subsystem, at: Address, now: string): Act => ({
  title: `ANA state of ${url(at)}`,
  about: 'Hosts are notified and move their I/O. On an inaccessible path a host retries on another one, and waits if it has none.',
  label: 'Set state',
  fields: [{ key: 'state', label: 'State', kind: 'select', initial: now, options: [['optimized', 'optimized: hosts prefer it'], ['non_optimized', 'non-optimized: hosts use it when no optimized one works'], ['inaccessible', 'inaccessible: hosts do not use it']] }],
  command: (v) => line('listener', 'set-ana', s.nqn, url(at), String(v.state).replaceAll('_', '-')),
  async run(v) {
    await rpc('nvmf_subsystem_listener_set_ana_state', { nqn: s.nqn, listen_address: at, ana_state: v.state });
    return `${url(at)} is ${String(v.state).replaceAll('_', '-')}.`;
  },
});

export const testFailover = (s: Subsystem, at: Address): Act => {
  const params = (v: Values) => ({ nqn: s.nqn, listen_address: at, seconds: v.seconds ?? 30 });
  return {
    title: `Test the failover from ${url(at)}`,
    about: 'The listener is inaccessible for the time, so that hosts move their I/O to another one. Its state returns by itself. The test is refused if a connected host has no other path.',
    label: 'Start the test',
    fields: [{ key: 'seconds', label: 'For', kind: 'number', unit: 'seconds', initial: '30', hint: 'At most 3600; 0 ends a running test.' }],
    command: (v) => rpcLine('nvmf_subsystem_test_failover', params(v)),
    async run(v) {
      const answer = await rpc<{ accessible: Address[] }>('nvmf_subsystem_test_failover', params(v));
      return { text: `${url(at)} is inaccessible for ${seconds(v.seconds ?? 30)}. These listeners stay accessible:`, detail: answer.accessible.map(url) };
    },
  };
};

// Settings

export const silence = (): Act => {
  const HOURS: Record<string, string> = { 3600: '1h', 7200: '2h', 28800: '8h', 86400: '24h', 604800: '7d' };
  return {
    title: 'Silence alerts',
    about: 'The events themselves stay. A silence ends after its time, or with the daemon.',
    label: 'Silence',
    fields: [
      { key: 'duration', label: 'For', kind: 'select', options: Object.keys(HOURS).map((key) => [key, seconds(Number(key)).replace(/ 0 (min|h)$/, '')]) },
      { key: 'object', label: 'Only events about', kind: 'text', optional: true, hint: 'The name of an object, such as vol0.' },
      { key: 'types', label: 'Only events of types', kind: 'lines', optional: true, hint: 'Such as replica_out, one per line.' },
    ],
    command: (v) => line('alert', 'silence', '--for', HOURS[v.duration], ...(v.types?.length ? ['--type', v.types.join(',')] : []), ...(v.object ? ['--object', v.object] : [])),
    async run(v) {
      await rpc('alert_silence', given({ duration_s: Number(v.duration), object: v.object, types: v.types }));
      return 'Alerts are silenced.';
    },
  };
};

export const unsilence = (id: number): Act => ({
  title: 'End a silence',
  about: 'Events that it covered are not sent later.',
  label: 'End the silence',
  command: () => line('alert', 'unsilence', String(id)),
  async run() {
    await rpc('alert_unsilence', { id });
    return 'The silence has ended.';
  },
});

export const testAlert = (name?: string): Act => ({
  title: name ? `Test receiver ${name}` : 'Test all receivers',
  about: 'Sends a test message once, whatever is silenced.',
  label: 'Send',
  command: () => line('alert', 'test', name),
  async run() {
    const results = await rpc<{ name: string; delivered: boolean; error?: string; milliseconds: number }[]>('alert_test', given({ name }));
    return { text: results.length === 0 ? 'There is no receiver.' : 'The answers of the receivers:', detail: results.map((r) => `${r.name}: ${r.delivered ? `accepted the message in ${r.milliseconds} ms` : `did not accept it: ${r.error}`}`) };
  },
});

const ROLES: [string, string][] = [
  ['viewer', 'viewer: sees everything, changes nothing'],
  ['operator', 'operator: also resync, verify, ANA states, silences'],
  ['admin', 'admin: everything'],
];
const PASSWORD = 'PASSWORD';

export const addAccount = (): Act => ({
  title: 'Add an account',
  label: 'Add',
  fields: [
    { key: 'name', label: 'Name', kind: 'text', hint: 'Small letters, digits, dot, underscore and hyphen; a letter first.' },
    { key: 'role', label: 'Role', kind: 'select', options: ROLES },
    { key: 'password', label: 'Password', kind: 'password', hint: 'At least 12 characters.' },
  ],
  command: (v) => rpcLine('web_account_add', { name: or(v.name, 'NAME'), role: v.role, password: PASSWORD }),
  async run(v) {
    await rpc('web_account_add', { name: v.name, role: v.role, password: v.password });
    return `Account ${v.name} was added.`;
  },
});

export const changeAccount = (account: Account): Act => ({
  title: `Change account ${account.name}`,
  user: account.name,
  label: 'Change',
  fields: [
    { key: 'role', label: 'Role', kind: 'select', options: ROLES, initial: account.role },
    { key: 'password', label: 'New password', kind: 'password', optional: true, hint: 'At least 12 characters. Unchanged unless given.' },
  ],
  command: (v) => rpcLine('web_account_change', given({ name: account.name, role: v.role === account.role ? undefined : v.role, password: v.password ? PASSWORD : undefined })),
  async run(v) {
    await rpc('web_account_change', given({ name: account.name, role: v.role === account.role ? undefined : v.role, password: v.password }));
    return `Account ${account.name} was changed.`;
  },
});

export const removeAccount = (account: Account): Act => ({
  title: `Remove account ${account.name}`,
  label: 'Remove',
  danger: { lost: `the account ${account.name} (${account.role}), and its sessions`, name: account.name },
  command: () => rpcLine('web_account_remove', { name: account.name }),
  async run() {
    await rpc('web_account_remove', { name: account.name });
    return `Account ${account.name} was removed.`;
  },
});

export const retryState = (): Act => ({
  title: 'Restore configured objects now',
  about: 'Tries now to restore what could not be restored before.',
  label: 'Try again',
  command: () => line('state', 'retry'),
  async run() {
    const answer = await rpc<{ failed: number; restored: number }>('state_retry');
    return `${plural(answer.restored, 'object')} restored, ${answer.failed} failed.`;
  },
});

export const forget = (key: string): Act => ({
  title: `Forget ${key}`,
  label: 'Forget',
  danger: { lost: `the configuration of ${key}, with the objects in it or on it. Data on the device stays.`, name: key },
  command: () => line('state', 'forget', key),
  async run() {
    await rpc('state_forget', { key });
    return `${key} was forgotten.`;
  },
});
