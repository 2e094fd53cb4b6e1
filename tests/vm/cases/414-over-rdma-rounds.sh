# limit: 900
# Over RDMA: connects and disconnects leave nothing behind.
ROUNDS=30
over_rdma 120-hundred-rounds
