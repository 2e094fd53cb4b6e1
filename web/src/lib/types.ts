/** Answers of the daemon's methods, as docs/reference/rpc.md has them; only fields that the page uses. */

export type Role = 'viewer' | 'operator' | 'admin';

export interface Resync {
  kind: 'partial' | 'full' | 'reconcile';
  source: string | null;
  total_bytes: number;
  left_bytes: number;
  bytes_per_s: number;
  left_s: number | null;
}

export interface Replica {
  id: string;
  slot: number;
  device: string;
  state: 'in_sync' | 'syncing' | 'reconciling' | 'out' | 'filling';
  attached: boolean;
  offline: boolean;
  transport: string | null;
  fencing: string | null;
  read_latency_us: number | null;
  write_latency_us: number | null;
  why: string | null;
  resync: Resync | null;
  last_resync: { kind: string; bytes: number; seconds: number } | null;
  reads: number;
  writes: number;
  errors: number;
}

export interface Volume {
  name: string;
  uuid: string;
  bdev: string | null;
  state: string;
  why: string | null;
  block_size: number;
  num_blocks: number;
  epoch: number;
  region_size: number;
  num_regions: number;
  dirty_regions: number;
  settings: Record<string, number | string>;
  subsystems: string[];
  replicas: Replica[];
  verify: {
    repair: boolean;
    running: boolean;
    total_bytes: number;
    compared_bytes: number;
    different_blocks: number;
    repaired_blocks: number;
  } | null;
}

/** A snapshot of a volume of the cluster. */
export interface VolumeSnapshot {
  uuid: string;
  name: string;
  volume: string;
  /** Null: the volume was deleted. */
  volume_name: string | null;
  size_bytes: number;
  /** Null: it is not made yet. */
  created_s: number | null;
  state: 'making' | 'ready' | 'unavailable' | 'failed' | 'deleting';
  why: string | null;
  /** `node`: null outside of a cluster. `why`: the reason why it is not available. */
  lvols: { uuid: string; node: string | null; pool: string | null; pool_name: string | null; why: string | null }[];
}

export interface Bdev {
  name: string;
  aliases: string[];
  uuid: string;
  product_name: string;
  block_size: number;
  num_blocks: number;
  claimed: boolean;
  assigned_rate_limits: Record<string, number>;
  driver_specific: Record<string, any>;
}

export interface Pool {
  name: string;
  uuid: string;
  disk: string;
  state: string;
  total_bytes: number;
  free_bytes: number;
  reserved_bytes: number;
  unit_bytes: number;
  lvols: number;
  lost_pages: number;
  unsettled_records: number;
}

export interface Lvol {
  alias: string;
  name: string;
  pool: string;
  uuid: string;
  parent: string | null;
  snapshot: boolean;
  thick: boolean;
  size_bytes: number;
  used_bytes: number;
  exclusive_bytes: number;
}

export interface Address {
  trtype: string;
  adrfam: string;
  traddr: string;
  trsvcid: string;
}

export interface Subsystem {
  nqn: string;
  subtype: string;
  serial_number?: string;
  model_number?: string;
  max_namespaces?: number;
  allow_any_host: boolean;
  hosts: { nqn: string; dhchap_key?: string; psk?: string }[];
  listen_addresses: Address[];
  namespaces?: { nsid: number; bdev_name: string; uuid: string; anagrpid?: number }[];
}

export interface SubsystemListener {
  address: Address;
  ana_states: { ana_group: number; ana_state: string }[];
}

export interface Listener {
  listener: string | null;
  iface: string | null;
  address: Address;
  wanted: string;
  actual: string;
  reason?: string;
  evidence?: string;
  remedy?: string;
  rdma?: { device: string; port: number; software: boolean };
  subsystems: string[];
}

export interface Listeners {
  listeners: Listener[];
  unmatched: string[];
}

export interface Controller {
  cntlid: number;
  hostnqn: string;
  hostid: string;
  num_io_qpairs: number;
}

export interface QueuePair {
  cntlid: number;
  hostnqn: string;
  qid: number;
  listen_address: Address;
  peer_address: Address;
}

export interface NvmeController {
  name: string;
  ctrlrs: { state: string; trid: Partial<Address> & { trtype: string; traddr: string; subnqn?: string }; bdevs?: string[]; losses?: number }[];
}

export interface Health {
  model_number: string;
  serial_number: string;
  firmware_revision: string;
  temperature_celsius: number;
  percentage_used: number;
  available_spare_percentage: number;
  available_spare_threshold_percentage: number;
  media_errors: number;
  power_on_hours: number;
  unsafe_shutdowns: number;
  warnings: string[];
}

