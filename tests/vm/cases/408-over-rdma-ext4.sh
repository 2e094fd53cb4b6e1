# limit: 500
# Over RDMA: the whole life of an ext4 file system.
over_rdma 080-ext4
