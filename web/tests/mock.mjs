// A stand-in for the daemon's web server: the built page with the real policy, and answers from fixtures.
// `node tests/mock.mjs [busy|healthy|empty] [port]` serves it for a look.
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { fileURLToPath } from 'node:url';
import * as fixtures from './fixtures.mjs';

const dist = new URL('../../engine/web/dist/', import.meta.url);
export const CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";
const RANK = { viewer: 0, operator: 1, admin: 2 };
const PASSWORD = 'correct horse battery';

/** The role that each method needs, and whether it changes something, from the reference. */
const reference = readFileSync(new URL('../../docs/reference/rpc.md', import.meta.url), 'utf8');
const SECTIONS = reference.split(/^## (?=\w+$)/m).slice(1).map((part) => [part.split('\n')[0], part]);
const METHODS = Object.fromEntries(SECTIONS.map(([name, part]) => {
  const facts = part.match(/^Changes (nothing|something)\b.*\bRole: (\w+)/m);
  if (!facts) throw new Error(`docs/reference/rpc.md does not say what ${name} changes, and for which role it is`);
  return [name, { changes: facts[1] === 'something', role: facts[2] }];
}));
const PARAMS = Object.fromEntries(SECTIONS.map(([name, part]) => [name, [...part.matchAll(/^\| `([\w.]+)` \|/gm)].map((m) => m[1].split('.')[0])]));
const allows = (role, method) => RANK[role] >= RANK[METHODS[method].role];

export class Mock {
  static running = new Set();

  constructor({ world = fixtures.busy(), role = 'admin', setup = false, phase = 'running' } = {}) {
    Object.assign(this, { world, role, setup, phase, calls: [], sessions: new Set(), streams: new Set(), fails: 0, refuse: {} });
    this.seed = 7;
    /** Calls that only a node of a cluster takes. */
  }

  async start(port = 0) {
    this.server = createServer((request, response) => this.answer(request, response).catch((error) => { console.error(error); response.destroy(); }));
    await new Promise((done) => this.server.listen(port || this.port || 0, '127.0.0.1', done));
    this.port = this.server.address().port;
    this.url = `http://127.0.0.1:${this.port}`;
    Mock.running.add(this);
    this.timer = setInterval(() => this.tick(), 1000);
    return this;
  }

  async stop() {
    Mock.running.delete(this);
    clearInterval(this.timer);
    for (const stream of this.streams) stream.destroy();
    this.streams.clear();
    this.server.closeAllConnections();
    await new Promise((done) => this.server.close(done));
  }

  expire() {
    this.sessions.clear();
    for (const stream of this.streams) stream.destroy();
    this.streams.clear();
  }

  send(response, status, body, headers = {}) {
    response.writeHead(status, { 'Content-Type': 'application/json', 'Cache-Control': 'no-store', ...headers });
    response.end(JSON.stringify(body));
  }
  refusal(response, status, message, data = {}) {
    this.send(response, status, { error: { code: -status, message, data } });
  }

  async answer(request, response) {
    response.setHeader('Content-Security-Policy', CSP);
    response.setHeader('X-Content-Type-Options', 'nosniff');
    response.setHeader('Referrer-Policy', 'no-referrer');
    const path = new URL(request.url, this.url).pathname;
    const cookie = /nacre=(\w+)/.exec(request.headers.cookie ?? '')?.[1];
    const signedIn = this.sessions.has(cookie);
    const session = () => ({ setup: this.setup, signed_in: signedIn, name: signedIn ? 'admin' : null, role: signedIn ? this.role : null, version: '0.1.0', host: 'store1' });
    if (request.method === 'GET' && path === '/api/session') return this.send(response, 200, session());
    if (request.method === 'GET' && path === '/api/live') return signedIn ? this.stream(request, response) : this.refusal(response, 401, 'Not signed in');
    if (request.method === 'GET') return this.file(path === '/' ? 'index.html' : path.slice(1), response);
    if (path === '/api/upload') return this.upload(request, response, signedIn);
    const bodyText = await new Promise((done) => { let text = ''; request.on('data', (part) => (text += part)); request.on('end', () => done(text)); });
    const right = request.headers['content-type'] === 'application/json' && /^(1|background)$/.test(request.headers['x-nacre']) && request.headers.origin === `http://${request.headers.host}`;
    if (!right) return this.refusal(response, 403, 'The request does not come from the page');
    const body = JSON.parse(bodyText);
    const enter = () => {
      const id = `s${Math.random().toString(36).slice(2)}`;
      this.sessions.add(id);
      this.send(response, 200, { ...session(), signed_in: true, name: body.name, role: this.role }, { 'Set-Cookie': `nacre=${id}; HttpOnly; SameSite=Strict; Path=/` });
    };
    if (path === '/api/setup') {
      if (body.code !== 'K7MQ2XPA') return this.refusal(response, 401, 'The set-up code is wrong', { field: 'code', cause: 'the set-up code is wrong', remedy: 'read it again on the console; a restart of the daemon makes a new one', wait_ms: 1000 });
      this.setup = false;
      return enter();
    }
    if (path === '/api/login') {
      if (body.password === PASSWORD) return enter();
      this.fails += 1;
      return this.refusal(response, 401, 'Wrong name or password', this.fails > 2 ? { wait_ms: 4000 } : {});
    }
    if (!signedIn) return this.refusal(response, 401, 'Not signed in');
    if (path === '/api/logout') { this.sessions.delete(cookie); return this.send(response, 200, {}); }
    if (path === '/api/password') return body.old === PASSWORD ? this.send(response, 200, {}) : this.refusal(response, 401, 'Wrong password', { field: 'old', cause: 'the present password is wrong' });
    if (path !== '/api/rpc') return this.refusal(response, 404, 'Not found');
    const { method, params } = body;
    if (!(method in METHODS)) return this.refusal(response, 404, 'Method not found', { cause: `there is no method "${method}"` });
    if (!allows(this.role, method)) return this.refusal(response, 403, 'Forbidden', { cause: `the role ${this.role} may not call ${method}` });
    const extra = PARAMS[method] && Object.keys(params).find((key) => !PARAMS[method].includes(key));
    if (extra) { this.unknown = `${method}: ${extra}`; return this.refusal(response, 400, 'Invalid parameters', { field: extra, cause: `"${extra}" is not known here` }); }
    // Screens run the doctor by themselves, at any moment.
    if (METHODS[method].changes && method !== 'doctor_run') this.calls.push([method, params]);
    if (this.refuse[method]) { const data = this.refuse[method](params); if (data) return this.refusal(response, 409, 'Operation not permitted', data); }
    this.send(response, 200, { result: this.call(method, params) });
    if (METHODS[method].changes) this.changed();
  }

  async upload(request, response, signedIn) {
    let bytes = 0;
    for await (const part of request) bytes += part.length;
    const right = request.headers['content-type'] === 'application/octet-stream' && request.headers['x-nacre'] === '1' && request.headers.origin === `http://${request.headers.host}`;
    if (!signedIn || !right || this.role !== 'admin') return this.refusal(response, 403, 'Forbidden', { cause: 'an upload needs the role admin' });
    if (this.refuse.upload) return this.refusal(response, 422, 'No space left on device', this.refuse.upload(bytes));
    this.world.appliance = { ...this.world.appliance, upload: '/var/lib/nacre-appliance/upload/bundle.tar' };
    this.send(response, 200, { file: this.world.appliance.upload, bytes });
  }

  file(name, response) {
    const types = { html: 'text/html; charset=utf-8', js: 'text/javascript; charset=utf-8', css: 'text/css; charset=utf-8', svg: 'image/svg+xml', txt: 'text/plain; charset=utf-8' };
    try {
      const bytes = readFileSync(new URL(`${name}.gz`, dist));
      response.writeHead(200, { 'Content-Type': types[name.split('.').at(-1)], 'Content-Encoding': 'gzip', 'Cache-Control': 'no-cache' });
      response.end(bytes);
    } catch {
      response.writeHead(404);
      response.end();
    }
  }

  call(method, p) {
    const w = this.world;
    const of = (name) => w.volumes.find((v) => v.name === name);
    const sub = () => w.subsystems.find((s) => s.nqn === p.nqn);
    switch (method) {
      case 'rpc_get_methods': return Object.keys(METHODS).filter((name) => allows(this.role, name));
      case 'volume_list': return w.volumes;
      case 'volume_get_connections': return w.hosts.filter(([nqn]) => of(p.name)?.subsystems.includes(nqn)).map(([nqn, cntlid, host, at, peer, queues]) => ({ nqn, host, host_id: host, cntlid, transport: at.trtype, listen_address: `${at.traddr}:${at.trsvcid}`, peer_address: `${peer}:4${cntlid}312`, queues, tls: null, dhchap_key: null, admitted: true }));
      case 'bdev_get_bdevs': return w.bdevs;
      case 'pool_list': return w.pools;
      case 'lvol_list': return w.lvols;
      case 'nvmf_get_subsystems': return w.subsystems;
      case 'nvmf_get_listeners': return w.listeners;
      case 'nvmf_get_stats': return { listeners: [], tick_rate: 1e9, poll_groups: [{ name: 'reactor_0', current_admin_qpairs: w.hosts.length, current_io_qpairs: w.hosts.reduce((sum, h) => sum + h[5], 0), current_unassociated_qpairs: 0 }] };
      case 'nvmf_get_transports': return [{ trtype: 'TCP', max_queue_depth: 128, max_io_size: 1048576, in_capsule_data_size: 8192, max_io_qpairs_per_ctrlr: 128 }, { trtype: 'RDMA', max_queue_depth: 128, max_io_size: 1048576, in_capsule_data_size: 4096, max_io_qpairs_per_ctrlr: 128 }];
      case 'nvmf_subsystem_get_listeners': return (sub()?.listen_addresses ?? []).map((address) => ({ address, ana_states: Array.from({ length: 32 }, (_, n) => ({ ana_group: n + 1, ana_state: w.ana[`${p.nqn} ${address.trtype}`] ?? 'optimized' })) }));
      case 'nvmf_subsystem_get_controllers': return w.hosts.filter(([nqn]) => nqn === p.nqn).map(([, cntlid, hostnqn, , , queues]) => ({ cntlid, cntrltype: 'io', hostid: hostnqn.slice(-36), hostnqn, num_io_qpairs: queues }));
      case 'nvmf_subsystem_get_qpairs': return w.hosts.filter(([nqn]) => nqn === p.nqn).flatMap(([, cntlid, hostnqn, listen_address, peer, queues]) => Array.from({ length: queues + 1 }, (_, qid) => ({ cntlid, hostnqn, qid, listen_address, peer_address: { ...listen_address, traddr: peer, trsvcid: String(40000 + qid) }, state: 'enabled', thread: 'reactor_0' })));
      case 'bdev_nvme_get_controllers': return w.controllers;
      case 'bdev_nvme_get_controller_health_info': return { model_number: 'SAMSUNG MZWLR1T9HBJR-00007', serial_number: `S4EWNX0M12345${p.name === 'Nvme0' ? 6 : 7}`, firmware_revision: 'MPK93B5Q', temperature_celsius: p.name === 'Nvme0' ? 37 : 72, percentage_used: p.name === 'Nvme0' ? 3 : 11, available_spare_percentage: 100, available_spare_threshold_percentage: 10, media_errors: 0, power_on_hours: 12_344, unsafe_shutdowns: 4, warnings: p.name === 'Nvme0' ? [] : ['temperature'] };
      case 'state_get': return w.stored;
      case 'events_get': return { events: w.events, lost: 0, next: w.events.length };
      case 'alert_list': return w.alerts;
      case 'alert_test': return w.alerts.receivers.map((r) => ({ name: r.name, kind: r.kind, delivered: !r.error, error: r.error, milliseconds: 84 }));
      case 'rdma_get_devices': return w.devices;
      case 'doctor_run': return w.report;
      case 'pool_check': return { findings: [], more_findings: 0, not_repaired: 0, pages: 212, repaired: 0, units: 13_631 };
      case 'config_export': return { subsystems: [{ subsystem: 'bdev', config: [] }] };
      case 'key_list': {
        const users = (key) => w.alerts.receivers.filter((r) => Object.values(r.settings ?? {}).includes(key)).map((r) => `alert ${r.name}`);
        return w.keys.map((key) => ({ ...key, used_by: [...key.used_by, ...users(key.name)] }));
      }
      case 'host_auth_status': return w.auth;
      case 'key_generate': {
        w.keys = [...w.keys, { name: p.name, state: 'ok', kind: p.kind, hash: p.hash, fingerprint: '5c55e05d', source: 'sealed', used_by: [], removed: false, ...(p.expires ? { expires: p.expires } : {}) }];
        return { name: p.name, kind: p.kind, hash: p.hash, fingerprint: '5c55e05d', ...(p.reveal ? { text: 'DHHC-1:01:c2VjcmV0IG9mIHRoZSBtb2Nr:' } : {}) };
      }
      case 'alert_set_webhook':
      case 'alert_set_mail': w.alerts = { ...w.alerts, receivers: [...w.alerts.receivers.filter((r) => r.name !== p.name), { name: p.name, kind: method.slice(10), target: p.to?.join(', ') ?? p.url ?? `key ${p.url_key}`, severity: p.severity ?? 'warning', categories: p.categories ?? [], except: p.except ?? [], declared: false, settings: p, pending: 0, delivered: 0, dropped: 0 }] }; return true;
      case 'alert_remove': w.alerts = { ...w.alerts, receivers: w.alerts.receivers.filter((r) => r.name !== p.name) }; return true;
      case 'key_import': w.keys = [...w.keys, { name: p.name, state: 'ok', ...(p.kind === 'text' ? { kind: 'text' } : { kind: 'dhchap', hash: 'none', fingerprint: 'c5307614' }), source: 'sealed', used_by: [], removed: false }]; return p.kind === 'text' ? { name: p.name, kind: 'text' } : { name: p.name, kind: 'dhchap', hash: 'none', fingerprint: 'c5307614' };
      case 'key_expire': w.keys = w.keys.map((k) => (k.name === p.name ? { ...k, expires: p.expires } : k)); return true;
      case 'keyring_file_remove_key': w.keys = w.keys.filter((k) => k.name !== p.name); return true;
      case 'key_store_rotate': return { keys: 1, store_key: '009fc1a5' };
      case 'disk_list': return w.machine_disks.map((d) => ({ ...d, bdevs: w.bdevs.filter((b) => d.path && JSON.stringify(b).includes(`"${d.path}"`)).map((b) => b.name) }));
      case 'disk_get_bay': return w.bays[p.name] ? { bay: w.bays[p.name], problem: null } : { bay: null, problem: `the kernel shows no light of the bay of ${p.name}` };
      case 'disk_locate': w.bays = { ...w.bays, [p.name]: { ...w.bays[p.name], lit: p.on } }; return w.bays[p.name];
      case 'nvmf_ns_clear_reservation': {
        const former = w.reservations[`${p.nqn} ${p.nsid}`];
        w.reservations = { ...w.reservations, [`${p.nqn} ${p.nsid}`]: { ...former, rtype: 0, type: undefined, generation: former.generation + 1, registrants: [] } };
        return { type: former.type, registrants: former.registrants };
      }
      case 'nvmf_ns_get_reservation': return w.reservations[`${p.nqn} ${p.nsid}`] ?? { known: true, rtype: 0, generation: 0, ptpl: false, ptpl_capable: true, conflicts: 0, registrants: [] };
      case 'bdev_nvme_get_controller_logs': return w.logs;
      case 'bdev_nvme_apply_firmware': return 'firmware MPK95B5Q runs; it was MPK93B5Q';
      case 'audit_get': {
        const of = w.audit.filter((c) => (!p.method || c.method === p.method) && (!p.object || c.object === p.object) && (!p.refused || c.result === 'refused') && (!p.user || [c.account, c.api_token, String(c.uid)].includes(p.user)) && (!p.until || c.time <= p.until));
        w.audit = [...w.audit, { ...w.audit.at(-1), time: '2099-01-01T00:00:00.000Z', method: 'audit_get', object: null, result: 'done', error: undefined, account: 'admin' }];
        const from = of.slice(0, of.length - (p.skip ?? 0));
        return { calls: from.slice(-p.limit), file: '/var/lib/nacre/audit.log' };
      }
      case 'appliance_get': return w.appliance;
      case 'network_get_interfaces': return w.interfaces;
      case 'appliance_set_name': w.appliance = { ...w.appliance, host: p.name.toLowerCase(), acts: [{ ...w.appliance.acts[0], act: 'name', state: 'done', text: `the name of this machine is ${p.name.toLowerCase()}, and was ${w.appliance.host}` }, ...w.appliance.acts] }; return true;
      case 'appliance_set_network': w.appliance = { ...w.appliance, pending_network: p.interface }; return true;
      case 'appliance_bind_drive': {
        const of = w.machine_disks.find((d) => d.address === p.address) ?? w.appliance.drives.find((d) => d.address === p.address);
        w.machine_disks = [...w.machine_disks.filter((d) => d !== of), { name: p.address, address: p.address, serial: of.serial, model: of.model, size: 0, block_size: 0, read_only: false, partitions: 0, uses: [], bdevs: [] }];
        w.appliance = { ...w.appliance, drives: [...w.appliance.drives.filter((d) => d.address !== p.address), { serial: of.serial, model: of.model, address: p.address, state: 'bound' }] };
        return true;
      }
      case 'appliance_unbind_drive': w.appliance = { ...w.appliance, drives: w.appliance.drives.filter((d) => d.serial !== p.serial) }; return true;
      case 'appliance_keep_network': case 'appliance_revert_network': w.appliance = { ...w.appliance, pending_network: null }; return true;
      case 'web_account_list': return w.accounts;
      case 'web_token_list': return w.tokens;
      case 'web_token_create': {
        const created_ms = Date.now();
        w.tokens = [...w.tokens, { name: p.name, role: p.role, created_ms, expires_ms: p.validity_s ? created_ms + p.validity_s * 1000 : null }];
        return { token: `nacre_${'5c'.repeat(32)}` };
      }
      case 'web_token_delete': w.tokens = w.tokens.filter((t) => t.name !== p.name); return true;
      case 'web_get_status': return { listen: ['https://0.0.0.0:8443'], fingerprint: 'SHA256:9C:41:7E:0B:5D:AA:13:6F:E2:88:30:C7:91:4D:F6:02:B5:7A:EE:19:43:8C:D0:65:2B:F8:97:1C:A4:3E:60:DD', setup_code: null };
      case 'state_retry': return { failed: 1, restored: 0 };
      case 'nvmf_subsystem_test_failover': return { accessible: [{ trtype: 'TCP', traddr: '10.0.0.4', trsvcid: '4420', adrfam: 'IPv4' }], hosts_without_path: [] };
      case 'bdev_aio_create': w.bdevs = [...w.bdevs, fixtures.file(p.name, (p.size ?? 2 ** 36) / 2 ** 30, p.filename)]; return p.name;
      case 'volume_create': {
        const devices = p.devices ?? ['ant', 'bee', 'cow', 'dog', 'eel'].slice(0, p.replica_count).map((node) => `${node}:${p.name}`);
        const source = w.snapshots.find((s) => s.uuid === p.snapshot);
        const gib = source ? (p.size_mb ? p.size_mb / 1024 : source.size_bytes / 2 ** 30) : 64;
        const made = fixtures.volume(p.name, gib, devices.map((d) => fixtures.replica(d)));
        w.volumes = [...w.volumes, made];
        w.bdevs = [...w.bdevs.map((b) => (devices.includes(b.name) ? { ...b, claimed: true } : b)), fixtures.bdev(p.name, gib, 'Replicated volume', {})];
        return made;
      }
      case 'volume_publish': {
        const nqn = `nqn.2025-01.io.nacre:${p.name}`;
        const listen = p.listeners ?? [{ trtype: 'TCP', adrfam: 'IPv4', traddr: '0.0.0.0', trsvcid: '4420' }];
        w.subsystems = [...w.subsystems, fixtures.subsystem(p.name, p.name, p.hosts ?? [], listen)];
        w.volumes = w.volumes.map((v) => (v.name === p.name ? { ...v, subsystems: [nqn] } : v));
        return { listen_addresses: listen, nqn, nsid: 1, uuid: '' };
      }
      case 'volume_rename': w.volumes = w.volumes.map((v) => (v.name === p.name ? { ...v, name: p.new_name } : v)); return true;
      case 'volume_delete':
        w.snapshots = w.snapshots.map((s) => (s.volume_name === p.name ? { ...s, volume_name: null } : s));
        w.volumes = w.volumes.filter((v) => v.name !== p.name);
        return true;
      case 'volume_snapshot_list': return w.snapshots.filter((s) => !p.volume || p.volume === s.volume || p.volume === s.volume_name);
      case 'volume_snapshot_create': {
        const source = w.volumes.find((v) => v.name === p.volume);
        const made = { uuid: `5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0b${String(w.snapshots.length).padStart(2, '0')}`, name: p.name, volume: source.uuid, volume_name: source.name, size_bytes: source.num_blocks * 512, created_s: Math.floor(Date.now() / 1000), state: 'ready', why: null, lvols: [{ uuid: source.replicas[0].id, node: 'ant', pool: null, pool_name: null, why: null }] };
        w.snapshots = [...w.snapshots, made];
        return made;
      }
      case 'volume_snapshot_delete': w.snapshots = w.snapshots.filter((s) => s.uuid !== p.snapshot); return true;
      case 'bdev_nvme_attach_controller': return [`${p.name}n1`];
      default: return method.startsWith('volume_') ? (of(p.name) ?? true) : true;
    }
  }

  random() {
    this.seed = (this.seed * 1103515245 + 12345) % 2 ** 31;
    return this.seed / 2 ** 31;
  }

  metrics(time_ms) {
    const t = time_ms / 1000;
    const wave = 1 + 0.35 * Math.sin(t / 97) + 0.12 * Math.sin(t / 11) + 0.1 * (this.random() - 0.5);
    const burst = t % 240 < 25 ? 1.9 : 1;
    const read_ops = 41_200 * wave;
    const write_ops = 15_800 * wave * burst;
    const slow = t % 240 < 25 ? 2.4 : 1;
    const p = (base, spread) => Math.round(base * slow * (1 + spread * (this.random() - 0.5)));
    const read = { p50: p(86, 0.1), p99: p(310, 0.5) };
    const write = { p50: p(34, 0.1), p99: p(180, 0.5) };
    const buckets = new Map();
    const spread = (ops, centre) => {
      for (let k = -2; k <= 5; k += 1) {
        const bound = 2 ** Math.round(Math.log2(centre) + k);
        const share = [0.05, 0.22, 0.38, 0.2, 0.1, 0.035, 0.012, 0.003][k + 2] * (0.8 + 0.4 * this.random());
        buckets.set(bound, (buckets.get(bound) ?? 0) + Math.round(ops * share));
      }
    };
    spread(read_ops, read.p50);
    spread(write_ops, write.p50);
    if (this.random() < 0.06) buckets.set(16384, 3);
    return { time_ms, read_ops, write_ops, read_bytes: read_ops * 8192, write_bytes: write_ops * 16384, read_p50_us: read.p50, read_p99_us: read.p99, write_p50_us: write.p50, write_p99_us: write.p99, latency_us: [...buckets] };
  }

  idle(time_ms) {
    return { time_ms, read_ops: 0, write_ops: 0, read_bytes: 0, write_bytes: 0, read_p50_us: null, read_p99_us: null, write_p50_us: null, write_p99_us: null, latency_us: [] };
  }

  stream(request, response) {
    response.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-store' });
    this.streams.add(response);
    request.on('close', () => this.streams.delete(response));
    const now = Date.now();
    response.write(`event: snapshot\ndata: ${JSON.stringify({ time_ms: now, phase: this.phase })}\n\n`);
    for (let ago = 890; ago > 0; ago -= 1) this.emit(response, now - ago * 1000);
  }
  emit(response, time_ms) {
    const data = this.world.hosts.length > 0 ? this.metrics(time_ms) : this.idle(time_ms);
    response.write(`event: metrics\ndata: ${JSON.stringify(data)}\n\n`);
  }
  tick() {
    for (const stream of this.streams) this.emit(stream, Date.now());
  }
  changed() {
    for (const stream of this.streams) stream.write(`event: changed\ndata: ${JSON.stringify({ kinds: ['volumes', 'bdevs', 'subsystems', 'pools'] })}\n\n`);
  }
  event(event) {
    const full = { id: this.world.events.length, time: new Date().toISOString(), severity: 'info', ...event };
    this.world.events = [...this.world.events, full];
    for (const stream of this.streams) stream.write(`id: ${full.id}\nevent: event\ndata: ${JSON.stringify(full)}\n\n`);
  }
}

export { PASSWORD };

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [world = 'busy', port = '8080'] = process.argv.slice(2);
  const mock = await new Mock({ world: fixtures[world](), setup: world === 'empty' }).start(Number(port));
  console.log(`${mock.url}  password: ${PASSWORD}  set-up code: K7MQ2XPA`);
}
