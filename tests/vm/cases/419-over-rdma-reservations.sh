# limit: 600
# Over RDMA: two hosts coordinate by reservations.
over_rdma 175-reservations
