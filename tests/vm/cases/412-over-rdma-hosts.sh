# limit: 500
# Over RDMA: hosts that may and may not.
over_rdma 110-hosts
