/** The disks of the machine. For the start of a component. */
import { onMount } from 'svelte';
import { session } from './session.svelte';
import { Resource } from './store.svelte';
import type { MachineDisk } from './types';

/** Read once: the daemon looks at each disk for it, so no screen reads them again by itself. */
export function useDisks() {
  const found = new Resource<MachineDisk[]>('disk_list', {});
  const wanted = session.can('bdev_aio_create');
  onMount(() => {
    if (wanted) void found.read();
  });
  return {
    read: () => found.read(),
    get known() {
      return !wanted || found.value !== undefined || found.error !== undefined;
    },
    get now() {
      return found.value ?? [];
    },
  };
}
