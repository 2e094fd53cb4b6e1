# also: rdma
# A subsystem that does not exist is refused, at once and without harm.
serve 32
connect_and_find "$NQN"
expect_failure connect "$NQN-nobody"
expect "controllers" "$(ctrl_of "$NQN-nobody" | wc -l)" 0
is_live "$CTRL"
dd if="$DEV" of=/dev/null bs=4k count=16 iflag=direct status=none
