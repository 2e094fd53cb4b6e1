// A machine with some of everything, and with some trouble; shapes as docs/reference/rpc.md has them.
const GIB = 1024 ** 3;
const HOST = (n) => `nqn.2014-08.org.nvmexpress:uuid:1f4e8a52-63b1-4f2e-9d3a-0c5b7e9a1d${n}f`;
const UUID = (n) => `5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0a${String(n).padStart(2, '0')}`;
const LIMITS = { rw_ios_per_sec: 0, rw_mbytes_per_sec: 0, r_mbytes_per_sec: 0, w_mbytes_per_sec: 0 };
let serial = 10;

export function bdev(name, gib, product_name, driver_specific, more = {}) {
  serial += 1;
  return { name, aliases: [UUID(serial)], uuid: UUID(serial), product_name, block_size: 512, num_blocks: (gib * GIB) / 512, claimed: false, assigned_rate_limits: { ...LIMITS }, driver_specific, ...more };
}
export const file = (name, gib, filename, more) => bdev(name, gib, 'AIO disk', { aio: { filename }, nacre: { direct: true, write_cache: true, data_lost: false } }, more);
const drive = (name, traddr, serial_number) =>
  bdev(name, 1788.5, 'NVMe disk', { nvme: [{ pci_address: traddr, trid: { trtype: 'PCIe', traddr }, ctrlr_data: { model_number: 'SAMSUNG MZWLR1T9HBJR-00007', serial_number, firmware_revision: 'MPK93B5Q' } }], nacre: { controller: name.slice(0, -2) } }, { claimed: true });
const remote = (name, traddr) =>
  bdev(name, 500, 'NVMe disk', { nvme: [{ trid: { trtype: 'RDMA', adrfam: 'IPv4', traddr, trsvcid: '4420', subnqn: 'nqn.2025-01.io.nacre:far' } }] }, { claimed: true });

export function replica(device, state = 'in_sync', more = {}) {
  serial += 1;
  return { id: UUID(serial), slot: 0, device, state, attached: true, offline: false, transport: 'local', fencing: 'label', read_latency_us: 84, write_latency_us: 31, why: null, resync: null, last_resync: null, reads: 18_234_112, writes: 7_402_911, errors: 0, ...more };
}

export function volume(name, gib, replicas, more = {}) {
  serial += 1;
  return {
    name, uuid: UUID(serial), bdev: name, state: 'healthy', why: null, block_size: 512, num_blocks: (gib * GIB) / 512, epoch: 14, revision: 31, region_size: 1048576, num_regions: gib * 1024, dirty_regions: 0,
    settings: { deadline_ms: 8000, description: '', frozen_hold_ms: 20000, min_in_sync: 1, read_errors: 16, read_policy: 'local-first', resync_bytes_per_s: 0, settle_ms: 500, transport_policy: 'inherit', verify_hours: 0, ...more.settings },
    subsystems: [], replicas: replicas.map((r, slot) => ({ ...r, slot })), verify: null, queues: 4, reactor: 'reactor_1', counters: {}, ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== 'settings')),
  };
}

/** The snapshots of volumes on a node of a cluster. A name of two of them is ambiguous. */
function snapshots([archive, orders, , images], now) {
  const lvol = (node, why = null) => ({ uuid: UUID((serial += 1)), node, pool: UUID(90), pool_name: null, why });
  const of = (source, name, days, lvols, more = {}) => ({ uuid: UUID((serial += 1)), name, volume: source.uuid, volume_name: source.name, size_bytes: source.num_blocks * 512, created_s: Math.floor(now / 1000) - days * 86_400, state: 'ready', why: null, lvols, ...more });
  const away = 'node cow, which has it, has no lease';
  return [
    of(archive, 'monday', 3, [lvol('ant'), lvol('bee'), lvol('cow')]),
    of(orders, 'monday', 3, [lvol('ant'), lvol('cow', away)]),
    of(orders, 'before-upgrade', 1, [lvol('cow', away)], { state: 'unavailable', why: away }),
    of(orders, 'today', 0, [], { created_s: null, state: 'making' }),
    of(images, 'golden', 40, [lvol('bee')]),
    of({ ...images, uuid: UUID(80), name: null }, 'last-of-staging', 20, [lvol('ant'), lvol('bee')]),
    of({ ...images, uuid: UUID(80), name: null }, 'old', 50, [lvol('cow', away)], { state: 'deleting', why: away }),
  ];
}

