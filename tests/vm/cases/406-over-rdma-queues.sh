# limit: 500
# Over RDMA: several queues, write and polled queues, small queues.
over_rdma 060-queues
