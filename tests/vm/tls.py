#!/usr/bin/env python3
"""TLS for the kernel of the guest: what tlshd (ktls-utils) and a newer nvme-cli do elsewhere.

tls.py agent LOG
    Removes all keys of the kernel. Then does the handshakes that the kernel asks for, until it is
    killed. LOG gets a line each: `ROLE RESULT IDENTITY`, and first of all `ready`. GnuTLS does them
    as tlshd does, and OpenSSL those of a client with a key of SHA-384.
tls.py key FILE HOST SUBSYSTEM [v0|v1|legacy]
    Puts the PSK of a key file into the keyring `.nvme`, under the identity of version 0 or 1, or of
    version 0 as libnvme before 1.16 derives it. Prints the serial number of the kernel's key.
tls.py sha384 FILE
    Makes a configured PSK of 48 bytes, for SHA-384.
tls.py expire SERIAL
    Makes a key of the kernel expire in a second.

The kernel's side is net/handshake: a generic netlink family. It says READY to a multicast group;
ACCEPT gives a connected socket and the key to use; DONE returns the result.
"""
import base64
import ctypes
import errno
import hashlib
import hmac
import os
import socket
import struct
import sys
import threading
import zlib

# ---- keys

keys = ctypes.CDLL("libkeyutils.so.1", use_errno=True)
SESSION_KEYRING = -3


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def nvme_keyring():
    """The serial number of `.nvme`. Linked to the session's keyring, this process possesses its keys."""
    with open("/proc/keys") as lines:
        fields = (line.split() for line in lines)
        serial = next(int(key[0], 16) for key in fields if key[7:9] == ["keyring", ".nvme:"])
    checked(keys.keyctl_link(serial, SESSION_KEYRING))
    return serial


def key_text(function, serial):
    buffer = ctypes.create_string_buffer(4096)
    length = checked(function(serial, buffer, len(buffer)))
    return buffer.raw[:length]


def key_identity(serial):
    """A key's description: `TYPE;UID;GID;PERMISSIONS;IDENTITY`, with a zero byte."""
    return key_text(keys.keyctl_describe, serial).rstrip(b"\0").split(b";", 4)[4]


def hkdf_expand(algorithm, secret, info, length):
    blocks, block = b"", b""
    while len(blocks) < length:
        block = hmac.digest(secret, block + info + bytes([len(blocks) // hashlib.new(algorithm).digest_size + 1]), algorithm)
        blocks += block
    return blocks[:length]


def label_info(length, label, context=b"", is_legacy=False):
    label = b"tls13 " + label
    if is_legacy:
        return struct.pack("<H", length) + label + context
    return struct.pack(">HB", length, len(label)) + label + bytes([len(context)]) + context


def expand_label(algorithm, secret, label, context, is_legacy):
    """HKDF-Extract with a zero salt, then HKDF-Expand-Label."""
    length = hashlib.new(algorithm).digest_size
    extracted = hmac.digest(bytes(length), secret, algorithm)
    return hkdf_expand(algorithm, extracted, label_info(length, label, context, is_legacy), length)


def derive(text, host, subsystem, form):
    """Identity and TLS PSK of a configured PSK `NVMeTLSkey-1:HH:BASE64:`."""
    _, number, encoded = text.strip().split(":")[:3]
    secret, is_legacy = base64.b64decode(encoded)[:-4], form == "legacy"
    # HH 00: used as it is, and the length says which hash.
    algorithm = "sha384" if len(secret) == 48 else "sha256"
    hash_id = b"02" if len(secret) == 48 else b"01"
    host, subsystem = host.encode(), subsystem.encode()
    retained = secret if number == "00" else expand_label(algorithm, secret, b"HostNQN", host, is_legacy)
    names = host + b" " + subsystem
    if form == "v1":
        digest = base64.b64encode(hmac.digest(retained, names + b" NVMe-over-Fabrics", algorithm))
        identity, context = b"NVMe1R" + hash_id + b" " + names + b" " + digest, hash_id + b" " + digest
    else:
        identity = context = b"NVMe0R" + hash_id + b" " + names
    return identity, expand_label(algorithm, retained, b"nvme-tls-psk", context, is_legacy)


def add_key(path, host, subsystem, form="v0"):
    with open(path) as file:
        identity, psk = derive(file.read(), host, subsystem, form)
    print(checked(keys.add_key(b"psk", identity, psk, len(psk), nvme_keyring())))


def make_sha384(path):
    secret = os.urandom(48)
    checked_secret = secret + struct.pack("<I", zlib.crc32(secret))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("NVMeTLSkey-1:02:%s:\n" % base64.b64encode(checked_secret).decode())


# ---- the kernel's requests

NETLINK_GENERIC, SOL_NETLINK, ADD_MEMBERSHIP = 16, 270, 1
CONTROL, GET_FAMILY, FAMILY_ID, FAMILY_NAME, GROUPS, GROUP_NAME, GROUP_ID = 16, 3, 1, 2, 7, 1, 2
REQUEST, ACK, ERROR = 1, 4, 2
ACCEPT, DONE = 2, 3
SOCKFD, HANDLER_CLASS, MESSAGE_TYPE, PEER_IDENTITY = 1, 2, 3, 6
CLIENT_HELLO, TLSHD = 1, 1
DONE_STATUS, DONE_SOCKFD, DONE_REMOTE_AUTH = 1, 2, 3


def attribute(kind, value):
    value = value if isinstance(value, bytes) else struct.pack("=I", value)
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data):
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack("=HH", data[:4])
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3:]
    return found


class Netlink:
    def __init__(self):
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_GENERIC)
        self.socket.bind((0, 0))

    def call(self, family, command, *given, flags=0):
        """The attributes of the answer; with ACK, or for an error, the kernel's error number."""
        body = struct.pack("=BBH", command, 1, 0) + b"".join(given)
        self.socket.send(struct.pack("=IHHII", 16 + len(body), family, REQUEST | flags, 1, 0) + body)
        answer = self.socket.recv(65536)
        if struct.unpack("=H", answer[4:6])[0] == ERROR:
            return -struct.unpack("=i", answer[16:20])[0]
        return attributes(answer[20:])


