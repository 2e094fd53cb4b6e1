# limit: 240
# Header and data digests, in all four combinations, with data verified.
serve 128
for options in "" "--hdr-digest" "--data-digest" "--hdr-digest --data-digest"; do
    # shellcheck disable=SC2086
    connect_and_find "$NQN" $options
    fio_verify "$DEV" "digest" --rw=randwrite --bsrange=4k-128k --iodepth=16 --size=24M
    disconnect "$NQN"
done
