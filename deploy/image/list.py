#!/usr/bin/env python3
"""Lists every file below a folder: mode, owner, size, SHA-256, path, and the target of a symbolic link.

Two builds of the image are compared by these lines, and a test reads them.
"""

import hashlib
import os
import stat
import sys


def line(path, shown):
    facts = os.lstat(path)
    size, digest, target = "-", "-", ""
    if stat.S_ISREG(facts.st_mode):
        size = facts.st_size
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    elif stat.S_ISLNK(facts.st_mode):
        target = " -> " + os.readlink(path)
    mode = stat.filemode(facts.st_mode)
    return f"{mode} {facts.st_uid}:{facts.st_gid} {size} {digest} {shown}{target}"


def main():
    root = sys.argv[1]
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            print(line(path, "/" + os.path.relpath(path, root)))


sys.stdout.reconfigure(errors="surrogateescape")
main()
