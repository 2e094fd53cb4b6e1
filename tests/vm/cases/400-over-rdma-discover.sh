# limit: 500
# Over RDMA: the discovery log.
over_rdma 010-discover
