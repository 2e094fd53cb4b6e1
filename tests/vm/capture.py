#!/usr/bin/env python3
"""Prints the DSCPs of the IP packets that arrive on an interface, one line per flow of it.

capture.py INTERFACE OUT: writes OUT at SIGTERM: `PROTOCOL SOURCE:PORT DESTINATION:PORT DSCP COUNT`.
The protocol is tcp, cm (RoCE, queue pair 1: the kernel's connection manager), roce or other.
"""
import collections
import signal
import socket
import struct
import sys

flows = collections.Counter()


def finish(*_):
    with open(sys.argv[2], "w") as out:
        for flow, count in sorted(flows.items()):
            print(*flow, count, file=out)
    sys.exit(0)


def ip(packet):
    """Version, DSCP, protocol, addresses and payload of an IP packet."""
    if packet[0] >> 4 == 4:
        length = (packet[0] & 15) * 4
        family, addresses = socket.AF_INET, (packet[12:16], packet[16:20])
        tos, protocol, payload = packet[1], packet[9], packet[length:]
    else:
        (head,) = struct.unpack(">I", packet[:4])
        family, addresses = socket.AF_INET6, (packet[8:24], packet[24:40])
        tos, protocol, payload = head >> 20 & 255, packet[6], packet[40:]
    return tos >> 2, protocol, [socket.inet_ntop(family, address) for address in addresses], payload


def note(packet):
    dscp, protocol, (source, destination), payload = ip(packet)
    name, ports = "other", (0, 0)
    if protocol in (6, 17):
        ports = struct.unpack(">HH", payload[:4])
        name = "tcp" if protocol == 6 else "udp"
    if protocol == 17 and ports[1] == 4791:
        # The base transport header: the queue pair is in its bytes 5 to 7. The source port is a
        # hash.
        (pair,) = struct.unpack(">I", payload[12:16])
        name, ports = ("cm" if pair & 0xFFFFFF == 1 else "roce"), (0, 4791)
    flows[name, f"{source}:{ports[0]}", f"{destination}:{ports[1]}", dscp] += 1


signal.signal(signal.SIGTERM, finish)
wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
wire.bind((sys.argv[1], 0))
open(sys.argv[2], "w").close()
while True:
    packet, (_, kind, direction, *_) = wire.recvfrom(65536)
    if kind in (0x0800, 0x86DD) and direction != socket.PACKET_OUTGOING and len(packet) >= 28:
        note(packet)
