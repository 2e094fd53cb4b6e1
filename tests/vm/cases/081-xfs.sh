# limit: 240
# XFS made, mounted, filled, and its tree found whole after a reconnect.
filesystem_round mkfs.xfs -q -f
