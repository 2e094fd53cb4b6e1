# limit: 500
# Over RDMA: discovery on its own port.
over_rdma 011-discover-8009
