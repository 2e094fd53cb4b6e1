# limit: 500
# Over RDMA: another file system.
over_rdma 081-xfs
