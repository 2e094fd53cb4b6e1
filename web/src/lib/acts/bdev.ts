/** Acts on bdevs, drives and remote controllers. */
import type { Act, Values } from '../act.svelte';
import { rpc } from '../api';
import { bytes, line, plural, sizeWord } from '../format';
import type { Bdev, MachineDisk, TakenDrive } from '../types';
import { shownName, size, url, type User } from '../words';
import { given, sized, or } from './common';

/** Why a disk is not offered; empty for a free one. */
function taken(disk: MachineDisk): string {
  const [use] = [...disk.bdevs.map((name) => `bdev ${name}`), ...disk.uses];
  if (use) return use;
  if (disk.partitions > 0) return `it has ${plural(disk.partitions, 'partition')}`;
  return disk.read_only ? 'it is read-only' : '';
}

/** Free disks of the machine, by serial number. `driven`: those that vfio-pci has. */
export const freeDisks = (disks: MachineDisk[], driven = false) => disks.filter((disk) => (disk.path === undefined) === driven && taken(disk) === '');

const diskLabel = (disk: MachineDisk) => [disk.serial ?? disk.name, disk.model, disk.size > 0 ? bytes(disk.size) : ''].filter(Boolean).join(', ');
const MOST_NAMED = 4;
const TYPED = 'typed';

/** The disks that are not offered, with their users. */
function notOffered(disks: MachineDisk[]): string {
  const others = disks.filter((disk) => disk.path !== undefined && taken(disk) !== '');
  const named = others.slice(0, MOST_NAMED).map((disk) => `${disk.name} (${taken(disk)})`);
  const more = others.length > MOST_NAMED ? `; ${plural(others.length - MOST_NAMED, 'more disk')}` : '';
  return others.length > 0 ? ` Not offered: ${named.join('; ')}${more}.` : '';
}

export const createFile = (disks: MachineDisk[] = []): Act => {
  const offered = freeDisks(disks);
  const refused = notOffered(disks);
  const path = (v: Values) => (v.disk && v.disk !== TYPED ? v.disk : v.filename);
  const isTyped = (v: Values) => offered.length === 0 || v.disk === TYPED;
  return {
    title: 'Create a file bdev',
    about: 'A disk, another block device or a file of this machine becomes a bdev. A missing file is created if a size is given.',
    label: 'Create',
    fields: [
      { key: 'name', label: 'Name', kind: 'text', hint: 'Such as disk0.' },
      ...(offered.length > 0 ? [{ key: 'disk', label: 'Disk', kind: 'select' as const, initial: TYPED, options: [[TYPED, 'a path, typed below'], ...offered.map((disk) => [disk.path!, diskLabel(disk)])] as [string, string][], hint: `By serial number. Data on a disk without partitions is not detected.${refused}` }] : []),
      { key: 'filename', label: 'Path', kind: 'text', when: isTyped, hint: `Such as /dev/disk/by-id/… or /srv/nacre/disk0.img.${offered.length > 0 ? '' : refused}` },
      { key: 'size', label: 'Size', kind: 'size', optional: true, when: isTyped, hint: 'Only for a file that does not exist yet, such as 100 GiB.' },
    ],
    command: (v) => line('bdev', 'create', 'file', or(v.name, 'NAME'), or(path(v), 'PATH'), ...(v.size ? ['--size', sizeWord(v.size)] : [])),
    async run(v) {
      await rpc('bdev_aio_create', given({ name: v.name, filename: path(v), block_size: 0, size: v.size }));
      return `Bdev ${v.name} was created.`;
    },
  };
};

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

/** `isAppliance`: the page takes drives from the kernel. */
export const attachDrive = (disks: MachineDisk[] = [], isAppliance = false): Act => {
  const offered = freeDisks(disks, true);
  const address = (v: Values) => (v.drive && v.drive !== TYPED ? v.drive : v.traddr);
  return {
    title: 'Attach an NVMe drive',
    about: isAppliance
      ? 'The drive must be taken from the kernel first, by Take a drive.'
      : 'The drive must be given to userspace first: nacre nvme bind ADDRESS, on this machine. That command refuses a drive in use.',
    label: 'Attach',
    fields: [
      { key: 'name', label: 'Name of the controller', kind: 'text', initial: 'Nvme0', hint: 'Its namespaces become bdevs named Nvme0n1, Nvme0n2 and so on.' },
      ...(offered.length > 0 ? [{ key: 'drive', label: 'Drive', kind: 'select' as const, options: [...offered.map((disk) => [disk.name, diskLabel(disk)]), [TYPED, 'a PCI address, typed below']] as [string, string][], hint: 'Drives that were given to userspace.' }] : []),
      { key: 'traddr', label: 'PCI address', kind: 'text', when: (v: Values) => offered.length === 0 || v.drive === TYPED, hint: 'Such as 0000:5e:00.0; nacre nvme list shows all.' },
    ],
    command: (v) => line('bdev', 'attach', `pcie://${or(address(v), 'BDF')}`, '--name', or(v.name, 'NAME')),
    async run(v) {
      const names = await rpc<string[]>('bdev_nvme_attach_controller', { name: v.name, trtype: 'PCIe', traddr: address(v) });
      return `Attached: ${names.join(', ')}.`;
    },
  };
};

