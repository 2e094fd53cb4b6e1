# limit: 240
# ext4 made, mounted, filled, and its tree found whole after a reconnect.
filesystem_round mkfs.ext4 -q -F
