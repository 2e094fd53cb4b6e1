# limit: 500
# Over RDMA: admin commands during a flood of data.
over_rdma 160-large-queue-flood
