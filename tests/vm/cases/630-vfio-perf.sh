# `nacre perf` owns a drive: it reads back its writes, and the kernel gets the drive back
# afterwards.
# hardware: drives
# limit: 600
nacre_only "it drives NVMe drives"

drives_up
"$NACRE" nvme bind "$SECOND"
perf() { "$NACRE" perf "pcie://$SECOND?nsid=$1" --json --quiet "${@:2}"; }

step "verified, on blocks of both sizes"
for nsid in 1 2; do
    perf $nsid --rw randrw --io-size-range 4k-64k --depth 16 --ios 400 --range 16m --verify >"$WORK/perf"
    jq -c '{nsid, errors, verification}' "$WORK/perf"
    expect "blocks that are wrong" "$(jq .verification.blocks_wrong "$WORK/perf")" 0
    [ "$(jq .verification.blocks_checked "$WORK/perf")" -gt 0 ] || die "nothing was compared"
done

step "a subsystem with several namespaces needs the id of one that exists"
expect_failure "$NACRE" perf "pcie://$SECOND" --ios 1
[[ $FAILURE == *"2 namespaces"* ]] || die "the refusal does not say why"
expect_failure "$NACRE" perf "pcie://$SECOND?nsid=3" --ios 1
expect_failure "$NACRE" perf "pcie://$FIRST" --ios 1
[[ $FAILURE == *"nacre nvme bind"* ]] || die "the refusal does not say what to do"

step "given back"
"$NACRE" nvme unbind "$SECOND"
wait_until 60 drive_is_live "$SECOND_SERIAL"
