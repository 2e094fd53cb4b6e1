# limit: 500
# Over RDMA: Keep Alive.
over_rdma 150-keep-alive
