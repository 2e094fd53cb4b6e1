# limit: 500
# Over RDMA: several queues, write and polled queues, small ones.
over_rdma 060-queues
