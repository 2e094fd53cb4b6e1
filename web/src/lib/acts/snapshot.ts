/** Acts on snapshots of volumes. */
import type { Act, Values } from '../act.svelte';
import { rpc } from '../api';
import { bytes, line, sizeWord, time } from '../format';
import type { Volume, VolumeSnapshot } from '../types';
import { MIB, given, or } from './common';

const MOST_BYTES = 63;
const MOST_REPLICAS = 5;
const HELD_UP_BY_NODE = 'A node that is away deletes its lvol when it returns. Until then the snapshot is listed as deleting.';
const HELD_UP_BY_POOL = 'A pool that is not open loses its lvol when it is opened. Until then the snapshot is listed as deleting.';

/** The name, or the UUID if the name is that of several. */
const word = (snapshot: VolumeSnapshot, all: VolumeSnapshot[]) => (all.some((one) => one.name === snapshot.name && one.uuid !== snapshot.uuid) ? snapshot.uuid : snapshot.name);
const whose = (snapshot: VolumeSnapshot) => (snapshot.volume_name === null ? `deleted volume ${snapshot.volume}` : `volume ${snapshot.volume_name}`);

/** The node that has the lvol, or outside of a cluster the pool. */
export const placeOf = (lvol: VolumeSnapshot['lvols'][number]) => lvol.node ?? lvol.pool_name ?? lvol.pool ?? 'not made yet';

export const makeSnapshot = (volume: Volume): Act => {
  const usual = `${volume.name}@${new Date().toISOString().slice(0, 10)}`;
  return {
    title: `Make a snapshot of ${volume.name}`,
    about: 'Hosts can write meanwhile. The snapshot has every write that was acknowledged before.',
    label: 'Make snapshot',
    fields: [{ key: 'name', label: 'Name', kind: 'text', initial: new TextEncoder().encode(usual).length > MOST_BYTES ? '' : usual, hint: `At most ${MOST_BYTES} bytes, without "/".` }],
    command: (v) => line('volume', 'snapshot', 'create', volume.name, or(v.name, 'NAME')),
    async run(v) {
      await rpc('volume_snapshot_create', { volume: volume.name, name: v.name });
      return `Snapshot ${v.name} of ${volume.name} was made.`;
    },
  };
};

export const deleteSnapshot = (snapshot: VolumeSnapshot, all: VolumeSnapshot[]): Act => {
  const made = snapshot.created_s === null ? null : time(snapshot.created_s * 1000);
  const isHeldUp = snapshot.lvols.some((one) => one.why !== null);
  const isLocal = snapshot.lvols.some((one) => one.node === null);
  return {
    title: `Delete snapshot ${snapshot.name}`,
    about: isHeldUp ? (isLocal ? HELD_UP_BY_POOL : HELD_UP_BY_NODE) : undefined,
    label: 'Delete',
    danger: {
      lost: made === null ? `snapshot ${snapshot.name} of ${whose(snapshot)}, which ${snapshot.state === 'failed' ? 'was not made' : 'is not made yet'}.` : `the contents that ${whose(snapshot)} had at ${made}, ${bytes(snapshot.size_bytes)}. Volumes that began with them keep their contents.`,
      name: snapshot.name,
    },
    command: () => line('volume', 'snapshot', 'delete', word(snapshot, all)),
    async run() {
      await rpc('volume_snapshot_delete', { snapshot: snapshot.uuid });
      return isHeldUp ? `Snapshot ${snapshot.name} is deleted as soon as its nodes are back.` : `Snapshot ${snapshot.name} was deleted.`;
    },
  };
};

/** `source`: the volume of the snapshot, if it exists. */
export const createFromSnapshot = (snapshot: VolumeSnapshot, all: VolumeSnapshot[], source?: Volume): Act => {
  const local = snapshot.lvols.filter((one) => one.node === null && one.why === null);
  const onPools = local.map((one) => one.pool_name ?? one.pool ?? '');
  const isLocal = local.length > 0;
  const least = Math.ceil(snapshot.size_bytes / MIB) * MIB;
  const usual = Math.min(MOST_REPLICAS, source?.replicas.length || snapshot.lvols.length || 1);
  const mebibytes = (v: Values) => (v.size === undefined ? undefined : Math.ceil(v.size / MIB));
  return {
    title: `Create a volume from ${snapshot.name}`,
    about: `The new volume begins with the contents of the snapshot. ${isLocal ? 'It has a replica on each pool of the snapshot.' : 'The cluster chooses the pools of its replicas, each on another node.'}`,
    label: 'Create',
    fields: [
      { key: 'name', label: 'Name', kind: 'text', hint: 'Such as vol0.' },
      { key: 'size', label: 'Size', kind: 'size', optional: true, least, hint: `At least that of the snapshot, ${bytes(snapshot.size_bytes)}, which it has unless given.` },
      ...(isLocal ? [] : [{ key: 'replicas', label: 'Replicas', kind: 'select' as const, initial: String(usual), options: Array.from({ length: MOST_REPLICAS }, (_, n): [string, string] => [String(n + 1), String(n + 1)]) }]),
      { key: 'thin', label: 'Take space as it is written', kind: 'check', hint: 'Unless checked, the pools keep room for the whole size.' },
    ],
    command: (v) => {
      const size = mebibytes(v);
      const places = isLocal ? onPools.flatMap((pool) => ['--pool', pool]) : ['--replicas', v.replicas];
      return line('volume', 'create', or(v.name, 'NAME'), ...places, '--snapshot', word(snapshot, all), ...(size ? ['--size', sizeWord(size * MIB)] : []), v.thin && '--thin');
    },
    async run(v) {
      const thin = v.thin || undefined;
      const places = isLocal ? { replicas: onPools.map((pool) => given({ pool, thin })) } : { replica_count: Number(v.replicas), thin };
      await rpc('volume_create', given({ name: v.name, ...places, snapshot: snapshot.uuid, size_mb: mebibytes(v) }));
      return `Volume ${v.name} was created.`;
    },
  };
};