const at = (trtype, traddr, trsvcid = '4420') => ({ trtype, adrfam: 'IPv4', traddr, trsvcid });
const NQN = (name) => `nqn.2025-01.io.nacre:${name}`;

export function subsystem(name, bdevName, hosts, listen, more = {}) {
  return { nqn: NQN(name), subtype: 'NVMe', serial_number: 'NACRE0001', model_number: 'Nacre NVMe-oF controller', max_namespaces: 32, allow_any_host: hosts.length === 0, hosts: hosts.map((nqn) => ({ nqn })), listen_addresses: listen, namespaces: [{ nsid: 1, bdev_name: bdevName, name: bdevName, uuid: UUID(77), anagrpid: 1 }], ...more };
}

const EVENTS = [
  [2400, 'device', 'info', 'bdev_register', 'disk4', 'bdev register: disk4'],
  [2300, 'target', 'info', 'nvmf_subsystem_add', NQN('archive'), 'subsystem nqn.2025-01.io.nacre:archive was created'],
  [2100, 'volume', 'info', 'volume_verify_end', 'archive', 'volume "archive": the comparison ended, no block differs'],
  [1500, 'target', 'warning', 'auth_failed', NQN('orders'), 'host nqn.2014-08.org.nvmexpress:uuid:0e…1c failed to authenticate itself: wrong key', 3],
  [900, 'transport', 'warning', 'transport_downgraded', 'rdma://10.0.0.4:4420', 'listener rdma://10.0.0.4:4420 uses TCP: port_down'],
  [640, 'replica', 'warning', 'replica_out', 'orders', 'volume "orders": replica farn1 is out of sync: the device did not answer within 8 s'],
  [600, 'transport', 'warning', 'remote_lost', 'far', 'the connection to rdma://10.0.1.9:4420 ended: keep-alive timeout'],
  [410, 'transport', 'info', 'remote_connected', 'far', 'controller far is connected over RDMA'],
  [404, 'replica', 'info', 'replica_resync_start', 'orders', 'volume "orders": copying 61.4 GiB of missed regions to farn1 began'],
  [120, 'device', 'warning', 'nvme_health_warning', 'Nvme1', 'drive Nvme1 reports: temperature above its threshold'],
  [40, 'volume', 'error', 'volume_frozen', 'scratch', 'volume "scratch" is frozen: no replica is in sync'],
];