/** Free NVMe drives that the kernel has, one disk for each: a drive may have several namespaces. */
export const freeDrives = (disks: MachineDisk[]) => {
  const ofKernel = disks.filter((disk) => disk.path !== undefined && disk.address !== undefined);
  const isFirst = (disk: MachineDisk, at: number) => ofKernel.findIndex((one) => one.address === disk.address) === at;
  const isFree = (disk: MachineDisk) => ofKernel.every((one) => one.address !== disk.address || taken(one) === '');
  return ofKernel.filter((disk, at) => isFirst(disk, at) && isFree(disk));
};

export const takeDrive = (disks: MachineDisk[] = []): Act => {
  const offered = freeDrives(disks);
  const refused = notOffered(disks.filter((disk) => disk.address !== undefined));
  const address = (v: Values) => (v.drive && v.drive !== TYPED ? v.drive : v.address);
  const serial = (v: Values) => offered.find((disk) => disk.address === address(v))?.serial;
  return {
    title: 'Take a drive from the kernel',
    about: 'The daemon then drives it itself: less processor time for each I/O, and a lower latency. The kernel does not see the drive any more: no file system and no other program of this machine can use it until you give it back. Its data stays. Each start of the machine takes it again, by its serial number. A drive in use is refused, and one whose serial number and model another drive of the machine has, too.',
    label: 'Take',
    fields: [
      ...(offered.length > 0 ? [{ key: 'drive', label: 'Drive', kind: 'select' as const, options: [...offered.map((disk) => [disk.address!, `${diskLabel(disk)}, ${disk.address}`]), [TYPED, 'a PCI address, typed below']] as [string, string][], hint: `By serial number. Data on a disk without partitions is not detected.${refused}` }] : []),
      { key: 'address', label: 'PCI address', kind: 'text', when: (v: Values) => offered.length === 0 || v.drive === TYPED, hint: `Such as 0000:5e:00.0.${offered.length > 0 ? '' : refused}` },
    ],
    command: (v) => line('appliance', 'drive', 'bind', or(address(v), 'BDF'), ...(serial(v) ? ['--serial', serial(v)] : [])),
    async run(v) {
      await rpc('appliance_bind_drive', given({ address: address(v), serial: serial(v) }));
      return `Drive ${address(v)} is taken in a moment. Then attach it.`;
    },
  };
};

/** For a drive that was pulled and put back: the kernel has it until the next start. */
export const takeDriveAgain = (drive: TakenDrive): Act => ({
  title: `Take drive ${drive.serial} again`,
  about: 'The kernel has the drive since it was put back. The daemon drives it again: the kernel does not see it any more. The data on it stays. A drive in use is refused.',
  label: 'Take again',
  command: () => line('appliance', 'drive', 'bind', drive.address!, '--serial', drive.serial),
  async run() {
    await rpc('appliance_bind_drive', { address: drive.address!, serial: drive.serial });
    return `Drive ${drive.serial} is taken in a moment. Then attach it.`;
  },
});

export const giveDriveBack = (drive: TakenDrive): Act => {
  const gone = drive.state === 'missing';
  return {
    title: gone ? `Forget drive ${drive.serial}` : `Give drive ${drive.serial} back`,
    about: gone ? 'This machine does not show the drive. Later starts do not look for it any more.' : 'The kernel gets the drive: its disks are disks of this machine again, also after the next start. The data on it stays.',
    label: gone ? 'Forget' : 'Give back',
    command: () => line('appliance', 'drive', 'unbind', ...(drive.address ? [drive.address] : []), '--serial', drive.serial),
    async run() {
      await rpc('appliance_unbind_drive', given({ address: drive.address ?? undefined, serial: drive.serial }));
      return gone ? `Drive ${drive.serial} is forgotten in a moment.` : `The kernel has drive ${drive.serial} again in a moment.`;
    },
  };
};

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