export interface Event {
  id: number;
  time: string;
  category: string;
  severity: 'info' | 'warning' | 'error';
  type: string;
  ctx: string;
  text: string;
  facts?: Record<string, unknown>;
  left_out?: number;
}

export interface Finding {
  id: string;
  subject?: string;
  status: 'PASS' | 'SKIP' | 'WARN' | 'FAIL';
  evidence: string;
  remedy?: string;
}

export interface Report {
  failed: number;
  warnings: number;
  passed: number;
  skipped: number;
  findings: Finding[];
}

export interface Alerts {
  receivers: {
    name: string;
    kind: string;
    target: string;
    severity: string;
    categories: string[];
    except: string[];
    /** From the configuration file: calls do not change it. */
    declared: boolean;
    /** Of a receiver that a call has added. */
    settings?: Record<string, unknown> | null;
    pending: number;
    delivered: number;
    dropped: number;
    last_delivery?: string;
    failing_since?: string;
    error?: string;
  }[];
  silences: { id: number; until: string; types: string[]; object?: string }[];
}

export interface Stored {
  store: string | null;
  objects: { key: string; method: string; state: string; kept_in: string; error?: string; attempts?: number; failed_for_s?: number }[];
}

export interface Account {
  name: string;
  role: Role;
  created_ms: number;
}

/** The API token of a program, without its secret. */
export interface ApiToken extends Account {
  /** Null: it is valid until it is deleted. */
  expires_ms: number | null;
}

/** A key, without its secret. */
export interface Key {
  name: string;
  state: 'ok' | 'expired' | 'unreadable';
  why?: string;
  kind?: 'dhchap' | 'tls' | 'text';
  hash?: string;
  fingerprint?: string;
  source: 'file' | 'credential' | 'sealed';
  credential?: string;
  path?: string;
  used_by: string[];
  made?: string;
  expires?: string;
  removed: boolean;
}

export interface HostAuth {
  host: string;
  subsystem: string;
  dhchap_key?: string;
  psk?: string;
  controllers: number;
  rotations?: { former_key: string; kind: string; until: string }[];
  last_failure?: { at: string; peer: string; reason: string };
}

export interface Reservation {
  known: boolean;
  rtype?: number;
  type?: string;
  generation?: number;
  ptpl?: boolean;
  ptpl_capable: boolean;
  conflicts: number;
  registrants?: { hostid: string; rkey: string; holder: boolean }[];
}

/** A disk of the machine: an entry of disk_list. */
export interface MachineDisk {
  name: string;
  /** Absent: vfio-pci has the drive. */
  path?: string;
  address?: string;
  serial?: string;
  model?: string;
  size: number;
  block_size: number;
  read_only: boolean;
  partitions: number;
  uses: string[];
  bdevs: string[];
}
export interface Bay {
  disk: string;
  kind: 'npem' | 'slot' | 'enclosure';
  bay: string;
  lit: boolean;
  requested: boolean;
}

export interface DriveLogs {
  controller: Record<string, any>;
  errors: { error_count: number; sqid: number; opcode: number | string; nsid: number; lba: number; status?: string }[];
  firmware: { active_slot: number; next_slot: number | null; slots: [slot: number, revision: string][] };
}

export interface AuditCall {
  time: string;
  uid?: number;
  program?: string;
  account?: string;
  api_token?: string;
  certificate?: string;
  address?: string;
  role: string;
  class: string;
  method: string;
  object?: string;
  params: unknown;
  left_out?: number;
  result: string;
  error?: { code: number; message: string; cause?: string };
  duration_ms?: number;
}

export interface MachineAct {
  act: 'update' | 'rollback' | 'restart' | 'power_off' | 'network' | 'name' | 'drive';
  state: 'running' | 'done' | 'failed' | 'interrupted';
  running: string;
  file: string | null;
  text: string;
  percent: number | null;
  began_ms: number;
  ended_ms: number | null;
}

export interface Appliance {
  appliance: boolean;
  host: string | null;
  version: string | null;
  slots: { version: string; state: string; entry: string | null; tries: { left: number; failed: number } | null; complete: boolean }[];
  pinned_entry: string | null;
  free_bytes: number | null;
  upload: string | null;
  request: { act: string } | null;
  acts: MachineAct[];
  pending_network: string | null;
  network_problem: string | null;
  networks: { interface: string; settings: string[] }[];
  drives: TakenDrive[];
  drives_problem: string | null;
}

/** An NVMe drive that each start of the appliance takes from the kernel. */
export interface TakenDrive {
  serial: string;
  model: string;
  /** None: another drive of the list has its last one. */
  address: string | null;
  state: 'bound' | 'kernel' | 'missing';
}

export interface NetworkInterface {
  name: string;
  state: string | null;
  mtu: number | null;
  speed_mbit: number | null;
  mac: string | null;
  driver: string | null;
  addresses: string[];
}