def number(value):
    return struct.unpack("=I", value)[0]


# ---- handshakes

PRIORITIES = b"SECURE256:+SECURE128:-VERS-ALL:+VERS-TLS1.3:-CIPHER-ALL:+AES-128-GCM:+AES-256-GCM:+PSK:+DHE-PSK:+ECDHE-PSK:%NO_TICKETS"
SERVER, CLIENT, CREDENTIALS_PSK, ALERT_RECEIVED = 1, 2, 4, -12
TIMEOUT_MS = 9000
TCP_ULP, SOL_TLS, TLS_1_3 = 31, 282, 0x0304


class Datum(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_uint)]

    def bytes(self):
        return ctypes.string_at(self.data, self.size)


LOOKUP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Datum))


class Handshake:
    """One handshake over a socket. As a client it has a key, as a server it looks keys up."""

    def __init__(self, gnutls, libc, keyring):
        self.gnutls, self.libc, self.keyring = gnutls, libc, keyring
        self.serial, self.identity = 0, b"-"
        self.session, self.credentials = ctypes.c_void_p(), ctypes.c_void_p()
        self.openssl = None

    def as_client(self, serial):
        self.serial, self.identity = serial, key_identity(serial)
        psk = key_text(keys.keyctl_read, serial)
        if len(psk) == 48:
            self.openssl = OpenSslClient(self.identity, psk)
            return
        self.gnutls.gnutls_init(ctypes.byref(self.session), CLIENT)
        self.gnutls.gnutls_psk_allocate_client_credentials(ctypes.byref(self.credentials))
        datum = Datum(ctypes.cast(ctypes.c_char_p(psk), ctypes.c_void_p), len(psk))
        # It copies both.
        self.gnutls.gnutls_psk_set_client_credentials(self.credentials, self.identity, ctypes.byref(datum), 0)

    def as_server(self):
        self.gnutls.gnutls_init(ctypes.byref(self.session), SERVER)
        self.gnutls.gnutls_psk_allocate_server_credentials(ctypes.byref(self.credentials))
        self.lookup = LOOKUP(self.look_up)
        self.gnutls.gnutls_psk_set_server_credentials_function(self.credentials, self.lookup)

    def look_up(self, _session, identity, out):
        self.identity = identity
        serial = keys.keyctl_search(self.keyring, b"psk", identity, 0)
        if serial < 0:
            return -1
        self.serial, psk = serial, key_text(keys.keyctl_read, serial)
        # GnuTLS frees it.
        out[0].data, out[0].size = self.libc.malloc(len(psk)), len(psk)
        ctypes.memmove(out[0].data, psk, len(psk))
        return 0

    def run(self, stream):
        """None, or why it failed. Afterwards the kernel seals and opens the socket's records."""
        if self.openssl:
            return self.openssl.run(stream)
        gnutls = self.gnutls
        gnutls.gnutls_credentials_set(self.session, CREDENTIALS_PSK, self.credentials)
        gnutls.gnutls_priority_set_direct(self.session, PRIORITIES, None)
        gnutls.gnutls_transport_set_int2(self.session, stream.fileno(), stream.fileno())
        gnutls.gnutls_handshake_set_timeout(self.session, TIMEOUT_MS)
        while (result := gnutls.gnutls_handshake(self.session)) < 0 and not gnutls.gnutls_error_is_fatal(result):
            pass
        if result == ALERT_RECEIVED:
            return "alert %d" % gnutls.gnutls_alert_get(self.session)
        if result < 0:
            gnutls.gnutls_alert_send_appropriate(self.session, result)
            return gnutls.gnutls_strerror(result).decode().replace(" ", "_")
        stream.setsockopt(socket.SOL_TCP, TCP_ULP, b"tls")
        for is_receiving, option in ((0, TX), (1, RX)):
            mac, iv, key, sequence = Datum(), Datum(), Datum(), ctypes.create_string_buffer(8)
            gnutls.gnutls_record_get_state(
                self.session, is_receiving, ctypes.byref(mac), ctypes.byref(iv), ctypes.byref(key), sequence)
            give_key(stream, option, key.bytes(), iv.bytes(), sequence.raw)
        return None


