# limit: 500
# Over RDMA: kill -9 under verified load.
over_rdma 090-kill-restart
