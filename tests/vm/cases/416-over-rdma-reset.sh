# limit: 500
# Over RDMA: controller resets under verified load.
over_rdma 140-reset
