# limit: 600
# Over RDMA: verified I/O of all sizes and depths.
over_rdma 070-fio-verify
