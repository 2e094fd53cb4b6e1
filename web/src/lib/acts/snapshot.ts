/** Acts on snapshots of volumes of a cluster. */
import type { Act, Values } from '../act.svelte';
import { rpc } from '../api';
import { bytes, line, sizeWord, time } from '../format';
import type { Volume, VolumeSnapshot } from '../types';
import { MIB, given, or } from './common';

const MOST_BYTES = 63;
const MOST_REPLICAS = 5;

/** The name, or the UUID if the name is that of several. */
const word = (snapshot: VolumeSnapshot, all: VolumeSnapshot[]) => (all.some((one) => one.name === snapshot.name && one.uuid !== snapshot.uuid) ? snapshot.uuid : snapshot.name);
const whose = (snapshot: VolumeSnapshot) => (snapshot.volume_name === null ? `deleted volume ${snapshot.volume}` : `volume ${snapshot.volume_name}`);

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
  return {
    title: `Delete snapshot ${snapshot.name}`,
    about: isHeldUp ? 'A node that is away deletes its lvol when it returns. Until then the snapshot is listed as deleting.' : undefined,
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
  const least = Math.ceil(snapshot.size_bytes / MIB) * MIB;
  const usual = Math.min(MOST_REPLICAS, source?.replicas.length || snapshot.lvols.length || 1);
  const mebibytes = (v: Values) => (v.size === undefined ? undefined : Math.ceil(v.size / MIB));
  return {
    title: `Create a volume from ${snapshot.name}`,
    about: 'The new volume begins with the contents of the snapshot. The cluster chooses the pools of its replicas, each on another node.',
    label: 'Create',
    fields: [
      { key: 'name', label: 'Name', kind: 'text', hint: 'Such as vol0.' },
      { key: 'size', label: 'Size', kind: 'size', optional: true, least, hint: `At least that of the snapshot, ${bytes(snapshot.size_bytes)}, which it has unless given.` },
      { key: 'replicas', label: 'Replicas', kind: 'select', initial: String(usual), options: Array.from({ length: MOST_REPLICAS }, (_, n): [string, string] => [String(n + 1), String(n + 1)]) },
      { key: 'thin', label: 'Take space as it is written', kind: 'check', hint: 'Unless checked, the pools keep room for the whole size.' },
    ],
    command: (v) => {
      const size = mebibytes(v);
      return line('volume', 'create', or(v.name, 'NAME'), '--replicas', v.replicas, '--snapshot', word(snapshot, all), ...(size ? ['--size', sizeWord(size * MIB)] : []), v.thin && '--thin');
    },
    async run(v) {
      await rpc('volume_create', given({ name: v.name, replica_count: Number(v.replicas), snapshot: snapshot.uuid, size_mb: mebibytes(v), thin: v.thin || undefined }));
      return `Volume ${v.name} was created.`;
    },
  };
};
