# limit: 900
# Discard from the block layer to the medium, like 085-discard.sh, over RDMA.
over_rdma 085-discard
