# limit: 500
# Over RDMA: a subsystem that is not there.
over_rdma 111-unknown-nqn
