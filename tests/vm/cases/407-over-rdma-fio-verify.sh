# limit: 900
# Over RDMA: verified I/O of all sizes and depths.
# Soft-RoCE in an emulated machine moves a few MB/s.
MEDIUM=3M LARGE=24M
over_rdma 070-fio-verify
