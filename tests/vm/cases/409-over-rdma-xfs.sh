# limit: 500
# Over RDMA: XFS through its life.
over_rdma 081-xfs
