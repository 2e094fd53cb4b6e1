#!/usr/bin/env python3
"""Talks to an emulated machine by a socket of QEMU.

guest.py type SOCKET TEXT     types the text, with escapes of Python, key by key
guest.py run SOCKET COMMAND   runs a command line in the test's shell, prints its output, ends with its exit code
"""

import re
import socket
import sys
import time

LIMIT_S = 300
END = re.compile(rb"=end (\d+)\r?\n")


def main():
    act, path, text = sys.argv[1:4]
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(LIMIT_S)
    line.connect(path)
    if act == "type":
        for key in text.encode().decode("unicode_escape"):
            line.sendall(key.encode())
            time.sleep(0.3)
        return 0
    line.sendall(text.encode() + b"\n")
    output = b""
    end = time.monotonic() + LIMIT_S
    while not END.search(output):
        line.settimeout(max(end - time.monotonic(), 0.1))
        piece = line.recv(65536)
        if not piece:
            sys.exit("the machine went off")
        output += piece
    sys.stdout.buffer.write(END.sub(b"", output))
    return int(END.search(output)[1])


if __name__ == "__main__":
    sys.exit(main())
