# limit: 500
# Over RDMA: allowed and refused hosts.
over_rdma 110-hosts
