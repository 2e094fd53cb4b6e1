# limit: 420
# also: rdma
# Verified I/O from 4 KiB to 1 MiB at depths from 1 to 128, and everything mixed.
medium=8M large=64M
if at_length; then medium=24M large=160M; fi
# Soft-RoCE in an emulated machine moves a few MB/s.
[ "$TRTYPE" != rdma ] || medium=3M large=24M
serve 512
connect_and_find "$NQN"
for bs in 4k 16k 128k 1m; do
    for depth in 1 32 128; do
        case $bs-$depth in
            4k-1 | 16k-1) size=2M ;;
            1m-128) size=$large ;;
            *) size=$medium ;;
        esac
        fio_verify "$DEV" "w$bs-$depth" --rw=randwrite --bs=$bs --iodepth=$depth --size=$size
    done
done
fio_verify "$DEV" mixed --rw=randrw --rwmixread=60 --bsrange=4k-1m --bs_unaligned=0 --iodepth=64 --size=$large
fio_verify "$DEV" jobs --rw=randrw --bs=8k --iodepth=16 --numjobs=4 --size=8M --offset_increment=64M
fio_verify "$DEV" sequential --rw=write --bs=256k --iodepth=8 --size=64M
is_live "$CTRL"
