# limit: 500
# Over RDMA: admin commands beside a flood of data.
over_rdma 160-large-queue-flood
