# limit: 500
# Over RDMA: two hosts at once.
over_rdma 130-two-hosts
