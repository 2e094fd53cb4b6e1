# limit: 500
# Over RDMA: the whole life of an XFS file system.
over_rdma 081-xfs
