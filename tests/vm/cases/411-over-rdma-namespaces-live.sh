# limit: 500
# Over RDMA: namespaces come, go and grow.
over_rdma 100-namespaces-live
