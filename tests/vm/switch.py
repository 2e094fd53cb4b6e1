"""A switch that announces itself by LLDP, five times a second: switch.py INTERFACE FILE

A line of FILE is the name of the switch ("name leaf-7") or an organisationally specific TLV ("00,80,c2 11 08,08": OUI,
subtype, bytes in hexadecimal). The file is read again for each frame. FILE.sent exists after the
first one.
"""

import socket
import struct
import sys
import time


def tlv(kind, data):
    return struct.pack("!H", kind << 9 | len(data)) + data


def octets(text):
    return bytes(int(part, 16) for part in text.split(","))


def frame(mac, lines):
    # Chassis ID and Port ID are MAC addresses (subtypes 4 and 3), and the TTL is 120 s.
    tlvs = [tlv(1, b"\4" + mac), tlv(2, b"\3" + mac), tlv(3, b"\0\x78")]
    for words in (line.split() for line in lines):
        if words[:1] == ["name"]:
            tlvs.append(tlv(5, words[1].encode()))
        elif words:
            tlvs.append(tlv(127, octets(words[0]) + bytes([int(words[1])]) + octets(words[2])))
    return bytes.fromhex("0180c200000e") + mac + b"\x88\xcc" + b"".join(tlvs) + tlv(0, b"")


def main(interface, file):
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88CC))
    sender.bind((interface, 0))
    mac = sender.getsockname()[4]
    while True:
        with open(file, encoding="ascii") as lines:
            sender.send(frame(mac, lines.read().splitlines()).ljust(60, b"\0"))
        with open(file + ".sent", "w", encoding="ascii"):
            pass
        time.sleep(0.2)


main(*sys.argv[1:])