TX, RX = 1, 2


def give_key(stream, direction, key, nonce, sequence):
    """AES-128-GCM or AES-256-GCM. The first four bytes of the nonce are the salt."""
    cipher = 51 if len(key) == 16 else 52
    given = struct.pack("=HH", TLS_1_3, cipher) + nonce[4:] + key + nonce[:4] + sequence
    stream.setsockopt(SOL_TLS, direction, given)


USE_SESSION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p))
KEY_LOG = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
SET_MIN_VERSION, AES_256_GCM_SHA384, ALERT_REASONS = 123, b"\x13\x02", 1000


class OpenSslClient:
    """A client with a PSK of SHA-384: GnuTLS before 3.8.11 binds all PSKs with SHA-256."""

    def __init__(self, identity, psk):
        self.identity, self.psk, self.secrets = identity, psk, {}
        self.ssl, self.crypto = ctypes.CDLL("libssl.so.3"), ctypes.CDLL("libcrypto.so.3")
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new", "SSL_SESSION_new", "SSL_CIPHER_find"):
            getattr(self.ssl, name).restype = ctypes.c_void_p
        self.crypto.ERR_get_error.restype = ctypes.c_ulong

    def use_session(self, ssl, _digest, identity, length, session):
        made = ctypes.c_void_p(self.ssl.SSL_SESSION_new())
        self.ssl.SSL_SESSION_set1_master_key(made, self.psk, ctypes.c_size_t(len(self.psk)))
        cipher = self.ssl.SSL_CIPHER_find(ctypes.c_void_p(ssl), AES_256_GCM_SHA384)
        self.ssl.SSL_SESSION_set_cipher(made, ctypes.c_void_p(cipher))
        self.ssl.SSL_SESSION_set_protocol_version(made, TLS_1_3)
        # OpenSSL copies the identity, and frees the session.
        identity[0] = ctypes.cast(ctypes.c_char_p(self.identity), ctypes.c_void_p)
        length[0], session[0] = len(self.identity), made
        return 1

    def log_key(self, _ssl, line):
        name, _, secret = line.split(b" ")
        self.secrets[name] = bytes.fromhex(secret.decode())

    def run(self, stream):
        """None, or why it failed. Afterwards the kernel seals and opens the socket's records."""
        use_session, log_key = USE_SESSION(self.use_session), KEY_LOG(self.log_key)
        context = ctypes.c_void_p(self.ssl.SSL_CTX_new(ctypes.c_void_p(self.ssl.TLS_client_method())))
        self.ssl.SSL_CTX_ctrl(context, SET_MIN_VERSION, ctypes.c_long(TLS_1_3), None)
        self.ssl.SSL_CTX_set_ciphersuites(context, b"TLS_AES_256_GCM_SHA384")
        self.ssl.SSL_CTX_set_psk_use_session_callback(context, use_session)
        self.ssl.SSL_CTX_set_keylog_callback(context, log_key)
        ssl = ctypes.c_void_p(self.ssl.SSL_new(context))
        self.ssl.SSL_set_fd(ssl, stream.fileno())
        connected = self.ssl.SSL_connect(ssl)
        reason = self.crypto.ERR_get_error() & 0x7FFFFF
        self.ssl.SSL_free(ssl)
        self.ssl.SSL_CTX_free(context)
        if connected != 1:
            return "alert %d" % (reason - ALERT_REASONS) if reason > ALERT_REASONS else "reason_%d" % reason
        stream.setsockopt(socket.SOL_TCP, TCP_ULP, b"tls")
        for direction, name in ((TX, b"CLIENT_TRAFFIC_SECRET_0"), (RX, b"SERVER_TRAFFIC_SECRET_0")):
            key, nonce = (
                hkdf_expand("sha384", self.secrets[name], label_info(length, label), length)
                for label, length in ((b"key", 32), (b"iv", 12)))
            # No record has been sealed with these keys yet: there are no tickets.
            give_key(stream, direction, key, nonce, bytes(8))
        return None


