# limit: 500
# Over RDMA: a file system through its life.
over_rdma 080-ext4
