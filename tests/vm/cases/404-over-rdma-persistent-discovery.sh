# limit: 500
# Over RDMA: persistent discovery and its events.
over_rdma 040-persistent-discovery
