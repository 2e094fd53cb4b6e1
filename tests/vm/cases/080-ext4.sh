# limit: 240
# also: rdma
# ext4 is created, mounted and filled, and its tree is intact after a reconnect.
filesystem_round mkfs.ext4 -q -F