class Agent:
    def __init__(self, log):
        self.log = open(log, "a", buffering=1)
        self.gnutls, self.libc = ctypes.CDLL("libgnutls.so.30"), ctypes.CDLL(None)
        self.gnutls.gnutls_strerror.restype = ctypes.c_char_p
        self.libc.malloc.restype = ctypes.c_void_p
        self.gnutls.gnutls_handshake_set_timeout.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        self.keyring = nvme_keyring()
        checked(keys.keyctl_clear(self.keyring))

    def run(self):
        netlink = Netlink()
        family = netlink.call(CONTROL, GET_FAMILY, attribute(FAMILY_NAME, b"handshake\0"))
        self.family = struct.unpack("=H", family[FAMILY_ID])[0]
        groups = [attributes(group) for group in attributes(family[GROUPS]).values()]
        group = next(number(group[GROUP_ID]) for group in groups if group[GROUP_NAME] == b"tlshd\0")
        netlink.socket.setsockopt(SOL_NETLINK, ADD_MEMBERSHIP, group)
        self.log.write("ready\n")
        while True:
            netlink.socket.recv(65536)
            # Two ends of one connection may both be in this kernel.
            threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        netlink = Netlink()
        request = netlink.call(self.family, ACCEPT, attribute(HANDLER_CLASS, TLSHD))
        if not isinstance(request, dict):
            self.log.write("- no_request(%d) -\n" % request)
            return
        stream = socket.socket(fileno=number(request[SOCKFD]))
        stream.setblocking(True)
        handshake = Handshake(self.gnutls, self.libc, self.keyring)
        is_client = number(request[MESSAGE_TYPE]) == CLIENT_HELLO
        try:
            if is_client:
                handshake.as_client(number(request[PEER_IDENTITY]))
            else:
                handshake.as_server()
            failed = handshake.run(stream)
        except OSError as error:
            failed = errno.errorcode[error.errno]
        given = [attribute(DONE_STATUS, errno.EACCES if failed else 0), attribute(DONE_SOCKFD, stream.fileno())]
        if not failed:
            given.append(attribute(DONE_REMOTE_AUTH, handshake.serial))
        # Before the kernel goes on: a test reads the line after its connection.
        self.log.write("%s %s %s\n" % ("client" if is_client else "server", failed or "ok", handshake.identity.decode()))
        netlink.call(self.family, DONE, *given, flags=ACK)
        stream.close()
        netlink.socket.close()


def main(command, *given):
    if command == "agent":
        Agent(*given).run()
    elif command == "key":
        add_key(*given)
    elif command == "sha384":
        make_sha384(*given)
    elif command == "expire":
        nvme_keyring()
        checked(keys.keyctl_set_timeout(int(given[0]), 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
