# limit: 240
# also: rdma
# XFS is created, mounted and filled, and its tree is intact after a reconnect.
filesystem_round mkfs.xfs -q -f
