/** Lists of several screens: the four that say who uses which bdev, and snapshots. For the start of a component. */
import { use } from './store.svelte';
import type { Bdev, Pool, Subsystem, Volume, VolumeSnapshot } from './types';

export function useWorld() {
  const bdevs = use<Bdev[]>('bdev_get_bdevs');
  const volumes = use<Volume[]>('volume_list', {}, 5);
  const pools = use<Pool[]>('pool_list');
  const subsystems = use<Subsystem[]>('nvmf_get_subsystems');
  return {
    bdevs,
    read: () => Promise.all([bdevs, volumes, pools, subsystems].map((one) => one.read())),
    get now() {
      return { bdevs: bdevs.value ?? [], volumes: volumes.value ?? [], pools: pools.value ?? [], subsystems: subsystems.value ?? [] };
    },
  };
}

/** The snapshots of volumes. For the start of a component. */
export const useSnapshots = () => use<VolumeSnapshot[]>('volume_snapshot_list', {}, 10);
