# also: rdma
# An idle connection stays up beyond its keep-alive time.
serve 32
connect_and_find "$NQN" --keep-alive-tmo=2
sleep 7
is_live "$CTRL"
dmesg | grep -iE 'keep.?alive.*(fail|timed out)' && die "the host saw a keep-alive fail"
dd if="$DEV" of=/dev/null bs=4k count=4 iflag=direct status=none
