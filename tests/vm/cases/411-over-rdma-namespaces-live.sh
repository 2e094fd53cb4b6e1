# limit: 500
# Over RDMA: namespaces are added, removed and resized.
over_rdma 100-namespaces-live
