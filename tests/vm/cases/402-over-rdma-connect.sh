# limit: 500
# Over RDMA: connect, identify, log pages, features and data.
over_rdma 020-connect
