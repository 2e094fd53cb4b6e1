/** Acts on volumes and their replicas. */
import type { Act, Values } from '../act.svelte';
import { rpc } from '../api';
import { bytes, line, plural, sizeWord } from '../format';
import type { Address, Replica, Volume } from '../types';
import { url } from '../words';
import { LISTENER, MIB, mib, given, sized, or, type World, free, freeOptions, address, connectLines } from './common';

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
      const flags: [string, unknown][] = [['--description', c.description], ['--min-in-sync', c.min_in_sync], ['--resync-limit', c.resync_bytes_per_s === undefined ? undefined : sizeWord(c.resync_bytes_per_s)], ['--read-policy', c.read_policy], ['--transport-policy', c.transport_policy], ['--verify-hours', c.verify_hours]];
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

export const deleteVolume = (volume: Volume, hasSnapshots: boolean, then: () => void): Act => ({
  title: `Delete volume ${volume.name}`,
  about: [
    volume.subsystems.length > 0 && 'Hosts have the volume: unpublish it first. The daemon refuses to delete a volume in use.',
    hasSnapshots && 'Its snapshots are not deleted: the list of volumes will show them.',
  ].filter(Boolean).join(' '),
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
