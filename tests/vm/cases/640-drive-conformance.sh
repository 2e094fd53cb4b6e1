# The conformance suite of bdevs, which every module passes, on QEMU's drives through VFIO, with
# blocks of 512 and of 4096 bytes.
# hardware: drives
# limit: 900
nacre_only "it drives NVMe drives"

drives_up
"$NACRE" nvme bind "$SECOND"

step "the suite, on both namespaces"
RUST_BACKTRACE=1 "$CONFORMANCE" "$SECOND" 1 2

step "given back"
"$NACRE" nvme unbind "$SECOND"
wait_until 60 drive_is_live "$SECOND_SERIAL"
