# limit: 240
# XFS is created, mounted and filled, and its tree is intact after a reconnect.
filesystem_round mkfs.xfs -q -f
