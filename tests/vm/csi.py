"""Calls a CSI driver: csi.py SOCKET SERVICE/METHOD [REQUEST]

The request is JSON with the numbers of fields, as csi.proto has them. A list is a repeated field; a
map is a list of {"1": key, "2": value}. The answer is printed as JSON in the same form. Exit code 1:
the driver refused the call; its log has the reason.

gRPC is HTTP/2: this client sends one stream with headers that it does not compress, and tells a
refusal by the absence of a message.
"""

import json
import socket
import sys

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4
LIMIT = 1 << 20


def varint(number):
    out = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def encode(fields):
    out = b""
    for key, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, (bool, int)):
                out += varint(int(key) << 3) + varint(int(one))
            else:
                body = one.encode() if isinstance(one, str) else encode(one)
                out += varint(int(key) << 3 | 2) + varint(len(body)) + body
    return out


def read_varint(data, at):
    number, shift = 0, 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def decode(data):
    """A field of bytes is text if it is printable, else a message."""
    fields, at = {}, 0
    while at < len(data):
        key, at = read_varint(data, at)
        if key & 7 == 0:
            value, at = read_varint(data, at)
        elif key & 7 == 2:
            length, at = read_varint(data, at)
            body, at = data[at : at + length], at + length
            value = body.decode() if all(0x20 <= b < 0x7F for b in body) else decode(body)
        else:
            raise ValueError(f"wire type {key & 7}")
        fields.setdefault(str(key >> 3), []).append(value)
    return fields


def frame(kind, flags, stream, body):
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def headers(method):
    texts = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/csi.v1.{method}",
        ":authority": "csi",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    out = b""
    for name, value in texts.items():
        assert len(value) < 127
        out += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return out


def exactly(stream, count):
    out = b""
    while len(out) < count:
        part = stream.recv(count - len(out))
        if not part:
            sys.exit("the driver closed the connection")
        out += part
    return out


def call(path, method, request):
    body = encode(request)
    message = b"\0" + len(body).to_bytes(4, "big") + body
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(300)
    stream.connect(path)
    stream.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, headers(method))
        + frame(DATA, END_STREAM, 1, message)
    )
    answer = b""
    while True:
        head = exactly(stream, 9)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if length + len(answer) > LIMIT:
            sys.exit("the answer is too long")
        body = exactly(stream, length)
        if kind == SETTINGS and not flags & ACK:
            stream.sendall(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            stream.sendall(frame(PING, ACK, 0, body))
        elif kind == DATA:
            answer += body
        elif kind in (RESET, GOAWAY):
            sys.exit(f"the driver ended the call: {body.hex()}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            return answer


def main():
    path, method, *request = sys.argv[1:]
    answer = call(path, method, json.loads(request[0]) if request else {})
    if len(answer) < 5:
        sys.exit(f"{method}: refused")
    print(json.dumps(decode(answer[5:])))


main()
