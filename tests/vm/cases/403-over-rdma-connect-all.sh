# limit: 500
# Over RDMA: connect-all.
over_rdma 030-connect-all
