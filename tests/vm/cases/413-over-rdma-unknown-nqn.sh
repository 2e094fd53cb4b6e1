# limit: 500
# Over RDMA: an unknown subsystem.
over_rdma 111-unknown-nqn