export function busy(now = Date.now()) {
  serial = 10;
  const lvol = (name, size, used, more = {}) => ({ alias: `fast/${name}`, name, pool: 'fast', uuid: UUID((serial += 1)), parent: null, snapshot: false, thick: false, size_bytes: size * GIB, used_bytes: used * GIB, exclusive_bytes: used * GIB, ...more });
  const monday = lvol('web@monday', 400, 118.2, { snapshot: true, exclusive_bytes: 3.4 * GIB });
  const lvols = [lvol('web', 400, 131.7, { parent: monday.uuid, exclusive_bytes: 13.5 * GIB }), monday, lvol('ci-cache', 1024, 402), lvol('mail', 200, 200, { thick: true })];
  const volumes = [
    volume('archive', 2048, [replica('disk0'), replica('disk1'), replica('disk2')], { subsystems: [NQN('archive')], settings: { description: 'backups of all sites', verify_hours: 168, min_in_sync: 2 }, verify: { repair: false, running: true, total_bytes: 2048 * GIB, compared_bytes: 1311 * GIB, different_blocks: 0, repaired_blocks: 0, examples: [] } }),
    volume('orders', 500, [replica('Nvme0n1', 'in_sync', { read_latency_us: 71, write_latency_us: 19 }), replica('farn1', 'syncing', { transport: 'RDMA', fencing: 'reservation', read_latency_us: 96, write_latency_us: 44, errors: 2, why: 'the device did not answer within 8 s', resync: { kind: 'partial', source: 'Nvme0n1', total_bytes: 61.4 * GIB, left_bytes: 24.1 * GIB, bytes_per_s: 209715200, left_s: 123 } })], { state: 'degraded', why: '1 of 2 replicas are in sync', subsystems: [NQN('orders')], dirty_regions: 24678, settings: { description: 'orders of the shop', resync_bytes_per_s: 209715200 } }),
    volume('scratch', 64, [replica('disk3', 'out', { attached: false, transport: null, fencing: null, read_latency_us: null, write_latency_us: null, why: '/srv/nacre/disk3.img: no such file', errors: 16 }), replica('disk4', 'out', { offline: true, why: 'taken out by the operator' })], { state: 'frozen', why: 'no replica is in sync', subsystems: [NQN('scratch')], dirty_regions: 311 }),
    volume('vm-images', 750, [replica('Nvme1n1'), replica('disk5', 'in_sync', { last_resync: { kind: 'full', bytes: 750 * GIB, seconds: 3921.4 } })]),
  ];
  const bdevs = [
    drive('Nvme0n1', '0000:5e:00.0', 'S4EWNX0M123456'), drive('Nvme1n1', '0000:5f:00.0', 'S4EWNX0M123457'), remote('farn1', '10.0.1.9'),
    ...[0, 1, 2].map((n) => file(`disk${n}`, 2049, `/dev/disk/by-id/ata-ST2000NM0008_ZFL0A1B${n}`, { claimed: true })),
    file('disk4', 65, '/srv/nacre/disk4.img', { claimed: true }), file('disk5', 751, '/dev/disk/by-id/scsi-35000c500a1b2c3d5', { claimed: true }), file('disk6', 3726, '/dev/disk/by-id/scsi-35000c500a1b2c3d6', { claimed: true }),
    file('disk7', 3726, '/dev/disk/by-id/scsi-35000c500a1b2c3d7'), file('disk8', 3726, '/dev/disk/by-id/scsi-35000c500a1b2c3d8', { assigned_rate_limits: { ...LIMITS, rw_ios_per_sec: 5000 } }),
    bdev('ram0', 1, 'Malloc disk', {}),
    ...volumes.map((v) => bdev(v.name, v.num_blocks / 2097152, 'Replicated volume', { volume: {} }, { claimed: v.subsystems.length > 0 })),
    ...lvols.map((l) => ({ ...bdev(l.uuid, l.size_bytes / GIB, 'Logical Volume', { lvol: { base_bdev: 'disk6', snapshot: l.snapshot } }), uuid: l.uuid, aliases: [l.uuid, l.alias] })),
  ];
  const rdma = at('RDMA', '10.0.0.4');
  const tcp = at('TCP', '10.0.0.4');
  return {
    bdevs, volumes, lvols, snapshots: snapshots(volumes, now),
    pools: [{ name: 'fast', uuid: UUID(90), disk: 'disk6', state: 'online', total_bytes: 3726 * GIB, free_bytes: 2874.6 * GIB, reserved_bytes: 200 * GIB, unit_bytes: 65536, lvols: 4, lost_pages: 0, unsettled_records: 0, replayed_records: 0, reactor: 'reactor_0' }],
    subsystems: [
      { nqn: 'nqn.2014-08.org.nvmexpress.discovery', subtype: 'Discovery', allow_any_host: true, hosts: [], listen_addresses: [at('TCP', '0.0.0.0', '8009')] },
      subsystem('archive', 'archive', [HOST(2), HOST(3)], [tcp]),
      subsystem('orders', 'orders', [HOST(4), HOST(5)], [rdma, tcp, at('RDMA', '10.0.1.4')], { hosts: [{ nqn: HOST(4), dhchap_key: 'shop1' }, { nqn: HOST(5) }] }),
      subsystem('scratch', 'scratch', [], [tcp]),
      { ...subsystem('web', lvols[0].uuid, [HOST(6)], [tcp]), nqn: 'nqn.2026-01.com.example:web' },
    ],
    listeners: {
      listeners: [
        { listener: 'name:eth0', iface: 'eth0', address: tcp, wanted: 'listen', actual: 'listening', subsystems: [NQN('archive'), NQN('orders'), NQN('scratch'), 'nqn.2026-01.com.example:web'] },
        { listener: 'name:eth0', iface: 'eth0', address: rdma, wanted: 'prefer', actual: 'absent', reason: 'port_down', evidence: 'mlx5_0 port 1 is down (physical state Disabled)', remedy: 'check the cable and the switch port of eth0', subsystems: [NQN('orders')] },
        { listener: 'name:eth1', iface: 'eth1', address: at('RDMA', '10.0.1.4'), wanted: 'require', actual: 'listening', rdma: { device: 'mlx5_1', port: 1, gid_index: 3, software: false }, subsystems: [NQN('orders')] },
        { listener: null, iface: null, address: at('TCP', '0.0.0.0', '8009'), wanted: 'listen', actual: 'listening', subsystems: ['nqn.2014-08.org.nvmexpress.discovery'] },
      ],
      unmatched: ['subnet:192.0.2.0/24'],
    },
    ana: { [`${NQN('orders')} TCP`]: 'non_optimized' },
    controllers: [
      { name: 'Nvme0', ctrlrs: [{ state: 'enabled', trid: { trtype: 'PCIe', traddr: '0000:5e:00.0' }, bdevs: ['Nvme0n1'] }] },
      { name: 'Nvme1', ctrlrs: [{ state: 'enabled', trid: { trtype: 'PCIe', traddr: '0000:5f:00.0' }, bdevs: ['Nvme1n1'] }] },
      { name: 'far', ctrlrs: [{ state: 'enabled', trid: { trtype: 'RDMA', adrfam: 'IPv4', traddr: '10.0.1.9', trsvcid: '4420', subnqn: 'nqn.2025-01.io.nacre:far' }, bdevs: ['farn1'], losses: 1 }] },
    ],
    hosts: [[NQN('archive'), 1, HOST(2), tcp, '10.0.0.21', 8], [NQN('archive'), 2, HOST(3), tcp, '10.0.0.22', 8], [NQN('orders'), 1, HOST(4), tcp, '10.0.0.31', 4], [NQN('orders'), 2, HOST(4), at('RDMA', '10.0.1.4'), '10.0.1.31', 4], [NQN('orders'), 3, HOST(5), at('RDMA', '10.0.1.4'), '10.0.1.32', 4], [NQN('scratch'), 1, HOST(9), tcp, '10.0.0.40', 2]],
    stored: {
      store: '/var/lib/nacre/state.redb',
      objects: [{ kept_in: 'store', key: 'bdev/disk0', method: 'bdev_aio_create', params: {}, state: 'live' }, { kept_in: 'config', key: 'bdev/disk3', method: 'bdev_aio_create', params: {}, state: 'failed', error: '/srv/nacre/disk3.img: no such file', attempts: 41, failed_for_s: 3600 }],
    },
    events: EVENTS.map(([ago, category, severity, type, ctx, text, left_out], id) => ({ id, time: new Date(now - ago * 1000).toISOString(), category, severity, type, ctx, text, ...(left_out ? { left_out } : {}) })),
    alerts: {
      receivers: [
        { name: 'oncall', kind: 'webhook', target: 'https://hooks.example.com', severity: 'warning', categories: [], except: ['nvme_limits'], declared: true, settings: null, pending: 0, delivered: 112, dropped: 0, last_delivery: new Date(now - 40_000).toISOString() },
        { name: 'storage-team', kind: 'mail', target: 'storage@example.com', severity: 'error', categories: ['volume', 'replica'], except: [], declared: false, settings: { name: 'storage-team', server: 'mail.example.com:587', tls: 'starttls', user: 'nacre', password_key: 'alert-storage-team-password', from: 'nacre@example.com', to: ['storage@example.com'], severity: 'error', categories: ['volume', 'replica'], except: [], gather_s: 30, retry_for_s: 3600 }, pending: 3, delivered: 9, dropped: 1, failing_since: new Date(now - 7_200_000).toISOString(), error: 'mail.example.com:587: connection refused' },
      ],
      silences: [{ id: 1, until: new Date(now + 3_600_000).toISOString(), types: ['replica_out'], object: 'scratch' }],
    },
    tokens: [{ name: 'monitor', role: 'viewer', created_ms: now - 40 * 86_400_000, expires_ms: now + 50 * 86_400_000 }, { name: 'old-script', role: 'operator', created_ms: now - 100 * 86_400_000, expires_ms: now - 10 * 86_400_000 }],
    accounts: [{ name: 'admin', role: 'admin', created_ms: now - 90 * 86_400_000 }, { name: 'erin', role: 'operator', created_ms: now - 31 * 86_400_000 }, { name: 'wallboard', role: 'viewer', created_ms: now - 3 * 86_400_000 }],
    devices: [
      { name: 'mlx5_0', driver: 'mlx5_core', fw: '22.39.2048', software: false, bus: '0000:3b:00.0', ports: [{ num: 1, state: 'down', phys_state: 'disabled', link_layer: 'ethernet', rate: '100 Gb/sec (4X EDR)', mtu: 4096, netdev: 'eth0', gids: [{}, {}] }] },
      { name: 'mlx5_1', driver: 'mlx5_core', fw: '22.39.2048', software: false, bus: '0000:3b:00.1', ports: [{ num: 1, state: 'active', phys_state: 'link_up', link_layer: 'ethernet', rate: '100 Gb/sec (4X EDR)', mtu: 4096, netdev: 'eth1', gids: [{}, {}, {}, {}] }] },
    ],
    keys: [
      { name: 'shop1', state: 'ok', kind: 'dhchap', hash: 'sha256', fingerprint: '3029265d', source: 'sealed', used_by: [`${HOST(4)} at ${NQN('orders')}`], made: new Date(now - 200 * 86_400_000).toISOString(), expires: new Date(now + 9 * 86_400_000).toISOString(), removed: false },
      { name: 'shop2', state: 'ok', kind: 'dhchap', hash: 'sha256', fingerprint: 'c5307614', source: 'file', path: '/etc/nacre/keys/shop2.key', used_by: [], made: new Date(now - 3 * 86_400_000).toISOString(), removed: false },
      { name: 'archive-tls', state: 'expired', kind: 'tls', hash: 'sha256', fingerprint: '009fc1a5', source: 'credential', credential: 'archive-tls', used_by: [`${HOST(2)} at ${NQN('archive')}`], expires: new Date(now - 2 * 86_400_000).toISOString(), removed: false },
      { name: 'old', state: 'unreadable', why: '/etc/nacre/keys/old.key: other users may read it (mode 0644)', source: 'file', path: '/etc/nacre/keys/old.key', used_by: [], removed: false },
    ],
    auth: [
      { subsystem: NQN('orders'), host: HOST(4), dhchap_key: 'shop1', controllers: 2, queues: [], rotations: [{ kind: 'dhchap', former_key: 'shop0', until: new Date(now + 3_600_000).toISOString() }] },
      { subsystem: NQN('orders'), host: HOST(5), controllers: 1, queues: [] },
      { subsystem: NQN('archive'), host: HOST(2), psk: 'archive-tls', controllers: 1, queues: [], last_failure: { at: new Date(now - 1_500_000).toISOString(), peer: '10.0.0.21:40112', reason: 'the key has expired' } },
    ],
    reservations: {
      [`${NQN('orders')} 1`]: { known: true, rtype: 5, type: 'write exclusive, registrants only', generation: 12, ptpl: true, ptpl_capable: true, conflicts: 18, registrants: [{ hostid: HOST(4).slice(-36), rkey: '00000000a11ce001', holder: true }, { hostid: '7c9e6679-7425-40de-944b-e07fc1f90ae7', rkey: '00000000b0b00002', holder: false }] },
    },
    machine_disks: [
      { name: 'sda', path: '/dev/disk/by-id/ata-SAMSUNG_MZ7L3960HCJR_S662NN0T123456', serial: 'S662NN0T123456', model: 'SAMSUNG MZ7L3960HCJR', size: 960_197_124_096, block_size: 512, read_only: false, partitions: 0, uses: [], bdevs: [] },
      { name: 'sdb', path: '/dev/disk/by-id/ata-SAMSUNG_MZ7L3960HCJR_S662NN0T123457', serial: 'S662NN0T123457', model: 'SAMSUNG MZ7L3960HCJR', size: 960_197_124_096, block_size: 512, read_only: false, partitions: 2, uses: ['sdb2 is mounted at / (ext4)'], bdevs: [] },
      { name: 'sdc', path: '/dev/sdc', size: 16_000_000_000, block_size: 512, read_only: false, partitions: 1, uses: [], bdevs: [] },
      { name: 'nvme3n1', path: '/dev/disk/by-id/nvme-MZWLR1T9HBJR_S4EWNX0M999990', address: '0000:62:00.0', serial: 'S4EWNX0M999990', model: 'SAMSUNG MZWLR1T9HBJR-00007', size: 1_920_383_410_176, block_size: 512, read_only: false, partitions: 0, uses: [], bdevs: [] },
      { name: '0000:61:00.0', address: '0000:61:00.0', serial: 'S4EWNX0M888888', model: 'SAMSUNG MZWLR1T9HBJR-00007', size: 0, block_size: 0, read_only: false, partitions: 0, uses: [], bdevs: [] },
    ],
    bays: { Nvme0: { disk: '0000:5e:00.0', kind: 'slot', bay: '3', lit: false, requested: false } },
    logs: {
      controller: { model: 'SAMSUNG MZWLR1T9HBJR-00007', serial: 'S4EWNX0M123456', version: '1.3.0', io_queues: 16, io_queue_depth: 255, max_transfer_bytes: 131072, numa_node: 0 },
      errors: [{ error_count: 7, sqid: 3, opcode: 2, nsid: 1, lba: 81_234_112, status: 'unrecovered read error' }],
      firmware: { active_slot: 1, next_slot: 2, slots: [[1, 'MPK93B5Q'], [2, 'MPK94B5Q'], [3, 'MPK91B5Q']] },
    },
    audit: Array.from({ length: 130 }, (_, n) => ({
      time: new Date(now - (130 - n) * 61_000).toISOString(), role: n % 7 === 0 ? 'operator' : 'admin', class: 'admin',
      ...(n % 5 === 0 ? { uid: 0, gids: [0], pid: 4242, program: 'nacre' } : n % 7 === 0 ? { account: 'erin', address: '10.0.0.7:50112' } : n % 11 === 0 ? { api_token: 'monitor', address: '10.0.0.9:41000' } : { account: 'admin', address: '10.0.0.5:50100' }),
      method: ['volume_resync', 'bdev_set_qos_limit', 'volume_delete', 'page_sign_in'][n % 4], object: ['orders', 'disk8', 'vm-images', undefined][n % 4], params: [{ name: 'orders' }, { name: 'disk8', rw_ios_per_sec: 5000 }, { name: 'vm-images' }, {}][n % 4],
      ...(n % 4 === 2 ? { result: 'refused', error: { code: -16, message: 'Device or resource busy', cause: 'hosts have the volume: unpublish it first' } } : { result: 'done' }), duration_ms: 1.2,
    })),
    interfaces: [
      { name: 'eth0', state: 'down', mtu: 1500, speed_mbit: null, mac: '02:00:00:00:00:04', driver: 'mlx5_core', addresses: [] },
      { name: 'eth1', state: 'up', mtu: 9000, speed_mbit: 100_000, mac: '02:00:00:00:00:05', driver: 'mlx5_core', addresses: ['10.0.1.4/24', 'fe80::5/64'] },
    ],
    appliance: {
      pending_network: null, network_problem: null, networks: [{ interface: 'eth0', settings: [] }, { interface: 'eth1', settings: ['[Match]', 'Name=eth1', '[Link]', 'MTUBytes=9000', '[Network]', 'DHCP=no', 'Address=10.0.1.4/24'] }],
      drives_problem: null, drives: [
        { serial: 'S4EWNX0M123456', model: 'SAMSUNG MZWLR1T9HBJR-00007', address: '0000:5e:00.0', state: 'bound' },
        { serial: 'S4EWNX0M888888', model: 'SAMSUNG MZWLR1T9HBJR-00007', address: '0000:61:00.0', state: 'bound' },
        { serial: 'S4EWNX0M777777', model: 'SAMSUNG MZWLR1T9HBJR-00007', address: null, state: 'missing' },
      ],
      appliance: true, host: 'store1', version: '0.1.0', pinned_entry: null, free_bytes: 41.2 * GIB, upload: null, request: null,
      slots: [{ version: '0.1.0', state: 'good', entry: 'nacre_0.1.0.efi', tries: null, complete: true }, { version: '0.0.9', state: 'failed', entry: 'nacre_0.0.9+0-3.efi', tries: { left: 0, failed: 3 }, complete: true }],
      acts: [
        { act: 'restart', state: 'done', running: '0.0.8', file: null, text: 'the machine restarts', percent: null, began_ms: now - 86_400_000, ended_ms: now - 86_400_000 },
        { act: 'update', state: 'done', running: '0.0.8', file: '/var/lib/nacre-appliance/upload/bundle.tar', text: 'version 0.1.0 is installed, signed by the key "maker"; a restart boots it', percent: null, began_ms: now - 86_700_000, ended_ms: now - 86_590_000 },
        { act: 'update', state: 'failed', running: '0.0.8', file: '/boot/nacre/nacre_0.1.0.tar', text: 'SHA256SUMS.sig: made by none of the keys of this appliance (maker); the bundle is not from their owner, or SHA256SUMS was changed', percent: null, began_ms: now - 90_000_000, ended_ms: now - 89_998_000 },
      ],
    },
    report: {
      failed: 1, warnings: 2, passed: 5, skipped: 1,
      findings: [
        { id: 'rdma.modules', status: 'PASS', evidence: 'ib_core, ib_uverbs and rdma_ucm are loaded' },
        { id: 'rdma.driver', subject: 'mlx5_0', status: 'PASS', evidence: 'mlx5_core, firmware 22.39.2048' },
        { id: 'rdma.gid.ip', subject: '10.0.0.4', status: 'FAIL', evidence: 'port 1 of mlx5_0 is down', remedy: 'check the cable and the switch port of eth0' },
        { id: 'net.mtu', subject: 'eth1', status: 'WARN', evidence: 'MTU 1500: RDMA uses packets of 1024 bytes', remedy: 'set the MTU of eth1 and of its switch to 9000' },
        { id: 'net.firewall', status: 'SKIP', evidence: "the packet filter's rules cannot be read (there is no nft here: install the package nftables)" },
        { id: 'roce.pfc', subject: 'eth1', status: 'PASS', evidence: 'priority 3 is paused, as the switch announces' },
        { id: 'mem.memlock', status: 'PASS', evidence: 'no limit on locked memory' },
        { id: 'mem.hugepages', status: 'WARN', evidence: 'node 0: 12 of 512 pages of 2 MiB free; 134 MiB wanted', remedy: '`nacre hugepages reserve 2MiB 579`, or `sysctl vm.nr_hugepages=579`' },
        { id: 'disk.io_uring', status: 'PASS', evidence: 'io_uring can be used (defer_taskrun+no_sqarray)' },
      ],
    },
  };
}

export function healthy(now) {
  const world = busy(now);
  world.volumes = world.volumes.filter((v) => v.state === 'healthy');
  world.listeners.listeners = world.listeners.listeners.filter((l) => l.actual === 'listening');
  world.listeners.unmatched = [];
  world.stored.objects = world.stored.objects.filter((o) => o.state === 'live');
  world.keys = world.keys.filter((key) => key.name === 'shop2');
  world.events = world.events.filter((e) => e.type !== 'nvme_health_warning');
  return world;
}

export function empty() {
  const world = busy();
  return { ...world, bdevs: [], volumes: [], lvols: [], snapshots: [], pools: [], subsystems: world.subsystems.slice(0, 1), listeners: { listeners: [], unmatched: [] }, controllers: [], hosts: [], stored: { store: '/var/lib/nacre/state.redb', objects: [] }, events: [], alerts: { receivers: [], silences: [] }, accounts: [], tokens: [], devices: [], keys: [], auth: [], reservations: {}, audit: [], appliance: { appliance: false, host: null, version: null, slots: [], pinned_entry: null, free_bytes: null, upload: null, request: null, acts: [], pending_network: null, network_problem: null, networks: [] } };
}
