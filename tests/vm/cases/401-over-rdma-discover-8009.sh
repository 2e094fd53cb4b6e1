# Over RDMA: the discovery service on its own port.
over_rdma 011-discover-8009
