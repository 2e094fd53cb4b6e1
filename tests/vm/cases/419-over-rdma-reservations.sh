# limit: 600
# Over RDMA: two hosts agree by reservations.
over_rdma 175-reservations
